"""A step interrupted at any line has happened for a parameter or not: count, weight and states agree.

FLASHOPT_EVERY_LINE=1 tries every line that a step runs, not only some of them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from training import assert_identical, give_gradients, stored, train

import flashopt_compile
import quant
from flashopt_compile import FlashAdamW, FlashOptimizer

EVERY_LINE = os.environ.get("FLASHOPT_EVERY_LINE") == "1"
INTERRUPTS = 25  # otherwise tried, spread over the lines of a step
OUR_FILES = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (flashopt_compile, quant))
# Small parameters, which share a pack; a large one; large ones with ragged rows and with another layout.
SHAPES = [(40, 64), (48,), (33, 40), (512, 160), (300, 250)]
TRANSPOSED = (256, 288)

Trace = Callable[[FrameType, str, Any], Any]


class Lines:
    """Counts the lines run in our own files and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.passed = 0
        self.where = ""
        self._at = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        if not frame.f_code.co_filename.startswith(OUR_FILES):
            return None
        if event == "line":
            self.passed += 1
            if self.passed == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)


def new_optimizer(eager: bool) -> FlashOptimizer:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random).bfloat16() for shape in SHAPES]
    values.append(torch.randn(TRANSPOSED, generator=random).bfloat16().t())
    return FlashAdamW([Parameter(value) for value in values], lr=1e-2, eager=eager)


def params_of(optimizer: FlashOptimizer) -> list[Parameter]:
    return optimizer.param_groups[0]["params"]


def held(optimizer: FlashOptimizer) -> list[dict[str, Tensor]]:
    """Copies of each parameter's weight and states, if these exist yet."""
    return [
        {"weight": p.detach().clone(), **{key: value.clone() for key, value in optimizer.state.get(p, {}).items()}}
        for p in params_of(optimizer)
    ]


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ. A missing state equals zeros."""
    zero = torch.zeros(())
    return [key for key in {**found, **expected} if not equal(found.get(key, zero), expected.get(key, zero))]


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*torch.broadcast_tensors(one, other))


def prepared(eager: bool, steps_before: int) -> FlashOptimizer:
    optimizer = train(new_optimizer(eager), range(steps_before))
    give_gradients(params_of(optimizer), steps_before)
    return optimizer


def interrupted(eager: bool, steps_before: int, at: int) -> tuple[FlashOptimizer, str]:
    """An optimizer whose step was interrupted, and where. Empty if the step ended before that line."""
    optimizer = prepared(eager, steps_before)
    with Lines(at) as lines:
        try:
            optimizer.step()
        except KeyboardInterrupt:
            pass
    return optimizer, lines.where


@pytest.mark.parametrize("steps_before", [0, 1, 3], ids=["first step", "second step", "later step"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_step_interrupted_at_any_line_is_complete_or_absent_for_each_parameter(eager: bool, steps_before: int):
    train(new_optimizer(eager), range(4))  # compiles all kernels
    course = prepared(eager, steps_before)
    before = held(course)
    with Lines() as lines:
        course.step()
    after, total = held(course), lines.passed
    again = stored(train(course, range(steps_before + 1, steps_before + 3)))
    assert total > 10
    wrong = []
    stride = 1 if EVERY_LINE else max(1, total // INTERRUPTS)
    for at in range(1, total + 1, stride):
        optimizer, where = interrupted(eager, steps_before, at)
        if not where:
            continue
        found = held(optimizer)
        for number, (now, old, new) in enumerate(zip(found, before, after, strict=True)):
            if differing(now, old) and differing(now, new):
                wrong.append(
                    f"{where}: parameter {number} is neither before the step ({differing(now, old)} changed) "
                    f"nor after it ({differing(now, new)} missing)"
                )
        taken = {not differing(now, old) for now, old in zip(found, before, strict=True)}
        if not eager:
            # A compiled step on a CPU is all or nothing. If it did not happen, take it again.
            if len(taken) > 1:
                wrong.append(f"{where}: some parameters have taken the step and others have not")
            elif taken == {True}:
                give_gradients(params_of(optimizer), steps_before)
                optimizer.step()
            if not any(where in each for each in wrong):
                try:
                    assert_identical(stored(train(optimizer, range(steps_before + 1, steps_before + 3))), again)
                except Exception as error:
                    wrong.append(f"{where}: the steps that follow differ: {type(error).__name__}")
    assert not wrong, f"{len(wrong)} of {len(range(1, total + 1, stride))}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_step_that_fails_in_a_hook_or_closure_changes_nothing(eager: bool):
    optimizer = prepared(eager, 2)
    before = stored(optimizer)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        optimizer.step(fails)
    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no loss today"):
        optimizer.step()
    hook.remove()
    assert_identical(stored(optimizer), before)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_ctrl_c_while_the_first_step_compiles_leaves_a_clean_start(seconds: float, tmp_path: Path):
    """Send a real signal to a process without cached kernels. It can then take the step as if for the first time."""
    process = subprocess.Popen(
        fresh.command(be_interrupted, flags=["-u"]),
        env=fresh.environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)),
        cwd=fresh.TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stepping\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    assert "interrupted" in output, "the signal came too late to prove anything"


def be_interrupted() -> None:
    optimizer = prepared(False, 0)
    before = held(optimizer)
    print("stepping")
    try:
        optimizer.step()
        print("done")
    except KeyboardInterrupt:
        print("interrupted")
        for number, (now, old) in enumerate(zip(held(optimizer), before, strict=True)):
            assert not differing(now, old), f"parameter {number} has changed: {differing(now, old)}"
        optimizer.step()
    train(optimizer, range(1, 3))
    assert_identical(stored(optimizer), stored(train(new_optimizer(True), range(3))))
