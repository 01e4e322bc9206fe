"""Memory: steps leak none, and dropped objects are freed at once, without the cyclic garbage collector.

Each case runs in a new process with `gc.disable()` and reads its resident memory. FLASHOPT_STEPS=2000 takes more steps.
"""

import copy
import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

STEPS = int(os.environ.get("FLASHOPT_STEPS", "100"))
SETTLED = 50  # memory may not grow after this many steps
MIB = 2**20
ALLOWED = 2 * MIB
# All but the small ones exceed 65,536 elements, above which parameters are not packed. A tensor or block leaked by
# each step then shows soon.
LAYOUTS: dict[str, list[tuple[tuple[int, ...], str]]] = {
    "contiguous": [((512, 256), "contiguous")],
    "ragged": [((200, 784 + 16), "contiguous"), ((400, 301), "contiguous")],
    "long ragged rows": [((2, 70_001), "contiguous"), ((100_003,), "contiguous")],
    "channels last": [((128, 100, 3, 3), "channels_last")],
    "transposed": [((512, 256), "transposed"), ((400, 301), "transposed")],
    "small": [((64, 64), "contiguous"), ((33, 50), "contiguous"), ((7,), "contiguous"), ((), "contiguous")] * 20,
    "small transposed": [((96, 64), "transposed"), ((50, 33), "transposed")] * 20,
    "large": [((2100, 2048), "contiguous"), ((4200, 1000), "contiguous")],
}
ALL = [layout for layout in LAYOUTS if layout != "large"]
OPTIONS: list[dict[str, Any]] = [
    {"rounding": "nearest"},
    {"master_weight_bits": 32},
    {"master_weight_bits": None},
    {"quantize": False},
    {"maximize": True},
]
# Besides layouts: options (one parameter group each), dtypes of weights and gradients, and changes at each step.
CASES: dict[str, dict[str, Any]] = {
    **{layout: {"layouts": [layout]} for layout in LAYOUTS},
    "options": {"layouts": ["contiguous", "ragged", "small"], "options": OPTIONS},
    "fp32 weights": {"layouts": ALL, "dtype": "float32"},
    "fp32 weights with 16-bit gradients": {"layouts": ALL, "dtype": "float32", "grads": "bfloat16"},
    "fp16 weights": {"layouts": ALL, "dtype": "float16"},
    "transposed gradients": {"layouts": ["contiguous", "ragged", "small"], "changes": ["transpose"]},
    "schedule and new gradients": {"layouts": ALL, "changes": ["schedule", "renew"]},
    "gradients that come and go": {"layouts": ["contiguous", "ragged", "small"], "changes": ["freeze"]},
    "eager": {"layouts": ALL, "eager": True},
    "FlashLion": {"layouts": ALL, "kind": "FlashLion"},
    "FlashSGD": {"layouts": ALL, "kind": "FlashSGD", "options": [{"momentum": 0.9}]},
    "FlashAdam": {"layouts": ALL, "kind": "FlashAdam", "options": [{"weight_decay": 0.1}]},
}
KINDS = {each.__name__: each for each in (FlashAdam, FlashAdamW, FlashLion, FlashSGD)}


def resident() -> int:
    """This process's resident bytes, without freed memory that the C library keeps."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    value = torch.ones(shape, dtype=dtype)
    if layout == "transposed":
        return value.t().contiguous().t()
    return value.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else value


def weights(layouts: list[str], dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(laid_out(shape, how, dtype)) for layout in layouts for shape, how in LAYOUTS[layout]]


def set_gradients(params: list[Parameter], dtype: torch.dtype, transpose: bool) -> None:
    for p in params:
        grad = torch.full_like(p, 1e-3, dtype=dtype)
        p.grad = None
        if dtype != p.dtype:
            p.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]
        p.grad = grad.t().contiguous().t() if transpose and grad.dim() == 2 else grad


# The suite runs the cases that once leaked and one of each kind. `make hunt` runs all.
QUICK = [
    "ragged",
    "channels last",
    "transposed",
    "small",
    "transposed gradients",
    "gradients that come and go",
    "eager",
]


@pytest.mark.parametrize("case", CASES if "FLASHOPT_STEPS" in os.environ else QUICK)
def test_steps_leave_no_memory_behind(case: str):
    fresh.run(step_and_measure, case)


def step_and_measure(case: str) -> None:
    gc.disable()
    told = {"dtype": "bfloat16", "kind": "FlashAdamW", "options": [{}], "changes": [], **CASES[case]}
    dtype, changes = getattr(torch, told["dtype"]), told["changes"]
    grads = getattr(torch, told.get("grads", told["dtype"]))
    groups: list[dict[str, Any]] = [{"params": weights(told["layouts"], dtype), **each} for each in told["options"]]
    params = [p for group in groups for p in group["params"]]
    optimizer = KINDS[told["kind"]](groups, lr=1e-3, eager=told.get("eager", False))
    set_gradients(params, grads, "transpose" in changes)
    settled = 0
    for step in range(1, STEPS + 1):
        if "schedule" in changes:
            optimizer.param_groups[0]["lr"] = 1e-3 / step
        if "renew" in changes:
            set_gradients(params, grads, False)
        if "freeze" in changes:
            params[-1].requires_grad_(step % 3 > 0)
            params[0].grad = None if step % 4 == 0 else torch.full_like(params[0], 1e-3)
        optimizer.step()
        if step == SETTLED:
            settled = resident()
    grown = resident() - settled
    print(f"{case}: {settled / MIB:.0f} MiB after {SETTLED} steps, {grown / MIB:+.1f} MiB after {STEPS}")
    assert grown <= ALLOWED, f"{grown / MIB:.1f} MiB in {STEPS - SETTLED} steps"


@pytest.mark.parametrize("eager", [True, False])
def test_optimizers_made_and_dropped_one_after_another_take_the_memory_of_one(eager: bool):
    fresh.run(make_and_drop, eager)


def make_and_drop(eager: bool) -> None:
    gc.disable()
    sizes = []
    for _ in range(20):
        params = weights(["contiguous", "ragged", "channels last", "transposed", "small"], torch.bfloat16)
        optimizer = FlashAdamW(params, eager=eager)
        set_gradients(params, torch.bfloat16, False)
        for _ in range(3):
            optimizer.step()
        del params, optimizer
        sizes.append(resident())
    grown = max(sizes[2:]) - sizes[1]  # the first optimizers compile
    assert grown <= ALLOWED, [f"{size / MIB:.0f}" for size in sizes]


# Dropped objects


@pytest.fixture
def no_collector() -> Iterator[None]:
    torch.optim.SGD([torch.zeros(1)])  # torch keeps the first optimizer of a process until the collector runs
    gc.collect()
    gc.disable()
    yield
    gc.enable()


SHAPES = ["contiguous", "ragged", "transposed", "small"]


def stepped(eager: bool, **options: Any) -> tuple[list[Parameter], FlashOptimizer]:
    params = weights(SHAPES, torch.bfloat16)
    optimizer = FlashAdamW(params, eager=eager, **options)
    set_gradients(params, torch.bfloat16, False)
    for _ in range(2):
        optimizer.step()
    return params, optimizer


def memories(tensors: list[Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    """Weak references to the memory of tensors. They die once nothing in Python or C++ refers to it."""
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors]


@pytest.mark.parametrize("eager", [True, False])
def test_a_deleted_optimizer_and_its_states_are_freed_at_once(eager: bool, no_collector: None):
    params, optimizer = stepped(eager)
    dropped = weakref.ref(optimizer)
    states = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    blocks = memories([value for state in optimizer.state.values() for value in state.values()])
    kept = [weakref.ref(p) for p in params]
    del optimizer
    assert dropped() is None
    assert not any(each() is not None for each in states)
    assert not any(each() is not None for each in blocks)
    del params
    assert not any(each() is not None for each in kept)


@pytest.mark.parametrize("eager", [True, False])
def test_a_copied_and_dropped_optimizer_is_freed_at_once(eager: bool, no_collector: None):
    _, optimizer = stepped(eager)
    other = copy.deepcopy(optimizer)
    dropped = weakref.ref(other)
    for group in other.param_groups:
        set_gradients(group["params"], torch.bfloat16, False)
    other.step()
    states = [weakref.ref(value) for state in other.state.values() for value in state.values()]
    del other, group
    assert dropped() is None
    assert not any(each() is not None for each in states)


@pytest.mark.parametrize("eager", [True, False])
def test_replaced_weights_are_freed_at_once(eager: bool, no_collector: None):
    params, optimizer = stepped(eager)
    old = memories(list(params))
    for p in params:
        p.data = p.detach().clone()
    optimizer.zero_grad()
    assert [number for number, each in enumerate(old) if each() is not None] == []


@pytest.mark.parametrize("eager", [True, False])
def test_a_cast_model_leaves_no_old_weights_behind(eager: bool, no_collector: None):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(500, 301)).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), eager=eager)
    set_gradients(list(model.parameters()), torch.bfloat16, False)
    optimizer.step()
    optimizer.zero_grad()
    old = memories(list(model.parameters()))
    model.to(torch.float32)
    assert [number for number, each in enumerate(old) if each() is not None] == []


@pytest.mark.parametrize("eager", [True, False])
def test_replaced_states_are_freed_at_once(eager: bool, no_collector: None):
    _, optimizer = stepped(eager)
    saved = copy.deepcopy(optimizer.state_dict())
    old = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    optimizer.load_state_dict(saved)
    assert [number for number, each in enumerate(old) if each() is not None] == []


def test_large_models_trained_and_dropped_take_the_memory_of_one():
    """Train models of 33.5 million parameters in turn, as a sweep over learning rates does; read resident memory."""
    fresh.run(train_and_drop)


def train_and_drop() -> None:
    gc.disable()
    sizes = []
    for _ in range(4):
        params = [Parameter(torch.zeros(4096, 1024, dtype=torch.bfloat16)) for _ in range(8)]
        optimizer = FlashAdamW(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        sizes.append(resident())
        del params, optimizer, p
    assert max(sizes[1:]) <= sizes[0] + 8 * MIB, [f"{size / MIB:.0f}" for size in sizes]
