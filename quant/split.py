"""fp32 ↔ narrow head + integer tail: a master weight stored beside the 16-bit parameter it belongs to.

Round-to-nearest leaves |w − head| ≤ ulp(head)/2, and the bound is attained. The tail is that rounding
error as a fraction of its largest value, in whole codes:

    tail = round((w − head) / (ulp(head)/2) · L),     L = 127 (int8) or 32767 (int16)

The head's own exponent is the scale, so none is stored. Worst error of a round trip: `quant.bounds`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.format import Part, check_dtype, check_same_shape
from quant.ulp import NARROW_FLOATS, Frame, NarrowFloat, keep_sign_of_zero, nearest, overflow


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
        head, codes = self._store(w)
        return head.to(self.head), codes.to(self.tail)

    def decode(self, head: Tensor, tail: Tensor) -> Tensor:
        value, correction = self._terms(head, tail)
        return value - (0.0 - correction)  # −0.0 minus zero is −0.0; plus zero it would be 0.0

    def advance(self, head: Tensor, tail: Tensor, by: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
        """Move the stored weight `by` an fp32 amount, rounding to nearest or, given uniform `u`, dithered.

        What the sum head + tail + by loses when formed in fp32, whose ulp is coarser than a small update, is
        carried over to the tail: dither keeps updates alive down to 2^-28 of the weight. A weight moved by
        zero keeps its parts.
        """
        value, correction = self._terms(head, tail)
        rest = correction + by
        total = value + rest
        lost = rest - (total - value)
        new_head, codes = self._store(total, lost, u)
        still = by == 0
        new_head = torch.where(still, value, new_head).to(self.head)
        return new_head, torch.where(still, tail.to(torch.float32), codes).to(self.tail)

    def resolution(self, head: Tensor, tail: Tensor) -> Tensor:
        return spacing_at(head, self.narrow) * (0.5 / self.levels)

    def _terms(self, head: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The values of head and tail, whose sum is the weight."""
        value = head.to(torch.float32)
        frame = Frame.around(value, self.narrow)
        code = frame.spacing(frame.enter(value)) * (0.5 / self.levels)
        return value, frame.leave(tail.to(torch.float32) * code)

    def _store(self, w: Tensor, lost: Tensor | None = None, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Head and tail of w + lost, both as fp32, where |lost| is below an ulp of w."""
        frame = Frame.around(w, self.narrow)
        inside = frame.enter(w)
        spacing = frame.spacing(inside)
        rounded = nearest(inside, spacing)
        rest = inside - rounded
        if lost is not None:
            # w + lost may lie across a tie from w: what exceeds half an ulp belongs to the next head.
            rest = torch.where(inside.abs() < math.inf, rest + frame.enter(lost), 0.0)
            beyond = nearest(rest, spacing)
            rounded, rest = rounded + beyond, rest - beyond
        head = overflow(keep_sign_of_zero(frame.leave(rounded), w), self.narrow)
        # Rounding may carry the head into the next binade, where its ulp is twice as large. The tie that
        # carries lies at L/2 codes, between two: take the inner one, or the pair would decode to a value
        # that belongs to the head below.
        carried = rounded.abs() >= spacing * 2.0**self.narrow.significand_bits
        codes = torch.where(carried, rest * (1 - 2.0**-23), rest + rest) * (self.levels / spacing)
        if u is not None:
            codes = codes + (u - 0.5)  # a code of the new head, which may be twice or half as large as before
        codes = torch.where(head.abs() <= self.narrow.max, codes, 0.0).round()
        return head, codes.clamp(-self.levels, self.levels)


@dataclass(frozen=True)
class Rounded:
    """A weight kept as its 16-bit head alone, rounded to nearest or, given uniform numbers, stochastically."""

    head: torch.dtype = torch.bfloat16

    names = ("head",)

    def __post_init__(self) -> None:
        check_dtype("head", self.head, NARROW_FLOATS)

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        return {"head": Part(shape, self.head)}

    def encode(self, w: Tensor) -> tuple[Tensor]:
        frame = Frame.around(w, NARROW_FLOATS[self.head])
        inside = frame.enter(w)
        rounded = frame.leave(nearest(inside, frame.spacing(inside)))
        return (overflow(keep_sign_of_zero(rounded, w), NARROW_FLOATS[self.head]).to(self.head),)

    def decode(self, head: Tensor) -> Tensor:
        return head.to(torch.float32)

    def advance(self, head: Tensor, by: Tensor, u: Tensor | None) -> tuple[Tensor]:
        value = self.decode(head)
        total = value + by
        frame = Frame.around(total, NARROW_FLOATS[self.head])
        inside = frame.enter(total)
        spacing = frame.spacing(inside)
        if u is not None:  # noise of the new binade's ulp: the old one's would push weights down from powers of two
            lost = by - (total - value)
            inside = inside + (frame.enter(lost) + (u - 0.5) * spacing)
        rounded = keep_sign_of_zero(frame.leave(nearest(inside, spacing)), total)
        rounded = overflow(rounded, NARROW_FLOATS[self.head])
        return (torch.where(by == 0, value, rounded).to(self.head),)

    def resolution(self, head: Tensor) -> Tensor:
        return spacing_at(head, NARROW_FLOATS[self.head])


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
