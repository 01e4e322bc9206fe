"""Where the grid of a 16-bit float lies, by float arithmetic alone: the ground under heads, tails and scales.

No bit casts (Inductor's C++ backend runs each as a scalar loop) and no cast-and-back (Inductor folds
fp32 → bf16 → fp32 to the identity): a value is rounded by adding and subtracting a constant that pushes
the unwanted bits off the end of the fp32 significand. Every formula gives the same bits whether or not a
compiler contracts a multiply and an add into one FMA.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# a + a·PHI lies between half and one and a half fp32 ulps above a, so it rounds to the next float up.
PHI = 1.25 * 2.0**-24


@dataclass(frozen=True)
class NarrowFloat:
    """A 16-bit IEEE-like float: significand bits (hidden one included) and least normal exponent."""

    dtype: torch.dtype
    significand_bits: int
    min_exponent: int

    @property
    def max(self) -> float:
        return torch.finfo(self.dtype).max


BF16 = NarrowFloat(torch.bfloat16, significand_bits=8, min_exponent=-126)
FP16 = NarrowFloat(torch.float16, significand_bits=11, min_exponent=-14)
NARROW_FLOATS = {narrow.dtype: narrow for narrow in (BF16, FP16)}


@dataclass(frozen=True)
class Frame:
    """The power-of-two scaling under which the grid of `narrow` is computed without over- or underflow.

    fp16's grid needs none. bf16 shares fp32's exponents, whose ends are out of reach of the rounding
    constant (above 2^111) and of the ulp formula (below 2^-100): values under 1 are worked on 2^32 times
    larger, the others 2^32 times smaller, both exactly.
    """

    narrow: NarrowFloat
    factor: Tensor | None = None
    inverse: Tensor | None = None

    @classmethod
    def around(cls, x: Tensor, narrow: NarrowFloat) -> "Frame":
        if narrow.min_exponent >= -100:
            return cls(narrow)
        small = x.abs() < 1
        return cls(narrow, either(small, 2.0**32, 2.0**-32), either(small, 2.0**-32, 2.0**32))

    def enter(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor

    def leave(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else x * self.inverse

    def spacing(self, x: Tensor) -> Tensor:
        """Distance between neighbours of `narrow` in the binade of `x`, which is inside the frame."""
        # Subnormals have the spacing of the least normal binade; Inf is to have one that is finite.
        least = 2.0 ** (self.narrow.min_exponent + (0 if self.factor is None else 32))
        return fp32_ulp(at_least(x.abs().clamp(max=2.0**100), least)) * 2.0 ** (24 - self.narrow.significand_bits)


def fp32_ulp(size: Tensor) -> Tensor:
    """Of `size` ≥ 2^-100, finite."""
    return (size + size * PHI) - size


def at_least(size: Tensor, least: float) -> Tensor:
    """The larger of the two, to within a rounding that never leaves its binade.

    By way of relu: a maximum, which has NaN to mind, takes four instructions.
    """
    return torch.relu(size - least) + least


def either(condition: Tensor, if_true: float, if_false: float) -> Tensor:
    """One number or the other as fp32, whatever torch's default dtype."""
    return torch.where(condition, if_true, if_false).to(torch.float32)


def nearest(x: Tensor, spacing: Tensor) -> Tensor:
    """`x` rounded to a multiple of `spacing`, ties to even; |x| < 2^24 spacings, or not finite."""
    push = spacing * (1.5 * 2.0**23)
    return (x + push) - push


def keep_sign_of_zero(rounded: Tensor, x: Tensor) -> Tensor:
    """−0.0 where `x` is negative and rounded to zero."""
    return torch.where(rounded == 0, x * 0.0, rounded)


def overflow(rounded: Tensor, narrow: NarrowFloat) -> Tensor:
    """±Inf beyond the largest value of `narrow`, before a cast to it that a compiler may fold away."""
    if narrow.max > 2.0**127:  # as large as fp32, where it has happened by itself
        return rounded
    return torch.where(rounded.abs() <= narrow.max, rounded, rounded * math.inf)


def round_up(x: Tensor, narrow: NarrowFloat = BF16) -> Tensor:
    """The least value of `narrow` that is not below `x` ≥ 0, as fp32."""
    frame = Frame.around(x, narrow)
    inside = frame.enter(x)
    spacing = frame.spacing(inside)
    rounded = nearest(inside, spacing)
    return frame.leave(torch.where(rounded < inside, rounded + spacing, rounded))


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root, the same bits in eager as compiled.

    Inductor emits the hardware's root, which is exact; eager CPU tensors go through a vector library that
    is an ulp off for up to a fifth of all inputs, so there the root is taken in float64.
    """
    if torch.compiler.is_compiling() or x.dtype != torch.float32:
        return x.sqrt()
    return x.double().sqrt().float()


def once(x: Tensor) -> Tensor:
    """`x` itself. On a CPU Inductor computes it in a loop of its own, not again at each use: what a whole group needs.

    (It stores what `as_strided` takes. A GPU's kernel holds a group in registers, and storing would take a second one.)
    """
    return x.as_strided(x.shape, x.stride()) if x.device.type == "cpu" else x
