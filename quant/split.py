"""fp32 ↔ narrow head + integer tail: a master weight stored beside the 16-bit parameter it belongs to.

Round-to-nearest leaves |w − head| ≤ ulp(head)/2, and the bound is attained. The tail is that rounding
error as a fraction of its largest value, in whole codes:

    tail = round((w − head) / (ulp(head)/2) · L),     L = 127 (int8) or 32767 (int16)

The head's own exponent is the scale, so none is stored. Worst error of a round trip: `quant.bounds`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.dither import NOISE_UNIT
from quant.format import Part, check_dtype, check_same_shape
from quant.ulp import (
    NARROW_FLOATS,
    Frame,
    NarrowFloat,
    at_least,
    either,
    fp32_ulp,
    keep_sign_of_zero,
    nearest,
    overflow,
)


@dataclass(frozen=True)
class Split:
    """A weight as a `head` (the parameter itself) and a `tail` of 8 or 16 bits.

    >>> format = Split(torch.bfloat16, torch.int8)
    >>> head, tail = format.encode(torch.tensor([0.1, -3.14159]))
    >>> format.decode(head, tail)
    tensor([ 0.1000, -3.1416])
    """

    head: torch.dtype = torch.bfloat16
    tail: torch.dtype = torch.int8

    names = ("head", "tail")

    def __post_init__(self) -> None:
        check_dtype("head", self.head, NARROW_FLOATS)
        check_dtype("tail", self.tail, (torch.int8, torch.int16))

    @property
    def narrow(self) -> NarrowFloat:
        return NARROW_FLOATS[self.head]

    @property
    def levels(self) -> int:
        return torch.iinfo(self.tail).max

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        return {"head": Part(shape, self.head), "tail": Part(shape, self.tail)}

    def encode(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The correctly rounded head of every fp32 `w`, and its tail: 0 where the head is not finite."""
        frame = Frame.around(w, self.narrow)
        inside = frame.enter(w)
        spacing = frame.spacing(inside)
        rounded = nearest(inside, spacing)
        head = overflow(keep_sign_of_zero(frame.leave(rounded), w), self.narrow)
        carried = rounded.abs() >= spacing * 2.0**self.narrow.significand_bits
        codes = (inside - rounded) / spacing * self._codes_per_spacing(carried)
        codes = torch.where(head.abs() <= self.narrow.max, codes, 0.0)
        return head.to(self.head), codes.round().to(self.tail)

    def decode(self, head: Tensor, tail: Tensor) -> Tensor:
        value = head.to(torch.float32)
        frame = Frame.around(value, self.narrow)
        code = frame.spacing(frame.enter(value)) * (0.5 / self.levels)
        correction = frame.leave(tail.to(torch.float32) * code)
        return value - (0.0 - correction)  # −0.0 minus zero is −0.0; plus zero it would be 0.0

    def read(self, head: Tensor, tail: Tensor) -> Tensor:
        """`decode`, to within 2^-99, of weights that a training has: finite, under 2^111."""
        value, correction = self._terms(head, tail)
        return value + correction

    def advance(self, head: Tensor, tail: Tensor, by: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Move the stored weight `by` an fp32 amount, rounding to nearest or, given `noise`, dithered.

        Head and tail are moved apart: their fp32 sum, whose ulp is coarser than a small update, is formed only to
        find the new head. Dither keeps updates alive down to 2^-28 of the weight, or 2^-99. A weight moved by
        zero keeps its parts. One that is not finite, or comes to 2^111 or more, or is moved by what is not finite, ends
        as Inf or NaN.
        """
        value, correction = self._terms(head, tail)
        rest = correction + by
        total = value + rest
        ulp = self._ulp(total)
        push = ulp * (self._ulps * 1.5 * 2.0**23)
        rounded = (total + push) - push
        rest = rest - (rounded - value)
        if self.tail != torch.int8:  # finer than the fp32 total, which may be a tie by rounding alone
            beyond = (rest + push) - push
            rounded, rest = rounded + beyond, rest - beyond
        carried = rounded.abs() >= ulp * 2.0**24
        codes = (rest * ulp.reciprocal()) * self._codes_per_spacing(carried, self._ulps)
        if noise is not None:
            codes = codes + noise * NOISE_UNIT
        still = by == 0
        rounded = torch.where(still, value, overflow(rounded, self.narrow))
        codes = torch.where(still, tail.to(torch.float32), codes).round().to(torch.int32)
        return rounded.to(self.head), codes.clamp(-self.levels, self.levels).to(self.tail)

    def resolution(self, head: Tensor, tail: Tensor) -> Tensor:
        return spacing_at(head, self.narrow) * (0.5 / self.levels)

    @property
    def _ulps(self) -> float:
        """How many of fp32's ulps make one of the head's."""
        return 2.0 ** (24 - self.narrow.significand_bits)

    def _terms(self, head: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The values of head and tail, whose sum is the weight."""
        value = head.to(torch.float32)
        return value, (tail.to(torch.float32) * (0.5 * self._ulps / self.levels)) * self._ulp(value)

    def _ulp(self, x: Tensor) -> Tensor:
        """fp32's ulp in the binade of x, or of the least of the head's; without a frame, which takes too long."""
        size = x.abs()
        if self.narrow.min_exponent < -100:
            return fp32_ulp(size + 2.0**-100)
        return fp32_ulp(at_least(size, 2.0**self.narrow.min_exponent))

    def _codes_per_spacing(self, carried: Tensor, parts: float = 1.0) -> Tensor:
        """How many codes make one of so many parts of a spacing, to count what is left of a weight beside its head."""
        # Rounding may carry the head into the next binade, where its ulp is twice as large. The tie that
        # carries lies at L/2 codes, between two: take the inner one, or the pair would decode to a value
        # that belongs to the head below.
        return either(carried, self.levels * (1 - 2.0**-23) / parts, 2.0 * self.levels / parts)


@dataclass(frozen=True)
class Rounded:
    """A weight kept as its 16-bit head alone, rounded to nearest or, given noise, stochastically."""

    head: torch.dtype = torch.bfloat16

    names = ("head",)

    def __post_init__(self) -> None:
        check_dtype("head", self.head, NARROW_FLOATS)

    @property
    def narrow(self) -> NarrowFloat:
        return NARROW_FLOATS[self.head]

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        return {"head": Part(shape, self.head)}

    def encode(self, w: Tensor) -> tuple[Tensor]:
        frame = Frame.around(w, self.narrow)
        inside = frame.enter(w)
        rounded = frame.leave(nearest(inside, frame.spacing(inside)))
        return (overflow(keep_sign_of_zero(rounded, w), self.narrow).to(self.head),)

    def decode(self, head: Tensor) -> Tensor:
        return head.to(torch.float32)

    def read(self, head: Tensor) -> Tensor:
        return head.to(torch.float32)

    def advance(self, head: Tensor, by: Tensor, noise: Tensor | None) -> tuple[Tensor]:
        value = self.decode(head)
        total = value + by
        least = max(2.0**-100, 2.0**self.narrow.min_exponent)
        size = fp32_ulp(at_least(total.abs(), least)) * 2.0 ** (24 - self.narrow.significand_bits)
        per_size = size.reciprocal()
        count = total * per_size
        if noise is not None:  # of the new binade's ulp: the old one's would push weights down from powers of two
            lost = (by - (total - value)) * per_size
            count = count + (lost + noise * NOISE_UNIT)
        # A tiny weight is not to be rounded to the coarser grid that serves to move it.
        rounded = torch.where(by == 0, value, count.round() * size)
        return (overflow(rounded, self.narrow).to(self.head),)

    def resolution(self, head: Tensor) -> Tensor:
        return spacing_at(head, self.narrow)


def spacing_at(head: Tensor, narrow: NarrowFloat) -> Tensor:
    """ulp(head) as fp32."""
    value = head.to(torch.float32)
    frame = Frame.around(value, narrow)
    return frame.leave(frame.spacing(frame.enter(value)))


def compute_ecc_bits(fp32_param: Tensor, narrow_param: Tensor, master_bytewidth: int = 4) -> Tensor:
    """The tail that corrects `narrow_param`, the rounded copy of `fp32_param`.

    `master_bytewidth` counts head and tail together: 3 gives int8, 4 gives int16.
    """
    check_dtype("fp32_param", fp32_param.dtype, (torch.float32,))
    check_same_shape("narrow_param", narrow_param, "fp32_param", fp32_param)
    if master_bytewidth not in (3, 4):
        raise ValueError(f"master_bytewidth is {master_bytewidth!r}; allowed are 3 (int8 tail) and 4 (int16 tail).")
    format = Split(narrow_param.dtype, torch.int8 if master_bytewidth == 3 else torch.int16)
    return format.encode(fp32_param)[1]


def reconstruct_fp32_param(param: Tensor, error_bits: Tensor) -> Tensor:
    """The fp32 weight stored as `param` (head) and `error_bits` (tail)."""
    check_same_shape("error_bits", error_bits, "param", param)
    return Split(param.dtype, error_bits.dtype).decode(param, error_bits)
