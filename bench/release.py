"""What gradient release saves of a whole process's memory, and what it costs in time (`python -m bench release`).

python -m bench.release OPTIMIZER WIDTH LAYERS    prints the peak of one process
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench import fresh
from bench.machine import describe_machine
from bench.speed_rows import Row, table
from bench.transformer import Plan, Shape, batches, loss_of, new_model, standard_library
from flashopt_compile import FlashAdamW, enable_gradient_release

CLIP = 1.0
WARM_UP_STEPS, MEASURED_STEPS = 2, 3
TOKENS = 4  # few, so that activations are nothing beside the rest
EMPTY = 64, 2  # width and layers of the model in what counts as an empty process
# The C library gives large tensors back as soon as they are freed, and not only some of them.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Way:
    """A way to train: the optimizer, the dtype of weights and gradients, and what releases gradients, if anything."""

    optimizer: Callable[..., Any]
    dtype: torch.dtype
    release: Callable[..., Any] | None = None


WAYS = {
    "torch AdamW, fp32": Way(torch.optim.AdamW, torch.float32),
    "FlashAdamW, bf16": Way(FlashAdamW, torch.bfloat16),
    "FlashAdamW, bf16, gradients released": Way(FlashAdamW, torch.bfloat16, enable_gradient_release),
}


@dataclass(frozen=True)
class Size:
    """What is measured: a model of square layers for memory, a transformer for time, and how many rounds."""

    width: int
    layers: int
    plan: Plan
    rounds: int

    @property
    def parameters(self) -> int:
        return self.width**2 * self.layers


FULL = Size(2048, 24, Plan(batch=8, shape=Shape(width=512, layers=4, heads=8)), 12)
QUICK = Size(256, 2, Plan(batch=1, shape=Shape(width=32, layers=1, heads=1, context=8)), 2)


def peak_bytes(way: Way, width: int, layers: int) -> int:
    """The peak of this process's memory over some training steps, after others have compiled."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=way.dtype) for _ in range(layers)))
    optimizer = way.optimizer(model.parameters())
    handle = way.release(model, optimizer) if way.release else None
    inputs = torch.randn(TOKENS, width, generator=random).to(way.dtype)
    for step in range(WARM_UP_STEPS + MEASURED_STEPS):
        if step == WARM_UP_STEPS:
            gc.collect()
            fresh.forget_peak()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return fresh.status_bytes("VmHWM")


def ask(name: str, width: int, layers: int) -> int:
    """Ask a new process for its peak."""
    command = [sys.executable, "-m", "bench.release", name, str(width), str(layers)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, cwd=fresh.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def memory_rows(size: Size) -> list[Row]:
    """The peak of each way to train beside that of a process that trains next to nothing in the same way."""
    rows = []
    for name in WAYS:
        peak, empty = ask(name, size.width, size.layers), ask(name, *EMPTY)
        per_parameter = (peak - empty) / (size.parameters - EMPTY[0] ** 2 * EMPTY[1])
        note = f"{name}: {peak / 2**20:,.0f} MiB at most, an empty process {empty / 2**20:,.0f} MiB"
        work = f"peak memory, {size.parameters / 1e6:.1f}M parameters, {name}"
        rows.append(Row(work, figure=per_parameter, unit="bytes per parameter", rounds=MEASURED_STEPS, note=note))
    return rows


def training(plan: Plan, clip_mode: str | None, is_released: bool) -> Callable[[Tensor], None]:
    """A training step of a new model, clipped unless the mode is None."""
    model = new_model(plan.shape, seed=0).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters())
    if is_released:
        limits: dict[str, Any] = {"clip_norm": CLIP, "clip_mode": clip_mode} if clip_mode else {}
        handle = enable_gradient_release(model, optimizer, **limits)

    def step(batch: Tensor) -> None:
        loss = loss_of(model, batch)
        if is_released:
            handle.backward(loss)
        else:
            loss.backward()
            if clip_mode:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_rows(size: Size) -> list[Row]:
    """The time of a training step with released gradients beside that of an ordinary one, taken in turn."""
    rows = []
    for mode, what in {None: "not clipped", "previous": "clip_mode='previous'", "exact": "clip_mode='exact'"}.items():
        steps = [training(size.plan, mode, is_released) for is_released in (False, True)]
        times_ms: list[list[float]] = [[], []]
        for number, batch in enumerate(batches(standard_library().training, size.plan, size.rounds + 2, seed=0)):
            for step, times in zip(steps, times_ms, strict=True):
                begin = time.perf_counter()
                step(batch)
                if number >= 2:  # the first two compile
                    times.append(1e3 * (time.perf_counter() - begin))
        ordinary, released = map(min, times_ms)
        work = f"a training step with gradients released, {what}"
        baseline = "loss.backward(), clip_grad_norm_" if mode else "loss.backward()"
        rows.append(Row(work, baseline, baseline_ms=ordinary, ours_ms=released, rounds=size.rounds))
    return rows


def measure(quick: bool = False) -> list[Row]:
    size = QUICK if quick else FULL
    memory = memory_rows(size) if fresh.CLEAR_REFS.exists() else []
    return [*memory, *time_rows(size)]


def main(quick: bool = False) -> None:
    torch.set_num_threads(fresh.THREADS)
    print(f"{describe_machine()}\n\n{table(measure(quick))}\n")


def answer(arguments: Sequence[str]) -> None:
    torch.set_num_threads(fresh.THREADS)
    print(peak_bytes(WAYS[arguments[0]], *map(int, arguments[1:])))


if __name__ == "__main__":
    answer(sys.argv[1:])
