"""The two sides of a course: a compiled optimizer used in odd ways, and an eager reference used in plain ways.

A new optimizer replaces the reference before each step. The reference gets contiguous gradients and Python floats,
keeps its weights contiguous, and runs under torch's own defaults.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile import FlashOptimizer


class Model(nn.Module):
    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)


class Side:
    """A model and its optimizer."""

    def __init__(self, model: Model, optimizer: FlashOptimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.weights)

    def states(self) -> list[dict[str, Tensor]]:
        """The current states of each weight. Makes no new states."""
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self.weights]

    def tensors(self) -> list[Tensor]:
        """All weights and states in a fixed order."""
        states = [state[key] for state in self.states() for key in sorted(state)]
        return [weight.detach() for weight in self.weights] + states

    def group_of(self, weight: Tensor) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if any(weight is each for each in group["params"]))


class Reference(Side):
    """The side that forgets: each step has a new eager optimizer with the weights and copies of the states."""

    def forget(self) -> None:
        before = self.optimizer
        groups = [{**group, "params": list(group["params"])} for group in before.param_groups]
        self.optimizer = type(before)(groups, eager=True, **before.defaults)
        self.optimizer.dtypes.update(before.dtypes)  # the tails belong to these dtypes
        for weight, state in before.state.items():
            self.optimizer.state[weight] = {key: value.detach().clone() for key, value in state.items()}


_number = count()


def fresh(kind: type[FlashOptimizer]) -> type[FlashOptimizer]:
    """A class like `kind` without compiled kernels. Pickle can find it by name."""
    name = f"Fresh{kind.__name__}{next(_number)}"
    rule = dataclasses.replace(kind.rule, name=name)

    class Fresh(kind, rule=rule):
        pass

    Fresh.__name__ = Fresh.__qualname__ = name
    globals()[name] = Fresh
    return Fresh


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits; all NaNs are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    equal = one.contiguous().view(integer) == other.contiguous().view(integer)
    return bool((equal | (one.isnan() & other.isnan())).all())


def difference(one: Any, other: Any, name: str = "") -> str | None:
    """Describe the first difference between two trees of dicts, lists, tensors and numbers, or return None."""
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return f"{name} has {list(one)} and {list(other)}"
        return next(filter(None, (difference(one[key], other[key], f"{name}[{key!r}]") for key in one)), None)
    if isinstance(one, list | tuple):
        if not isinstance(other, list | tuple) or len(one) != len(other):
            return f"{name} is {one} and {other}"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{name}[{place}]") for place, pair in pairs)), None)
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() + other.dim() > 0:
        if same_bits(one, other):
            return None
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name}: {tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"
        where = (one != other).nonzero()
        first = tuple(where[0].tolist()) if len(where) else ()
        return f"{name}: {len(where)} of {one.numel()} differ, first at {first}: {one[first]} and {other[first]}"
    if isinstance(one, str | None) or isinstance(one, bool) or isinstance(other, str | None):
        return None if one == other else f"{name} is {one!r} and {other!r}"
    return None if float(one) == float(other) or one != one else f"{name} is {one!r} and {other!r}"


def outcome(act: Callable[[], Any]) -> tuple[str, str] | None:
    """The type and text of the error that `act` raises, or None."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def deep_copied(value: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(value)
