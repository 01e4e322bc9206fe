"""Host time of a GPU's step, without a GPU: `python -m bench host`.

Steps run on CPU tensors as on a pretended GPU (`bench.pretended`), where launches and copies do nothing. What is left
is what Python does in a step. For torch's AdamW on the same tensors, the functions that would launch its kernels do
nothing either; all that its Python code does around them is left.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench import pretended
from bench.fresh import ROOT
from bench.machine import describe_machine
from bench.peers import ADAMW, resnet_shapes
from bench.speed_rows import Goal, Row, table
from flashopt_compile import FlashAdamW
from flashopt_compile.kernels import pretend

LARGE = (288, 256)  # 73,728 elements
FEW, MANY = 8, 40  # large parameters; the difference of two models leaves out what a step takes once
# What torch's multi_tensor_apply takes in one launch of copies, at most: tensors, and chunks of 65,536 elements
# (ATen/native/cuda/MultiTensorApply.cuh of torch 2.13, depth 2), by how torch was built.
FOREACH_LIMITS = {"CUDA 13": (448, 2240), "CUDA 12, ROCm": (64, 320)}
CHUNK = 65536
Shapes = Sequence[tuple[int, ...]]


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter)
    return found


def is_fast(pair: tuple[Tensor, Tensor]) -> bool:
    """Whether torch copies a pair of tensors in one launch with others: both dense, with the same strides."""
    one, other = pair
    return one.is_contiguous() and other.is_contiguous() and one.dtype == other.dtype


def launches_of_copies(targets: Sequence[Tensor], sources: Sequence[Tensor], build: str) -> int:
    """The kernels that a GPU launches for `torch._foreach_copy_`."""
    pairs = list(zip(targets, sources, strict=True))
    if not all(map(is_fast, pairs)) or len({each.dtype for each in targets}) > 1:
        return len(pairs)  # one by one
    most_tensors, most_chunks = FOREACH_LIMITS[build]
    launches = tensors = chunks = 0
    for target in targets:
        own = -(-target.numel() // CHUNK)
        if tensors == most_tensors or chunks + own > most_chunks:
            launches, tensors, chunks = launches + 1, 0, 0
        tensors, chunks = tensors + 1, chunks + own
    return launches + bool(tensors)


@contextlib.contextmanager
def no_copies() -> Iterator[None]:
    with mock.patch.object(torch, "_foreach_copy_", "".format):
        yield


def step_us(step: Callable[[], Any], steps: int) -> float:
    """The median time of a step."""
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - begin))
    return median(times)


def ours_us(shapes: Shapes, steps: int) -> float:
    """Our step, whose launches and copies do nothing."""
    with pretended.device(pretended.Device()):
        optimizer = FlashAdamW(parameters(shapes), **ADAMW)
        optimizer.step()
        with no_copies():
            return step_us(optimizer.step, steps)


def launches(shapes: Shapes) -> dict[str, int]:
    """The launches of our step, copies included, by how torch was built."""
    counts = dict.fromkeys(FOREACH_LIMITS, 0)
    kernels: list[str] = []

    def runner(name: str, text: str) -> pretended.Runner:
        return lambda *_: kernels.append(name)

    def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for build in counts:
            counts[build] += launches_of_copies(targets, sources, build)

    with pretended.device(pretended.Device(runner)):
        optimizer = FlashAdamW(parameters(shapes), **ADAMW)
        optimizer.step()
        kernels.clear()
        with mock.patch.object(torch, "_foreach_copy_", copy):
            optimizer.step()
    return {build: count + len(kernels) for build, count in counts.items()}


def theirs_us(shapes: Shapes, steps: int, how: str) -> float:
    """torch's AdamW, whose launches do nothing."""
    options: dict[str, Any] = {**ADAMW, how: True}
    optimizer = torch.optim.AdamW(parameters(shapes), **options)
    optimizer.step()
    with contextlib.ExitStack() as stack:
        names = [name for name in dir(torch) if name.startswith(("_foreach_", "_fused_adam"))]
        for name in names:
            stack.enter_context(mock.patch.object(torch, name, lambda tensors, *_, **__: tensors))
        return step_us(optimizer.step, steps)


def measure(quick: bool = False) -> list[Row]:
    steps, (few, many), small = (4, (1, 2), 4) if quick else (300, (FEW, MANY), 300)
    between = f"{few} to {many} parameters of {LARGE[0]}×{LARGE[1]}"
    rows = []

    def per_parameter(name: str, us: Callable[[Shapes], float], goal: Goal | None = None) -> None:
        least, most = us([LARGE] * few), us([LARGE] * many)
        each = (most - least) / (many - few)
        rows.append(
            Row(
                f"host time per large parameter, {name}",
                goal=goal,
                figure=each,
                unit="µs",
                rounds=steps,
                note=f"{name}: {most:.0f} µs for a step of {many}, {most - many * each:.0f} µs of it once; {between}",
            )
        )

    per_parameter("bound launches", lambda shapes: ours_us(shapes, steps), Goal("≤", 4.0))
    for how in ("fused", "foreach"):
        per_parameter(f"torch AdamW, {how}", lambda shapes, how=how: theirs_us(shapes, steps, how))
    networks: dict[str, Shapes] = {f"{small} tensors of 64×64": [(64, 64)] * small}
    if not quick:
        networks["300 tensors of a ResNet"] = resnet_shapes(33)
    for name, shapes in networks.items():
        count = launches(shapes)
        told = ", ".join(f"{each} launches (torch for {build})" for build, each in count.items())
        rows.append(
            Row(
                f"host time of a step, {name}",
                goal=Goal("≤", 150.0),
                figure=ours_us(shapes, steps),
                unit="µs",
                rounds=steps,
                note=f"{name}: {told}",
            )
        )
        rows += [
            Row(f"launches of a step, {name}, torch for {build}", goal=Goal("≤", 8.0), figure=float(each), unit="")
            for build, each in count.items()
        ]
        for how in ("fused", "foreach"):
            time_us = theirs_us(shapes, steps, how)
            rows.append(
                Row(f"host time of a step, {name}, torch AdamW, {how}", figure=time_us, unit="µs", rounds=steps)
            )
    return rows


def main(quick: bool = False, out: Path | None = None) -> None:
    """Measure and print; write host.json to `out`, by default to bench/results."""
    try:
        pretend.check_versions()
    except pretend.UncheckedVersion as error:
        print(f"bench host: skipped, as {error}")
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = measure(quick)
    finally:
        torch.set_num_threads(threads)
    print(f"{describe_machine()}\n\n{table(rows)}\n")
    folder = out or (ROOT / ".cache" / "bench" if quick else ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    found = {"date": date.today().isoformat(), "machine": describe_machine(), "rows": [row.record() for row in rows]}
    (folder / "host.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
