"""Parameters, gradients and stored values, shared by the tests of optimizers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flashopt_compile import FlashOptimizer
from quant import ROOT8, SIGNED8, Grouped, Split, dequantize
from quant.bounds import grouped_bound

# Whole groups in every row; rows that end in a short group; and a bias.
ALIGNED, RAGGED, BIAS = (40, 64), (33, 50), (7,)
SHAPES = (ALIGNED, RAGGED, BIAS)
# Our letters for torch.optim's states, and the bounds of their formats.
STATE_LETTERS = {"exp_avg": "m", "momentum_buffer": "m", "exp_avg_sq": "v"}
STATE_LIMITS = {"m": grouped_bound(SIGNED8).function(), "v": grouped_bound(ROOT8).function()}


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=random).mul(0.5).to(dtype)) for shape in shapes]


def give_gradients(params: Sequence[Tensor], seed: int, size: float = 1.0) -> None:
    random = torch.Generator().manual_seed(1000 + seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=random).mul(size).to(parameter.dtype)


def train(optimizer: FlashOptimizer, steps: range) -> FlashOptimizer:
    """Take numbered steps. A step's number seeds its gradients."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return optimizer


def group_of(optimizer: FlashOptimizer, parameter: Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))


def held(optimizer: FlashOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's stored weight `w` and states, in float64."""
    storage = optimizer.storage(group_of(optimizer, parameter), parameter)
    state = optimizer.state[parameter]
    # Head and tail are added in float64, as a sum in fp32 would be off by up to half an fp32 ulp.
    values = {"w": parameter.detach().double()}
    if isinstance(storage.weight, Split):
        value, correction = storage.weight._terms(parameter.detach(), state["tail"])
        values["w"] = value.double() + correction.double()
    for name, format in storage.states:
        if isinstance(format, Grouped):
            codes, scales = state[f"{name}.codes"], state[f"{name}.scales"]
            values[name] = dequantize(
                codes, scales, signed=format.signed, group_size=format.group_size, compander=format.compander
            )
        else:
            values[name] = state[name]
    return {name: value.double() for name, value in values.items()}


def scales_of(state: dict[str, Tensor], name: str, columns: int) -> Tensor:
    """The scale of each element of a grouped matrix, in float64."""
    return state[f"{name}.scales"].double().repeat_interleave(32, -1)[:, :columns]


def stored(optimizer: FlashOptimizer) -> list[Tensor]:
    """Copies of all parameters, each followed by its states in order of their keys."""
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors.append(parameter.detach().clone())
            tensors += [value.clone() for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return tensors


def assert_identical(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Assert that tensors are equal bit for bit; NaNs are equal."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def assert_state_within_bound(optimizer: FlashOptimizer, parameter: Tensor, name: str, exact: Tensor) -> None:
    """Assert that torch.optim's state `name` is within its format's bound for nearest rounding; fp32 is exact."""
    letter, state = STATE_LETTERS[name], optimizer.state[parameter]
    error = (held(optimizer, parameter)[letter] - exact.double()).abs()
    if letter in state:
        assert not error.any()
    else:
        assert (error <= STATE_LIMITS[letter](scale=scales_of(state, letter, parameter.shape[-1]))).all()
