"""The interface of number formats, from fp32 to named parts and back, and the format that stores fp32 as it is."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One stored tensor of a format: its shape and dtype, before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Format(Protocol):
    """How an fp32 tensor is stored: `decode(*encode(x))` is x to within the format's bound."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored parts, in the order of encode's results and decode's arguments."""
        ...

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """The stored tensors for a value of `shape`, by name."""
        ...

    @property
    def encode(self) -> Callable[..., tuple[Tensor, ...]]:
        """x (and, for states, noise to dither with) → parts."""
        ...

    @property
    def decode(self) -> Callable[..., Tensor]:
        """Parts → x."""
        ...


class WeightFormat(Format, Protocol):
    """A format for weights, which can be moved by small amounts. Its first part is the parameter."""

    @property
    def decode_fast(self) -> Callable[..., Tensor]:
        """`decode` for a step: Inf may become NaN, and −0.0 may become 0.0."""
        ...

    @property
    def advance(self) -> Callable[..., tuple[Tensor, ...]]:
        """Parts, an amount, noise or None, whether for gcc → the parts after moving their value by the amount."""
        ...

    @property
    def resolution(self) -> Callable[..., Tensor]:
        """Parts → the distance between storable values around the stored one."""
        ...

    @property
    def dithered_share(self) -> float:
        """How much of `resolution` dither still resolves on average; all of it for weights that are not dithered."""
        ...


@dataclass(frozen=True)
class Raw:
    """A value stored as it is, in fp32.

    >>> Raw().parts((4, 8))
    {'value': Part(shape=(4, 8), dtype=torch.float32)}
    """

    names = ("value",)
    dithered_share = 1.0

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        return {"value": Part(shape, torch.float32)}

    def encode(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor]:
        return (x,)

    def decode(self, value: Tensor) -> Tensor:
        return value

    decode_fast = decode

    def advance(self, value: Tensor, by: Tensor, noise: Tensor | None, for_gcc: bool = False) -> tuple[Tensor]:
        return (value + by,)

    def resolution(self, value: Tensor) -> Tensor:
        return torch.nextafter(value.abs(), torch.full_like(value, math.inf)) - value.abs()


def check_dtype(argument: str, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> None:
    if dtype not in allowed:
        names = " or ".join(str(each) for each in allowed)
        raise TypeError(f"{argument} has dtype {dtype}; allowed is {names}.")


def check_same_shape(argument: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.shape != reference.shape:
        raise ValueError(
            f"{argument} has shape {tuple(tensor.shape)}; it must equal that of {other}, {tuple(reference.shape)}."
        )


def check_out(argument: str, out: Any, shape: tuple[int, ...], dtypes: Collection[torch.dtype]) -> None:
    """Raise TypeError or ValueError unless results of `shape` can be written to `out`, or it is None."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"{argument} is {out!r}; allowed is None or a tensor to write to.")
    check_dtype(argument, out.dtype, dtypes)
    if tuple(out.shape) != shape:
        raise ValueError(f"{argument} has shape {tuple(out.shape)}; expected is {shape}.")
