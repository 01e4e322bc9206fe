"""What a caller's torch.compile(opt.step) costs beside a plain step (`python -m bench callers`)."""

import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.machine import describe_machine
from bench.speed_rows import Goal, Row, rounded, table
from flashopt_compile import FlashAdamW

WORKS = {
    "5 tensors of 256×256": [(256, 256)] * 5,
    "300 tensors of 64×64": [(64, 64)] * 300,
    "4096×4096": [(4096, 4096)],
}
FIRST_CALL_GOALS_S = {"5 tensors of 256×256": 2.0, "300 tensors of 64×64": 6.0}
STEPS = 200


def new_optimizer(shapes: list[tuple[int, ...]]) -> FlashAdamW:
    random = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=random).to(torch.bfloat16)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    return FlashAdamW(weights)


def first_call(work: str, how: str) -> None:
    """Print how many seconds the first step takes in this process, whose Inductor cache is warm or not."""
    torch.set_num_threads(2)
    optimizer = new_optimizer(WORKS[work])
    step = torch.compile(optimizer.step, fullgraph=True) if how == "compiled" else optimizer.step
    begin = time.perf_counter()
    step()
    print(time.perf_counter() - begin)


def first_calls_s(work: str, repeats: int) -> tuple[float, float]:
    """The least of several first calls, plain and by a caller's compile, each in a process of its own."""
    found: dict[str, list[float]] = {"plain": [], "compiled": []}
    for _ in range(repeats):
        for how, times_s in found.items():
            code = f"from bench.callers import first_call; first_call({work!r}, {how!r})"
            done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            times_s.append(float(done.stdout.splitlines()[-1]))
    return min(found["plain"]), min(found["compiled"])


def race(work: str, steps: int) -> Row:
    """Plain and compiled steps in turn under OneCycleLR, and how many graphs the caller's compile has made."""
    graphs = 0
    inductor = torch._dynamo.lookup_backend("inductor")

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return inductor(graph, inputs)

    optimizers = new_optimizer(WORKS[work]), new_optimizer(WORKS[work])
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, 1e-3, total_steps=steps + 1) for each in optimizers]
    calls = optimizers[0].step, torch.compile(optimizers[1].step, fullgraph=True, backend=counting)
    times_ms: tuple[list[float], list[float]] = ([], [])
    for number in range(steps):
        for call, times in zip(calls, times_ms, strict=True):
            begin = time.perf_counter()
            call()
            if number > 2:
                times.append(1e3 * (time.perf_counter() - begin))
        for schedule in schedules:
            schedule.step()
    plain, compiled = (median(times) if steps > 50 else min(times) for times in times_ms)
    return Row(
        f"a step by the caller's compile, {work}",
        "plain opt.step()",
        goal=Goal("≤", 1.1),
        baseline_ms=plain,
        ours_ms=compiled,
        figure=compiled / plain,
        rounds=steps,
        note=f"{work}: {graphs} graphs in {steps} steps under OneCycleLR",
    )


def measure(quick: bool = False) -> list[Row]:
    works = list(WORKS)[:1] if quick else list(WORKS)
    rows = [race(work, 6 if quick else STEPS) for work in works]
    for work in [] if quick else FIRST_CALL_GOALS_S:
        plain_s, compiled_s = first_calls_s(work, 3)
        rows.append(
            Row(
                f"first call by the caller's compile, {work}, warm cache",
                "plain opt.step()",
                goal=Goal("≤", FIRST_CALL_GOALS_S[work]),
                baseline_ms=1e3 * plain_s,
                ours_ms=1e3 * compiled_s,
                figure=compiled_s - plain_s,
                unit="s more",
                note=f"{work}: first call {rounded(compiled_s)} s instead of {rounded(plain_s)} s",
            )
        )
    return rows


def main(quick: bool = False) -> None:
    torch.set_num_threads(2)
    print(f"{describe_machine()}, torch {torch.__version__}\n\n{table(measure(quick))}\n")
