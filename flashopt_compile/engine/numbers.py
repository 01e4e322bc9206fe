"""Hyper-parameters → the numbers that rules take: 0-dim fp32 tensors and tuples of such.

They are on the CPU, where kernels of all devices take them from; those of a capturable group on its parameters' device.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.step import Numbers


def as_numbers(values: Mapping[str, Any], device: torch.device | str = "cpu") -> Numbers:
    """All of a group's hyper-parameters as its rule takes them."""
    return {name: as_number(value, device) for name, value in values.items()}


def as_number(value: Any, device: torch.device | str) -> Any:
    """A hyper-parameter as a rule takes it."""
    if isinstance(value, tuple | list):
        return tuple(as_number(each, device) for each in value)
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).reshape(())
    return torch.tensor(float(value), dtype=torch.float32, device=device)


def flat(numbers: Numbers) -> list[Tensor]:
    """All tensors, in one order."""
    tensors: list[Tensor] = []
    for number in numbers.values():
        tensors += number if isinstance(number, tuple) else (number,)
    return tensors


def leaves(values: Iterable[Any]) -> list[Any]:
    """Numbers of any kind, and those in tuples and lists of such, in one order."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, tuple | list) else (value,)
    return found


def floats(values: Iterable[Any]) -> list[float]:
    """The values of `leaves`."""
    return list(map(float, leaves(values)))


class KeptNumbers:
    """Numbers that stay the same tensors while their values follow a schedule."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = floats(values.values())
        self._all = torch.tensor(self._values, dtype=torch.float32, device="cpu")  # together: one look finds them
        self.numbers = _shared_out(self._all, values)

    def set(self, values: Mapping[str, Any]) -> None:
        """Write the values of numbers of the same names."""
        new = floats(values.values())
        if new != self._values:
            self._all.copy_(torch.tensor(new, dtype=torch.float32, device="cpu"))
            self._values = new


class CapturableNumbers:
    """Numbers that stay the same tensors on a device, where a CUDA graph finds them when it is replayed.

    Values that are tensors are copied on the device in every step, so that a replayed step takes them as they are then.
    Others are written when they change, which no graph can repeat.
    """

    def __init__(self, values: Mapping[str, Any], device: torch.device) -> None:
        given = leaves(values.values())
        self._all = torch.zeros(len(given), dtype=torch.float32, device=device)
        self._places = self._all.unbind()
        self._written: list[float | None] = []
        self.numbers = _shared_out(self._all, values)
        self.set(values)

    def set(self, values: Mapping[str, Any]) -> None:
        """Write the values of numbers of the same names."""
        given = leaves(values.values())
        written = [None if isinstance(each, Tensor) else float(each) for each in given]
        if written != self._written:
            if is_capturing():
                raise RuntimeError(
                    "flashopt_compile: a Python number of a parameter group is new or has changed since the last step, "
                    "and a CUDA graph is being captured, which would not see it change again; take one step before "
                    "the capture, or give a tensor on the parameters' device."
                )
            self._all.copy_(torch.tensor([each or 0.0 for each in written], dtype=torch.float32, device="cpu"))
            self._written = written
        tensors = [each.detach().reshape(()) for each in given if isinstance(each, Tensor)]
        if tensors:
            places = [place for place, each in zip(self._places, given, strict=True) if isinstance(each, Tensor)]
            torch._foreach_copy_(places, tensors)  # pyright: ignore[reportPrivateImportUsage]


def is_capturing() -> bool:
    """Whether a CUDA graph records what is done now. It can record neither reads nor writes of the host."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _shared_out(kept: Tensor, values: Mapping[str, Any]) -> Numbers:
    """The elements of `kept` under the names of values."""
    places = iter(kept.unbind())
    return {
        name: tuple(next(places) for _ in value) if isinstance(value, tuple | list) else next(places)
        for name, value in values.items()
    }
