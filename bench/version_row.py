"""What `bench.matrix` asks of one torch, each in a process of its own: python -m bench.version_row QUESTION

The answer is the last line of output, as JSON.
"""

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch

from bench import fresh, peers, speed
from bench.machine import describe_machine
from bench.peers import resnet_shapes
from flashopt_compile import FlashAdamW, cli
from flashopt_compile.kernels.targets import TARGETS

CONVOLUTIONS = 33  # which make 300 tensors
CALLER_SHAPES = [(64, 64), (33, 50)]


def machine() -> str:
    return describe_machine()


def ratios() -> dict[str, float]:
    """Baseline time / our time of AdamW: one matrix of 16.7M elements, and 300 small tensors."""
    found = {}
    for work, shapes, baseline in (
        ("16.7M", [(4096, 4096)], peers.MIXED_ADAMW),
        ("300 small", resnet_shapes(CONVOLUTIONS), peers.FOREACH_ADAMW),
    ):
        comparison = speed.Comparison(work, shapes, peers.OUR_ADAMW, baseline, None)
        row = speed.race(comparison, speed.FULL, torch.device("cpu"))
        assert row.baseline_ms is not None and row.ours_ms is not None, row.note
        found[work] = row.baseline_ms / row.ours_ms
        found[f"{work} ms"] = row.ours_ms
    return found


def caller() -> dict[str, Any]:
    """A caller's torch.compile of `step`: seconds until the first step is done, and whether it has the eager bits."""

    def made(eager: bool) -> FlashAdamW:
        weights, gradients = peers.weights_and_gradients(CALLER_SHAPES, torch.bfloat16, torch.device("cpu"))
        peers.put_in_place(weights, gradients)
        return FlashAdamW(weights, eager=eager)

    ours, eager = made(eager=False), made(eager=True)
    begin = time.perf_counter()
    torch.compile(ours.step, fullgraph=True)()
    seconds = time.perf_counter() - begin
    eager.step()
    pairs = zip(ours.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True)
    return {"seconds": seconds, "same_bits": all(torch.equal(*pair) for pair in pairs)}


def kernels() -> dict[str, Any]:
    """AdamW's rows of `flashopt kernels`, by target."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = cli.main(["kernels", "--target", ",".join(TARGETS), "--json"])
    if code:
        raise RuntimeError(f"flashopt kernels ended with {code}")
    return {row["target"]: row for row in json.loads(printed.getvalue())}


def first_step() -> float:
    return fresh.first_step_seconds(CONVOLUTIONS)


QUESTIONS: dict[str, Callable[[], Any]] = {
    "machine": machine,
    "ratios": ratios,
    "caller": caller,
    "kernels": kernels,
    "first step": first_step,
}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(fresh.THREADS)
    print(json.dumps(QUESTIONS[arguments[0]]()))


if __name__ == "__main__":
    main(sys.argv[1:])
