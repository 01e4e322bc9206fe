"""Where the grid of a 16-bit float lies, read from the bits of fp32: the ground under heads, tails and scales.

The bits of a float, taken as an integer, rise with its size: a mask gives the power of two below it, an addition
rounds it. Casting between the two costs nothing, neither on a GPU nor in the C++ that Inductor writes, where the
compiler makes nothing of the loop that a cast is (docs/performance.md says when). What is never done is a cast to 16
bits and back: Inductor folds fp32 → bf16 → fp32 to the identity. Every formula gives the same bits whether or not a
compiler contracts a multiply and an add into one FMA.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT = 0x7F800000
SIZE = 0x7FFFFFFF
SIGN = -(2**31)


@dataclass(frozen=True)
class NarrowFloat:
    """A 16-bit IEEE-like float: significand bits (hidden one included) and least normal exponent."""

    dtype: torch.dtype
    significand_bits: int
    min_exponent: int

    @property
    def max(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def is_cut_fp32(self) -> bool:
        """Whether its grid is that of fp32 with the low bits cut off, from the least number to the largest."""
        return self.min_exponent == -126


BF16 = NarrowFloat(torch.bfloat16, significand_bits=8, min_exponent=-126)
FP16 = NarrowFloat(torch.float16, significand_bits=11, min_exponent=-14)
NARROW_FLOATS = {narrow.dtype: narrow for narrow in (BF16, FP16)}


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """fp32 x or y, as `torch.where` has it, by masks.

    Of a choice a C++ compiler may make a branch, to skip what only one side needs, and loops with branches are none
    that it can vectorize.
    """
    mask = -condition.to(torch.int32)
    return from_bits((bits_of(x) & mask) | (bits_of(y) & ~mask))


def binade(x: Tensor, narrow: NarrowFloat) -> Tensor:
    """The power of two at or below |x|, from that of the least normal of `narrow` to the largest, 2^127."""
    return from_bits((bits_of(x) & EXPONENT).clamp((narrow.min_exponent + 127) << 23, 254 << 23))


def two_over(power: Tensor) -> Tensor:
    """2 / a power of two, exactly; 1 / the largest would be subnormal."""
    return from_bits(EXPONENT - bits_of(power))


def spacing(x: Tensor, narrow: NarrowFloat) -> Tensor:
    """Distance between neighbours of `narrow` in the binade of x."""
    return binade(x, narrow) * 2.0 ** (1 - narrow.significand_bits)


def nearest(x: Tensor, narrow: NarrowFloat) -> Tensor:
    """Every fp32 x rounded to `narrow`, ties to even."""
    if narrow.is_cut_fp32:
        bits = bits_of(x)
        rounded = from_bits((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000)
        return torch.where(x.isnan(), x, rounded)
    rounded = _pushed(x, binade(x.clamp(-(2.0**16), 2.0**16), narrow), narrow)
    return overflow(torch.where(rounded == 0, x * 0.0, rounded), narrow)


def nearest_fast(x: Tensor, narrow: NarrowFloat) -> Tensor:
    """`nearest` but for ties, which may go either way, and for Inf, which may become NaN."""
    if narrow.is_cut_fp32:
        rounded = from_bits((bits_of(x) + 0x8000) & -0x10000)
        return rounded + x * 0.0  # some NaNs round to zero
    return overflow(_pushed(x, binade(x, narrow), narrow), narrow)


def _pushed(x: Tensor, power: Tensor, narrow: NarrowFloat) -> Tensor:
    """x of the binade of `power`, rounded by a number that pushes the unwanted bits off the end of the significand."""
    push = power * (1.5 * 2.0 ** (24 - narrow.significand_bits))
    return (x + push) - push


def overflow(rounded: Tensor, narrow: NarrowFloat) -> Tensor:
    """±Inf beyond the largest value of `narrow`, before a cast to it that a compiler may fold away."""
    return select(rounded.abs() <= narrow.max, rounded, rounded * math.inf)


def round_up(x: Tensor) -> Tensor:
    """The least bf16 that is not below x ≥ 0, as fp32; x not NaN."""
    return from_bits((bits_of(x) + 0xFFFF) & -0x10000)


def with_sign(size: Tensor, x: Tensor) -> Tensor:
    """`size` ≥ 0 with the sign of x."""
    if x.dtype != torch.float32:
        return torch.copysign(size, x)
    return from_bits(bits_of(size) | (bits_of(x) & SIGN))


def largest(x: Tensor) -> Tensor:
    """The largest |x| of each row, NaN where one is NaN."""
    if x.device.type != "cpu":
        return x.abs().amax(-1, keepdim=True)
    # Integers have no NaN to mind, as floats have in each step of `amax`.
    sizes = bits_of(x) & SIZE
    if _loops_are_scalar:
        return from_bits(sizes.amax(-1, keepdim=True))
    if x.shape[-1] % 2 == 0:  # Inductor's own vectors have a fast last step for floats alone
        sizes = torch.maximum(*sizes.unflatten(-1, (2, -1)).unbind(-2))
    return from_bits(sizes).abs().amax(-1, keepdim=True)


_loops_are_scalar = False


@contextmanager
def scalar_loops() -> Iterator[None]:
    """Trace for a compiler that vectorizes Inductor's loops itself: the same bits by other operations."""
    global _loops_are_scalar
    before, _loops_are_scalar = _loops_are_scalar, True
    try:
        yield
    finally:
        _loops_are_scalar = before


# Added to a number of less than 2^22, it pushes the fraction off the end of the significand: what is left there is
# the number, rounded to even, in two's complement.
_PUSH = 1.5 * 2.0**23
_PUSH_BITS = 0x4B400000


def whole(x: Tensor, low: int | Tensor, high: int) -> Tensor:
    """x rounded to a whole number, ties to even, and held within bounds: int32 of which the low 16 bits count.

    NaN ends at one of the bounds.
    """
    bits = bits_of(x + _PUSH).clamp(max=_PUSH_BITS + high)
    return bits.clamp(min=_PUSH_BITS + low) if isinstance(low, int) else torch.maximum(bits, low + _PUSH_BITS)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root, the same bits in eager as compiled.

    Inductor emits the hardware's root, which is exact; eager CPU tensors go through a vector library that
    is an ulp off for up to a fifth of all inputs, so there the root is taken in float64.
    """
    if torch.compiler.is_compiling() or x.dtype != torch.float32:
        return x.sqrt()
    return x.double().sqrt().float()


def once(x: Tensor, by: Tensor | None = None) -> Tensor:
    """`x` itself. On a CPU Inductor computes it in a loop of its own, not again at each use: what a whole group needs.

    (It stores what `as_strided` takes. A GPU's kernel holds a group in registers, and storing would take a second one.)
    `by` is what x is used by, where x is a number, which is on the CPU for kernels of every device.
    """
    return x.as_strided(x.shape, x.stride()) if (x if by is None else by).device.type == "cpu" else x
