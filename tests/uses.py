"""The ways to use an optimizer that a course chooses from: numbers, layouts, gradients and conditions, by name."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from sides import Side
from torch import Tensor
from torch.nn import Parameter

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

# Names of rules and kinds that a hunt skips, to find bugs behind a known one: FLASHOPT_KNOWN="meta,pickle".
KNOWN: set[str] = set(filter(None, os.environ.get("FLASHOPT_KNOWN", "").split(",")))
WIDE = bool(os.environ.get("FLASHOPT_WIDE"))  # also use kinds that need many kernels, for `make hunt`

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
SHAPES = {
    "matrix": (40, 64),
    "bias": (48,),
    "ragged": (33, 40),
    "large": (512, 160),
    "large ragged": (300, 250),
    "convolution": (24, 16, 3, 3),
    "large convolution": (96, 96, 3, 3),
}
OPTIMIZERS: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "AdamW": (FlashAdamW, {"lr": 0.01}),
    "SGD": (FlashSGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
    "Lion": (FlashLion, {"lr": 0.001}),
}
# Options of added parameter groups. Those in the second table need kernels of their own.
GROUP_OPTIONS: dict[str, dict[str, Any]] = {
    "same options": {},
    "own lr": {"lr": 0.125, "weight_decay": 0.25},
    "skip_nonfinite": {"skip_nonfinite": True},
    "decouple_lr": {"decouple_lr": True},
}
RARE_GROUP_OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {"rounding": "nearest"},
    "maximize": {"maximize": True},
    "unquantized": {"quantize": False},
    "32 bits": {"master_weight_bits": 32},
    "no tail": {"master_weight_bits": None},
}
VALUES: dict[str, Sequence[Any]] = {
    "lr": (0.01, 0.0, 0.001, 0.1),
    "weight_decay": (0.01, 0.0, 0.1),
    "eps": (1e-8, 1e-4),
    "betas": ((0.9, 0.99), (0.5, 0.75), (0.0, 0.0)),
    "momentum": (0.9, 0.5),
    "dampening": (0.0, 0.5),
}


def kinds(*names: str, rare: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """One of the names, simplest first, except KNOWN ones. A wide hunt also chooses `rare` ones."""
    return st.sampled_from([name for name in (*names, *(rare if WIDE else ())) if name not in KNOWN])


# Values are rounded to fp32 first, so that every kind holds the same number.
NUMBERS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "numpy scalar": np.float32,
    "numpy double": np.float64,
    "numpy array": lambda value: np.array(value, dtype=np.float32),
    "tensor": lambda value: torch.tensor(value, dtype=FP32, device="cpu"),
    "double tensor": lambda value: torch.tensor(value, dtype=torch.float64, device="cpu"),
}


def rounded(value: Any) -> Any:
    return tuple(map(rounded, value)) if isinstance(value, tuple | list) else float(np.float32(value))


def number(kind: str, value: Any) -> Any:
    """`value` as a number of a kind. A tuple becomes a list if its numbers can change in place."""
    if isinstance(value, tuple):
        return (list if kind in ("numpy array", "tensor") else tuple)(number(kind, each) for each in value)
    return NUMBERS[kind](rounded(value))


def change_in_place(held: Any, value: Any) -> bool:
    """Write another value into the holder of a number. Return False if it is immutable."""
    if isinstance(held, Tensor):
        held.fill_(rounded(value))
    elif isinstance(held, np.ndarray):
        held[...] = rounded(value)
    elif isinstance(held, list):
        held[:] = rounded(value)
    else:
        return False
    return True


# Layouts of weights: the same values elsewhere in memory or in another order.
def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else transposed(tensor)


def in_a_flat_buffer(tensor: Tensor) -> Tensor:
    """A view that begins at an odd element of a larger tensor."""
    buffer = tensor.new_zeros(tensor.numel() + 7)
    view = buffer[3 : 3 + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def every_second(tensor: Tensor) -> Tensor:
    """A view of every second column of a larger tensor."""
    return torch.stack([tensor, tensor], dim=-1).flatten(-2)[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
    "transposed": transposed,
    "channels_last": channels_last,
    "in a flat buffer": in_a_flat_buffer,
    "every second": every_second,
}
# Gradients made from fp32 values and the parameter. Some share the parameter's memory.
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "plain": lambda values, p: values.to(p.dtype),
    "none": lambda values, p: None,
    "fp32": lambda values, p: values,
    "other dtype": lambda values, p: values.to(BF16 if p.dtype == FP32 else FP16),
    "like the weight": lambda values, p: torch.empty_like(p.detach()).copy_(values),
    "expanded row": lambda values, p: values.to(p.dtype)[:1].expand_as(p),
    "expanded number": lambda values, p: values.to(p.dtype).flatten()[0].expand_as(p),
    "with history": lambda values, p: values.to(p.dtype).requires_grad_(),
    "own memory": lambda values, p: p.detach(),
    "own row": lambda values, p: p.detach()[:1].expand_as(p),
    **{f"{name} gradient": lambda values, p, f=f: f(values.to(p.dtype)) for name, f in LAYOUTS.items()},
}
RARE_GRADIENTS = ["other dtype"]
SIZES = {"ordinary": 1.0, "zero": 0.0, "tiny": 1e-20, "huge": 1e4}


def give(parameter: Tensor, grad: Tensor | None) -> None:
    """Set a gradient of any dtype or shape, as accumulation hooks and wrappers do."""
    parameter.grad = None
    if grad is not None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=grad.requires_grad)
        if grad.requires_grad:
            parameter.grad = grad
        else:
            parameter.grad.data = grad


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Contexts that a step may run in.
CONDITIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", BF16),
    "meta device": lambda: torch.device("meta"),
    "another thread": nullcontext,
}


def under(condition: str, act: Callable[[], Any]) -> Any:
    if condition == "another thread":
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(act).result()
    with CONDITIONS[condition]():
        return act()


def new_weights(shapes: Sequence[str], dtypes: Sequence[torch.dtype], seed: int) -> list[Parameter]:
    random = torch.Generator().manual_seed(seed)
    values = [torch.randn(SHAPES[shape], generator=random, dtype=FP32).mul(0.5) for shape in shapes]
    return [Parameter(value.to(dtypes[place % len(dtypes)])) for place, value in enumerate(values)]


def frozen_weights() -> list[Parameter]:
    """Frozen weights of dtypes that no optimizer steps, as in the base of a quantized model."""
    values = [torch.arange(6, dtype=torch.uint8), torch.ones(3, dtype=torch.float64)]
    return [Parameter(value, requires_grad=False) for value in values]


def halve_(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.mul_(0.5)
    else:
        tensor.div_(2, rounding_mode="trunc")


# Writes to weights, by seed.
def values_for(w: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(2000 + seed)
    return torch.randn(w.shape, generator=random, dtype=FP32).mul(0.5).to(w.dtype)


WEIGHT_CHANGES: dict[str, Callable[[Tensor, int], Any]] = {
    "copy_": lambda w, seed: w.detach().copy_(values_for(w, seed)),
    "mul_": lambda w, seed: w.detach().mul_(0.5),
    "data.mul_": lambda w, seed: w.data.mul_(0.5),
    "zero_": lambda w, seed: w.detach().zero_(),
}


# Changes of a weight's states, which must exist.
def data_replaced(side: Side, w: Tensor) -> None:
    for value in side.optimizer.state[w].values():
        value.data = value.data.clone()


def data_transposed(side: Side, w: Tensor) -> None:
    for value in side.optimizer.state[w].values():
        value.data = transposed(value.data) if value.dim() > 1 else value.data.clone()


def tensors_replaced(side: Side, w: Tensor) -> None:
    for key, value in side.optimizer.state[w].items():
        side.optimizer.state[w][key] = value.clone()


def dict_replaced(side: Side, w: Tensor) -> None:
    side.optimizer.state[w] = {key: value.clone() for key, value in side.optimizer.state[w].items()}


def removed(side: Side, w: Tensor) -> None:
    del side.optimizer.state[w]


def all_removed(side: Side, _: Tensor) -> None:
    side.optimizer.state.clear()


def halved(side: Side, w: Tensor) -> None:
    for key, value in side.optimizer.state[w].items():
        if key != "step":
            halve_(value)


def count_written(side: Side, w: Tensor) -> None:
    side.optimizer.state[w]["step"].fill_(10)


def count_replaced(side: Side, w: Tensor) -> None:
    side.optimizer.state[w]["step"] = torch.tensor(20.0, dtype=FP32)


STATE_CHANGES: dict[str, Callable[[Side, Tensor], None]] = {
    "halved": halved,
    "data replaced": data_replaced,
    "data transposed": data_transposed,
    "tensors replaced": tensors_replaced,
    "dict replaced": dict_replaced,
    "removed": removed,
    "all removed": all_removed,
    "count written": count_written,
    "count replaced": count_replaced,
}


# Changes that a step must refuse. The weight has a gradient and states; each returns its undo function.
def with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Side, Tensor], Callable[[], None]]:
    def disturb(_: Side, w: Tensor) -> Callable[[], None]:
        grad = change(torch.ones(w.shape, dtype=w.dtype))
        if grad.layout == torch.strided:
            give(w, grad)
        else:
            w.grad = grad
        return lambda: give(w, None)

    return disturb


def with_cast(dtype: Callable[[Tensor], torch.dtype]) -> Callable[[Side, Tensor], Callable[[], None]]:
    def disturb(_: Side, w: Tensor) -> Callable[[], None]:
        before = w.data
        w.grad = None
        w.data = before.to(dtype(w))
        w.grad = torch.ones_like(w)

        def undo() -> None:
            w.grad = None
            w.data = before

        return undo

    return disturb


def with_option(name: str, value: Any) -> Callable[[Side, Tensor], Callable[[], None]]:
    def disturb(side: Side, w: Tensor) -> Callable[[], None]:
        group = side.group_of(w)
        before = group[name]
        group[name] = (not before) if isinstance(before, bool) else value
        return lambda: group.update({name: before})

    return disturb


def with_state(change: Callable[[dict[str, Any], str], Any]) -> Callable[[Side, Tensor], Callable[[], None]]:
    """Change a weight's last state. An optimizer may move states, so undo puts the old tensor back."""

    def disturb(side: Side, w: Tensor) -> Callable[[], None]:
        state = side.optimizer.state[w]
        key = list(state)[-1]
        before = state[key]
        change(state, key)
        return lambda: state.update({key: before})

    return disturb


REFUSED: dict[str, Callable[[Side, Tensor], Callable[[], None]]] = {
    "gradient of another shape": with_gradient(lambda grad: grad[: len(grad) // 2]),
    "sparse gradient": with_gradient(lambda grad: grad.to_sparse()),
    "float64 gradient": with_gradient(lambda grad: grad.double()),
    "cast to float64": with_cast(lambda w: torch.float64),
    "cast to float16": with_cast(lambda w: FP16),
    "cast to float32 or bfloat16": with_cast(lambda w: BF16 if w.dtype == FP32 else FP32),
    "lr in a list": with_option("lr", [0.001]),
    "quantize changed": with_option("quantize", None),
    "state of another shape": with_state(lambda state, key: state.update({key: state[key].new_zeros(3)})),
    "state of another dtype": with_state(lambda state, key: state.update({key: state[key].double()})),
    "state without a part": with_state(lambda state, key: state.pop(key)),
}
