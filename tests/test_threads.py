"""Optimizers that step in threads, next to each other and to other compiled code, have the bits of one thread.

FLASHOPT_ROUNDS=50 repeats the rounds with many threads, each in a new process.
"""

import faulthandler
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn
from torch._inductor.output_code import CompiledFxGraph
from training import assert_identical, give_gradients, parameters, params_of, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

ROUNDS = int(os.environ.get("FLASHOPT_ROUNDS", "1"))
SHAPES = [(40, 64), (48,), (33, 40), (512, 160), (300, 250)]
JOBS: list[tuple[type[FlashOptimizer], dict[str, Any]]] = [
    (FlashAdamW, {}),
    (FlashAdamW, {}),  # the same kernel, needed by two threads at once
    (FlashLion, {}),
    (FlashSGD, {"momentum": 0.9}),
    (FlashAdamW, {"rounding": "nearest"}),
]
SECONDS = 400.0  # to wait for threads, which take 20 s on a quiet machine and 200 on a crowded one


class Threads:
    """Threads to wait for. The first error in one of them is raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        end = time.monotonic() + SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"a thread still runs after {SECONDS:.0f} seconds; where each is stands above")
        if self._errors:
            raise self._errors[0]


def add_one(c: Tensor) -> None:
    c.add_(1)


def test_what_another_thread_compiled_runs_as_often_as_it_is_called():
    """The other thread runs while our first step compiles, in a new process."""
    fresh.run(count_beside_a_first_step)


def count_beside_a_first_step() -> None:
    original = CompiledFxGraph.__call__
    counter = count_during_a_first_step()
    assert CompiledFxGraph.__call__ is original
    gc.collect()
    assert counter() is None, "the tensor of another thread is kept alive"


def count_during_a_first_step() -> weakref.ref[Tensor]:
    """A weak reference to the tensor that another thread increments."""
    compiled, c, calls = torch.compile(add_one), torch.zeros(16, dtype=torch.int64), 0
    compiled(torch.zeros(16, dtype=torch.int64))
    is_over = threading.Event()

    def count() -> None:
        nonlocal calls
        while not is_over.is_set():
            compiled(c)
            calls += 1
            time.sleep(0.001)

    threads = Threads()
    threads.start(count)
    train(FlashAdamW(parameters(SHAPES)), range(2))
    is_over.set()
    threads.join()
    assert calls > 10
    assert c.tolist() == [calls] * 16, f"called {calls} times, counted {c[0]}"
    return weakref.ref(c)


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_optimizers_in_threads_have_the_bits_of_one_thread(round_number: int):
    fresh.run(step_in_threads, round_number)


def new_optimizer(number: int, eager: bool = False) -> FlashOptimizer:
    kind, options = JOBS[number]
    return kind(parameters(SHAPES, seed=number), lr=1e-2, eager=eager, **options)


def step_in_threads(round_number: int) -> None:
    """Take first steps, then later ones in other threads, next to an eager optimizer and other compiled models."""
    moments, original = random.Random(round_number), CompiledFxGraph.__call__
    expected = [stored(train(new_optimizer(number, eager=True), range(6))) for number in range(len(JOBS))]
    neighbours = [compiled_counter(), compiled_training(), eager_steps()]
    is_over = threading.Event()
    beside = Threads()
    for neighbour in neighbours:
        beside.start(again_and_again, neighbour, is_over)
    optimizers = [new_optimizer(number) for number in range(len(JOBS))]
    for steps in (range(3), range(3, 6)):
        threads, ready = Threads(), threading.Barrier(len(JOBS))
        moments.shuffle(optimizers)
        for optimizer in optimizers:
            threads.start(step_when_ready, optimizer, steps, ready, moments.uniform(0, 0.05))
        threads.join()
    is_over.set()
    found = [stored(optimizer) for optimizer in optimizers]
    for number, tensors in enumerate(expected):
        assert any(all(map(torch.equal, tensors, each)) for each in found), f"optimizer {number} has other bits"
    beside.join()
    assert CompiledFxGraph.__call__ is original


def step_when_ready(optimizer: FlashOptimizer, steps: range, ready: threading.Barrier, pause: float) -> None:
    ready.wait(SECONDS)
    time.sleep(pause)
    for step in steps:
        give_gradients(params_of(optimizer), step)
        optimizer.step()


def again_and_again(work: Callable[[], None], is_over: threading.Event) -> None:
    while not is_over.is_set():
        work()
        time.sleep(0.001)


def compiled_counter() -> Callable[[], None]:
    compiled, c = torch.compile(add_one), torch.zeros(16, dtype=torch.int64)

    def count() -> None:
        compiled(c.zero_())
        compiled(c)
        assert c.tolist() == [2] * 16, f"called twice, counted {c[0]}"

    count()
    return count


def compiled_training() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    compiled, x = torch.compile(model), torch.randn(16, 32)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def learn() -> list[Tensor]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    expected = learn()
    return lambda: assert_identical(learn(), expected)


def eager_steps() -> Callable[[], None]:
    """Our uncompiled optimizer must not be affected by compilation in the process."""

    def course() -> list[Tensor]:
        return stored(train(FlashAdamW(parameters([(33, 40), (64, 64)]), eager=True), range(3)))

    expected = course()
    return lambda: assert_identical(course(), expected)
