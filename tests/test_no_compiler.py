"""If torch cannot or may not compile, steps run eagerly with the same bits, and one warning says why."""

import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer

SHAPES = [(40, 64), (33, 50), (7,), (512, 160), (300, 250)]
STANCES = ["fail_on_recompile", "force_eager"]


def expected(kind: type[FlashOptimizer] = FlashAdamW, steps: int = 3) -> list[Tensor]:
    return stored(train(kind(parameters(SHAPES), eager=True), range(steps)))


def steps_with_one_warning(*reasons: str) -> None:
    """Assert that steps have the eager bits and give one warning, which contains any of `reasons`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = train(FlashAdamW(parameters(SHAPES)), range(3))
    assert_identical(stored(optimizer), expected())
    ours = [each for each in caught if "eager" in str(each.message).lower()]
    told = [f"{each.category.__name__}: {each.message}" for each in ours]
    assert len(ours) == 1, told
    assert issubclass(ours[0].category, RuntimeWarning | UserWarning), told
    text = str(ours[0].message)
    assert any(reason.lower() in text.lower() for reason in reasons), told
    assert "slow" in text.lower(), told


@pytest.fixture
def path_without_compilers(tmp_path: Path) -> str:
    assert not any(shutil.which(name, path=str(tmp_path)) for name in ("g++", "gcc", "clang++", "c++"))
    return str(tmp_path)


def test_without_a_compiler_steps_run_eagerly(path_without_compilers: str, tmp_path: Path):
    variables = {"PATH": path_without_compilers, "CXX": None, "CC": None}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    fresh.run(steps_with_one_warning, "compiler", "C++", variables={**variables, **cache})


def test_with_a_compiler_that_fails_steps_run_eagerly(tmp_path: Path):
    failing = tmp_path / "g++"
    failing.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 1\n")
    failing.chmod(0o755)
    variables = {"CXX": str(failing), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    fresh.run(steps_with_one_warning, "compiler", "C++", "g++", variables=variables)


def test_with_compiling_switched_off_steps_run_eagerly():
    fresh.run(steps_with_one_warning, "TORCH_COMPILE_DISABLE", variables={"TORCH_COMPILE_DISABLE": "1"})


@pytest.mark.parametrize("stance", STANCES)
def test_under_a_stance_that_forbids_compiling_steps_run_eagerly(stance: str):
    fresh.run(step_under, stance)


def step_under(stance: str) -> None:
    torch.compiler.set_stance(stance)  # pyright: ignore[reportArgumentType]
    steps_with_one_warning("stance", stance)


@pytest.mark.parametrize("stance", STANCES)
def test_a_stance_that_comes_and_goes_changes_no_bits(stance: str):
    """One optimizer compiles before the stance, another under it, and both continue after it."""
    fresh.run(step_before_under_and_after, stance)


def step_before_under_and_after(stance: str) -> None:
    def course(kind: type[FlashOptimizer], under: tuple[bool, ...]) -> list[Tensor]:
        optimizer = kind(parameters(SHAPES))
        for step, is_under in enumerate(under):
            context: Callable[[], AbstractContextManager[Any]] = nullcontext
            if is_under:
                context = lambda: torch.compiler.set_stance(stance)  # pyright: ignore  # noqa: E731
            with context():
                train(optimizer, range(step, step + 1))
        return stored(optimizer)

    assert_identical(course(FlashAdamW, (False, True, False, True)), expected(steps=4))
    assert_identical(course(FlashLion, (True, True, False, False)), expected(FlashLion, steps=4))


def test_compiling_works_with_warnings_as_errors(tmp_path: Path):
    """With an empty cache and `python -W error`: torch's warnings during compilation must not reach the caller."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    fresh.run(step_and_compare, flags=["-W", "error"], variables=variables)


def step_and_compare() -> None:
    assert_identical(stored(train(FlashAdamW(parameters(SHAPES)), range(3))), expected())


def test_compiling_does_not_warn():
    fresh.run(step_without_warnings)


def step_without_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_and_compare()
    assert not caught, [f"{each.category.__name__}: {each.message}" for each in caught]


def test_eager_by_choice_does_not_warn(path_without_compilers: str):
    fresh.run(step_eagerly_without_warnings, variables={"PATH": path_without_compilers, "CXX": None})


def step_eagerly_without_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(FlashAdamW(parameters(SHAPES), eager=True), range(3))
    assert not caught, [f"{each.category.__name__}: {each.message}" for each in caught]
