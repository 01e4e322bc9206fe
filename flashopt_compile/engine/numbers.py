"""Hyper-parameters → the numbers that rules take: 0-dim fp32 tensors on the CPU, and tuples of such."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.step import Numbers


def as_numbers(values: Mapping[str, Any]) -> Numbers:
    """All of a group's hyper-parameters as its rule takes them."""
    return {name: _as_number(value) for name, value in values.items()}


def _as_number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_as_number, value))
    if isinstance(value, Tensor):
        return value.to(torch.float32).reshape(())
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")


def flat(numbers: Numbers) -> list[Tensor]:
    """All tensors, in one order."""
    tensors: list[Tensor] = []
    for number in numbers.values():
        tensors += number if isinstance(number, tuple) else (number,)
    return tensors


def floats(values: Iterable[Any]) -> list[float]:
    """The values of numbers of any kind, and of tuples and lists of such, in one order."""
    found: list[float] = []
    for value in values:
        if isinstance(value, tuple | list):
            found += map(float, value)
        else:
            found.append(float(value))
    return found


class KeptNumbers:
    """Numbers that stay the same tensors while their values follow a schedule."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = floats(values.values())
        self._all = torch.tensor(self._values, dtype=torch.float32, device="cpu")  # together: one look finds them
        places = iter(self._all.unbind())
        self.numbers: Numbers = {
            name: tuple(next(places) for _ in value) if isinstance(value, tuple | list) else next(places)
            for name, value in values.items()
        }

    def set(self, values: Mapping[str, Any]) -> None:
        """Write the values of numbers of the same names."""
        new = floats(values.values())
        if new != self._values:
            self._all.copy_(torch.tensor(new, dtype=torch.float32, device="cpu"))
            self._values = new
