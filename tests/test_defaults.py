"""torch's default dtype and device belong to the caller. None of our tensors follows them, and no bit changes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from training import assert_identical, give_gradients, params_of, stored

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW

KINDS: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "FlashAdamW": (FlashAdamW, {}),
    "FlashAdam": (FlashAdam, {"weight_decay": 0.1}),
    "FlashLion": (FlashLion, {}),
    "FlashSGD": (FlashSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "FlashSGDW": (FlashSGDW, {"momentum": 0.9}),
}
# Small parameters, which share a pack; a large one; large ones with ragged rows and with another layout.
SHAPES = [(40, 64), (33, 50), (7,), (512, 160), (300, 250)]
TRANSPOSED = (256, 288)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "with meta": lambda: torch.device("meta"),
    "default meta": lambda: default_device("meta"),
}
# Which of constructor, first step and later steps run under other defaults.
MOMENTS = {
    "always": (True, True, True),
    "construction": (True, False, False),
    "first step": (False, True, False),
    "later steps": (False, False, True),
}


def weights(dtype: torch.dtype) -> list[Parameter]:
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]
    values.append(torch.randn(TRANSPOSED, generator=random).to(dtype).t())
    return [Parameter(value) for value in values]


def trajectory(
    kind: str,
    eager: bool,
    defaults: Callable[[], AbstractContextManager[Any]] = nullcontext,
    moments: tuple[bool, bool, bool] = (True, True, True),
    dtype: torch.dtype = torch.bfloat16,
    warm: bool = False,
) -> list[Tensor]:
    """Weights and states after four steps. `moments` run under `defaults`."""
    make, options = KINDS[kind]
    at_construction, first, later = (defaults if moment else nullcontext for moment in moments)
    params = weights(dtype)
    with at_construction():
        optimizer = make(params, lr=1e-2, eager=eager, **options)
        if warm:
            optimizer.warmup(verbose=False)
    for number in range(4):
        give_gradients(params, number)
        with later() if number else first():
            optimizer.step()
    return stored(optimizer)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_eager_steps_have_the_same_bits_under_other_defaults(kind: str, defaults: str, moments: str):
    ours = trajectory(kind, True, DEFAULTS[defaults], MOMENTS[moments])
    assert_identical(ours, trajectory(kind, True))


def assert_like_eager(kind: str, name: str, moments: str, **options: Any) -> None:
    ours = trajectory(kind, False, DEFAULTS[name], MOMENTS[moments], **options)
    assert_identical(ours, trajectory(kind, True, dtype=options.get("dtype", torch.bfloat16)))


def test_later_compiled_steps_have_the_same_bits_under_other_defaults():
    """Run in a new process, since a bad pointer would crash it."""
    fresh.run(step_later_under_all_defaults)


def step_later_under_all_defaults() -> None:
    for kind in KINDS:
        for name in DEFAULTS:
            print(kind, name, flush=True)
            assert_like_eager(kind, name, "later steps")


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_kernels_compiled_under_other_defaults_have_the_same_bits(defaults: str):
    """Run in a new process, so that every kernel is compiled under them: one by `warmup`, others by a first step."""
    fresh.run(compile_under, defaults)


def compile_under(name: str) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("FlashAdamW", "construction", {"warm": True, "dtype": torch.float32}),
        *((kind, moments, {}) for kind in ("FlashLion", "FlashSGD") for moments in ("first step", "always")),
    ]
    wrong = []
    for kind, moments, options in cases:
        try:
            assert_like_eager(kind, name, moments, **options)
        except Exception as error:
            wrong.append(f"{kind}, {moments}, {options}: {type(error).__name__} {str(error).strip()}".splitlines()[0])
    assert not wrong, "\n".join(wrong)


def test_a_model_built_under_a_default_dtype_learns():
    """Run in a new process. Like a caller, it sets the default before making the model and keeps it."""
    fresh.run(learn_under_bfloat16)


def learn_under_bfloat16() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Linear(64, 64)
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses  # and not NaN


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_checkpoints_and_reports_are_the_same_under_other_defaults(defaults: str, compress: bool):
    def course(context: Callable[[], AbstractContextManager[Any]]) -> tuple[list[Tensor], list[Any]]:
        optimizer, other = (
            FlashAdamW(weights(torch.bfloat16), eager=True, compress_state_dict=compress) for _ in range(2)
        )
        give_gradients(params_of(optimizer), 0)
        optimizer.step()
        with context():
            other.load_state_dict(optimizer.state_dict())
            reports = [optimizer.health(), optimizer.memory()]
        give_gradients(params_of(other), 1)
        other.step()
        return stored(other), reports

    ours, expected = course(DEFAULTS[defaults]), course(nullcontext)
    assert_identical(ours[0], expected[0])
    assert ours[1] == expected[1]
