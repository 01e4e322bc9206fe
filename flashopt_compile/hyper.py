"""Hyper-parameters → the numbers that rules take: 0-dim fp32 tensors, and tuples of such."""

from typing import Any

import torch
from torch import Tensor

from flashopt_compile.step import Numbers


def as_numbers(values: dict[str, Any]) -> Numbers:
    """All of a group's hyper-parameters as its rule takes them."""
    return {name: _as_number(value) for name, value in values.items()}


def _as_number(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_as_number, value))
    return torch.as_tensor(value, dtype=torch.float32).reshape(())


def flat(numbers: Numbers) -> list[Tensor]:
    """All tensors, in one order."""
    tensors: list[Tensor] = []
    for number in numbers.values():
        tensors += number if isinstance(number, tuple) else (number,)
    return tensors


class KeptNumbers:
    """The numbers of a group, which stay the same tensors from step to step while their values follow a schedule."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._numbers: Numbers = {}
        self._all = torch.empty(0)

    def of(self, values: dict[str, Any]) -> Numbers:
        """For values in tensors or lists, which may change unnoticed, others each time."""
        if not all(map(_is_constant, values.values())):
            return as_numbers(values)
        if self._values != values:
            new = as_numbers(values)
            if self._values.keys() == values.keys() and len(self._all) == len(flat(new)):
                self._all.copy_(torch.stack(flat(new)))
            else:
                self._all = torch.stack(flat(new))  # beside each other in memory, to be found with one look
                places = iter(self._all.unbind())
                self._numbers = {
                    name: tuple(next(places) for _ in number) if isinstance(number, tuple) else next(places)
                    for name, number in new.items()
                }
            self._values = values
        return self._numbers


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if isinstance(value, tuple) else isinstance(value, int | float)
