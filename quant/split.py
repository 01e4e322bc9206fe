"""fp32 ↔ narrow head + integer tail: a master weight stored as a 16-bit parameter and its correction.

Round-to-nearest leaves |w − head| ≤ ulp(head)/2, and the bound is attained. The tail is that rounding
error as a fraction of its largest value, in whole codes:

    tail = round((w − head) / (ulp(head)/2) · L),     L = 127 (int8) or 32767 (int16)

The head's own exponent is the scale, so none is stored. Worst error of a round trip: `quant.bounds`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.format import Part, check_dtype, check_same_shape
from quant.ulp import (
    NARROW_FLOATS,
    SIZE,
    WEIGHT_NOISE_BITS,
    NarrowFloat,
    binade,
    bits_of,
    centred,
    from_bits,
    narrowed,
    nearest,
    nearest_fast,
    on_gpu,
    once,
    overflow,
    select,
    spacing,
    two_over,
    two_over_binade,
    whole,
    widened,
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
        """The correctly rounded head of every fp32 `w`, and its tail, which is 0 if the head is not finite."""
        head = nearest(w, self.narrow)
        return head.to(self.head), self.tail_of(w, head)

    def tail_of(self, w: Tensor, head: Tensor) -> Tensor:
        """The tail that brings a head, in fp32, closest to `w`; 0 where either is not finite.

        The head need not be the nearest to `w`. Beyond half an ulp the tail stays at its largest value.
        """
        power = binade(head, self.narrow)
        # A tie that rounds up to a power of two lies at L/2 codes, midway between two. Take the inner one, or the pair
        # would decode to a value that belongs to the head below.
        carried = bits_of(power) > bits_of(binade(w, self.narrow))
        fraction = (w - head) * two_over(power)
        codes = torch.where(carried, fraction * (self._codes * (1 - 2.0**-23)), fraction * self._codes)
        finite = (head.abs() <= self.narrow.max) & w.isfinite()
        return torch.where(finite, codes, 0.0).round().clamp(-self.levels, self.levels).to(self.tail)

    def decode(self, head: Tensor, tail: Tensor) -> Tensor:
        value, correction = self._terms(head, tail, bounded=True)
        return value - (0.0 - correction)  # −0.0 minus zero is −0.0; plus zero it would be 0.0

    def decode_fast(self, head: Tensor, tail: Tensor) -> Tensor:
        value, correction = self._terms(head, tail, share=self._short(head))
        return value + correction

    def advance(
        self, head: Tensor, tail: Tensor, by: Tensor, noise: Tensor | None, for_gcc: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Move the stored weight `by` an fp32 amount, rounding to nearest or, given `noise`, dithered.

        Head and tail are moved separately: their fp32 sum, whose ulp is coarser than a small update, is formed only
        to find the new head. Dither keeps updates alive down to 2^-29 of the weight. A weight moved by zero keeps
        its parts. A non-finite weight or move gives Inf or NaN.
        """
        if self._is_quick(head):
            return self._advance_on_gpu(head, tail, by, noise)
        value, correction = self._terms(head, tail)
        rest = correction + by
        rounded = nearest_fast(value + rest, self.narrow)
        if self.tail != torch.int8 and not self.narrow.is_cut_fp32:
            rounded = once(rounded)  # Inductor traces it anew for each use, and so on; compiling would take a minute
        rest = rest - (rounded - value)
        if self.tail != torch.int8:  # the fp32 total is coarser than the codes, and may be a tie only by rounding
            count = (rest * two_over(binade(rounded, self.narrow))) * 2.0 ** (self.narrow.significand_bits - 2)
            beyond = count.round() * spacing(rounded, self.narrow)
            rounded, rest = rounded + beyond, rest - beyond
        codes = (rest * two_over(binade(rounded, self.narrow, bounded=False))) * self._codes
        if noise is not None and self.tail != torch.int8:  # 16-bit codes are too large for `whole` to add noise
            codes, noise = codes + centred(noise), None
        choose = torch.where if self.tail == torch.int8 else select  # with `where`, gcc would branch to skip rounding
        size = by.abs()
        moved = size > 0  # False for NaN
        rounded = choose(moved, rounded, from_bits(bits_of(value) | bits_of(size)))
        codes = choose(moved, codes, tail.to(torch.float32))
        codes = whole(codes, -self.levels, self.levels, noise, WEIGHT_NOISE_BITS, for_gcc=for_gcc)
        return narrowed(rounded, self.narrow, for_gcc), codes.to(self.tail)

    def _advance_on_gpu(self, head: Tensor, tail: Tensor, by: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """`advance` of an 8-bit tail without its comparisons and choices.

        Where a weight is moved by zero, all of this is exact but for the rounding of a tie, which the largest tails
        make. `decode_fast` shortens corrections, so that it is none.
        """
        value, correction = self._terms(head, tail)
        rounded = nearest_fast(self.decode_fast(head, tail) + by, self.narrow)
        rest = correction + by
        rest = rest - (rounded - value)
        codes = (rest * two_over_binade(rounded, self.narrow)) * self._codes
        codes = whole(codes, -self.levels, self.levels, noise, WEIGHT_NOISE_BITS)
        return rounded.to(self.head), codes.to(self.tail)

    def resolution(self, head: Tensor, tail: Tensor) -> Tensor:
        return spacing(head.to(torch.float32), self.narrow) * (0.5 / self.levels)

    @property
    def dithered_share(self) -> float:
        """The last bit of the noise; beside large codes of 15 bits fp32 ends earlier."""
        return 2.0**-WEIGHT_NOISE_BITS

    def _short(self, head: Tensor) -> float:
        """On a GPU, the factor that takes two fp32 ulps of the weight from the largest correction; else 1."""
        return 1 - 2.0 ** (self.narrow.significand_bits - 22) if self._is_quick(head) else 1.0

    def _is_quick(self, head: Tensor) -> bool:
        return on_gpu(head) and self.tail == torch.int8

    @property
    def _codes(self) -> float:
        """The number of codes in half the power of two at or below a head."""
        return self.levels * 2.0 ** (self.narrow.significand_bits - 1)

    def _terms(self, head: Tensor, tail: Tensor, bounded: bool = False, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """The values of head and tail, which add to the weight. Unless `bounded`, the tail's is NaN for some Infs.

        On a GPU, only a `share` of the tail's is asked for.
        """
        value = widened(head)
        if self.narrow.is_cut_fp32 and on_gpu(head):
            # Count the tail in the bits below the head's, from their middle, so that it does not reach the head.
            middle = (bits_of(value) & SIZE) | 0x8000
            moved = middle + tail.to(torch.int32) * (0x8000 // (self.levels + 1))
            return value, (from_bits(moved) - from_bits(middle)) * (share * (self.levels + 1) / self.levels)
        return value, (tail.to(torch.float32) * (share * 0.5 / self._codes)) * binade(value, self.narrow, bounded)


@dataclass(frozen=True)
class Rounded:
    """A weight stored as only its 16-bit head, rounded to nearest or, given noise, stochastically."""

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
        return (nearest(w, self.narrow).to(self.head),)

    def decode(self, head: Tensor) -> Tensor:
        return widened(head)

    decode_fast = decode

    def advance(self, head: Tensor, by: Tensor, noise: Tensor | None, for_gcc: bool = False) -> tuple[Tensor]:
        value = self.decode(head)
        total = value + by
        power = binade(total, self.narrow)
        steps = 2.0 ** (self.narrow.significand_bits - 2)  # grid steps from zero to half the power
        count = (total * two_over(power)) * steps
        if noise is not None:  # in the new binade's ulp; the old one would push weights down from powers of two
            lost = ((by - (total - value)) * two_over(power)) * steps
            count = count + (lost + centred(noise))
        rounded = select(by == 0, value, count.round() * spacing(total, self.narrow))
        return (narrowed(overflow(rounded, self.narrow), self.narrow, for_gcc),)

    def resolution(self, head: Tensor) -> Tensor:
        return spacing(head.to(torch.float32), self.narrow)

    @property
    def dithered_share(self) -> float:
        """The last bit of the noise or, where it ends earlier, of the fp32 count it is added to."""
        return 2.0 ** -min(WEIGHT_NOISE_BITS, 24 - self.narrow.significand_bits)


def compute_ecc_bits(fp32_param: Tensor, narrow_param: Tensor, master_bytewidth: int = 4) -> Tensor:
    """The tail that corrects `narrow_param`, a copy of `fp32_param` in 16 bits, rounded or cut off.

    `master_bytewidth` counts head and tail together: 3 gives int8, 4 gives int16.
    """
    check_dtype("fp32_param", fp32_param.dtype, (torch.float32,))
    check_same_shape("narrow_param", narrow_param, "fp32_param", fp32_param)
    if master_bytewidth not in (3, 4):
        raise ValueError(f"master_bytewidth is {master_bytewidth!r}; allowed are 3 (int8 tail) and 4 (int16 tail).")
    format = Split(narrow_param.dtype, torch.int8 if master_bytewidth == 3 else torch.int16)
    return format.tail_of(fp32_param, widened(narrow_param))


def reconstruct_fp32_param(param: Tensor, error_bits: Tensor) -> Tensor:
    """The fp32 weight stored as `param` (head) and `error_bits` (tail)."""
    check_same_shape("error_bits", error_bits, "param", param)
    return Split(param.dtype, error_bits.dtype).decode(param, error_bits)
