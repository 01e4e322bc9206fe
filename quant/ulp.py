"""The grids of 16-bit floats, read from the bits of fp32. Heads, tails and scales are built on them.

The bits of a float, read as an integer, rise with its magnitude: a mask gives the power of two below it, an addition
rounds it. Viewing one as the other costs nothing on a GPU, nor in Inductor's C++, where the compiler removes the loop
that copies the bits (docs/performance.md says when). We never cast to 16 bits and back: Inductor folds
fp32 → bf16 → fp32 to the identity. Every formula gives the same bits whether or not a compiler contracts a multiply
and an add into one FMA, unless it says otherwise.

Tensors that are `on_gpu` go through formulas of fewer machine instructions, whose roots and quotients are a few ulps
off (docs/gpu.md has the bounds). `for_gcc` gives the same bits with operations that gcc can vectorize. It is set where
Inductor writes loops over single elements and leaves vectors to gcc.
"""

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT = 0x7F800000
SIZE = 0x7FFFFFFF
SIGN = -(2**31)
LEAST_NORMAL = 2.0**-126
# Bits of noise. Weights use as many as fp32 has after an 8-bit code. Codes of states come back from fp32 arithmetic off
# by up to 8e-5, so states use few enough bits that rounding restores the codes.
WEIGHT_NOISE_BITS = 14
STATE_NOISE_BITS = 12


@dataclass(frozen=True)
class NarrowFloat:
    """A 16-bit IEEE-like float: significand bits, including the hidden one, and least normal exponent."""

    dtype: torch.dtype
    significand_bits: int
    min_exponent: int

    @property
    def max(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def is_cut_fp32(self) -> bool:
        """True if its grid is fp32's with the low bits cut off, over the whole range."""
        return self.min_exponent == -126


BF16 = NarrowFloat(torch.bfloat16, significand_bits=8, min_exponent=-126)
FP16 = NarrowFloat(torch.float16, significand_bits=11, min_exponent=-14)
NARROW_FLOATS = {narrow.dtype: narrow for narrow in (BF16, FP16)}


def on_gpu(x: Tensor) -> bool:
    """Whether to compute on x as GPUs do it best. A rule's formulas need not be told: their tensors know."""
    return x.device.type != "cpu"


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`torch.where` for fp32 or int32, with masks.

    A C++ compiler may turn a choice into a branch, to skip work that only one side needs. It cannot vectorize loops
    with branches.
    """
    if on_gpu(x):
        return torch.where(condition, x, y)
    mask = -condition.to(torch.int32)
    if x.dtype == torch.int32:
        return (x & mask) | (y & ~mask)
    return from_bits((bits_of(x) & mask) | (bits_of(y) & ~mask))


def binade(x: Tensor, narrow: NarrowFloat, bounded: bool = True) -> Tensor:
    """The power of two at or below |x|, at least that of the least normal of `narrow` and at most 2^127.

    For Inf and NaN it is 2^127 too or, if not `bounded`, Inf.
    """
    return from_bits((bits_of(x) & EXPONENT).clamp((narrow.min_exponent + 127) << 23, 254 << 23 if bounded else None))


def two_over(power: Tensor) -> Tensor:
    """2 / a power of two, exactly. 1 / the largest power would be subnormal."""
    return from_bits(EXPONENT - bits_of(power))


def two_over_binade(x: Tensor, narrow: NarrowFloat) -> Tensor:
    """`two_over(binade(x, narrow))` in one mask and one minimum, but for Inf and NaN, whose result is 0.

    The complement of a biased exponent is 255 minus that exponent.
    """
    return from_bits((~bits_of(x) & EXPONENT).clamp(max=EXPONENT - ((narrow.min_exponent + 127) << 23)))


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
    """`nearest`, except that ties may go either way and Inf may become NaN.

    On a CPU a NaN with bits that bf16 lacks may become zero. GPUs make such NaNs, CPUs do not: there, Inf and NaN times
    zero make NaN of whatever they were rounded to. Beyond fp16's largest value a GPU returns what a cast makes Inf.
    """
    if narrow.is_cut_fp32:
        rounded = from_bits((bits_of(x) + 0x8000) & -0x10000)
        return rounded + x * 0.0 if on_gpu(x) else rounded
    pushed = _pushed(x, binade(x, narrow), narrow)
    return pushed if on_gpu(x) else overflow(pushed, narrow)


def _pushed(x: Tensor, power: Tensor, narrow: NarrowFloat) -> Tensor:
    """Round x, in the binade of `power`, by adding a number that pushes unwanted bits off the significand."""
    push = power * (1.5 * 2.0 ** (24 - narrow.significand_bits))
    return (x + push) - push


def overflow(rounded: Tensor, narrow: NarrowFloat) -> Tensor:
    """Replace values beyond the largest of `narrow` by ±Inf. A compiler may fold away the cast that would do so."""
    return select(rounded.abs() <= narrow.max, rounded, rounded * math.inf)


def narrowed(x: Tensor, narrow: NarrowFloat, for_gcc: bool = False) -> Tensor:
    """Convert fp32 x, which lies on the grid of `narrow`, to its dtype. For gcc, fp16 stays bits in int16."""
    if not for_gcc:
        return x.to(narrow.dtype)
    if narrow.is_cut_fp32:  # a conversion would round again and check for NaN
        return (bits_of(x) >> 16).to(torch.int16).view(narrow.dtype)
    size = (bits_of(x.abs() * 2.0**-112) >> 13).clamp(max=0x7C00)
    size = size | (-(x != x).to(torch.int32) & 0x200)
    return (size | (bits_of(x) >> 16) & 0x8000).to(torch.int16)


def widened(x: Tensor) -> Tensor:
    """Convert floats, or fp16 as bits in int16, to fp32. Compilers without fp16 vectors take it as bits."""
    if x.dtype == torch.bfloat16 and on_gpu(x):  # a conversion of the upper of two halves takes two instructions
        return from_bits(x.view(torch.int16).to(torch.int32) << 16)
    if x.dtype != torch.int16:
        return x.to(torch.float32)
    bits = x.to(torch.int32)
    size = (bits & 0x7FFF) << 13
    infinite = -(size >= 0x7C00 << 13).to(torch.int32) & EXPONENT
    return from_bits(bits_of(from_bits(size) * 2.0**112) | infinite | (bits & SIGN))


def round_up(x: Tensor) -> Tensor:
    """The least bf16 not below x ≥ 0, as fp32. x must not be NaN."""
    return from_bits((bits_of(x) + 0xFFFF) & -0x10000)


def with_sign(size: Tensor, x: Tensor) -> Tensor:
    """`size` ≥ 0 with the sign of x."""
    if x.dtype != torch.float32:
        return torch.copysign(size, x)
    return from_bits(bits_of(size) | (bits_of(x) & SIGN))


def largest(x: Tensor, groups: int = 1, for_gcc: bool = False) -> Tensor:
    """The largest |x| of each group in each row, or NaN if the group has one."""
    # `amax` of floats checks for NaN in each step; of integers it does not.
    sizes = bits_of(x) & SIZE
    if on_gpu(x):
        return from_bits(sizes.unflatten(-1, (groups, -1)).amax(-1))
    if for_gcc:
        if groups == 1:
            return from_bits(sizes.amax(-1, keepdim=True))
        members = (_group_masks(x.shape[-1], groups, x.device, group) for group in range(groups))
        return from_bits(torch.cat([(sizes & mask).amax(-1, keepdim=True) for mask in members], -1))
    sizes = sizes.unflatten(-1, (groups, -1))
    if sizes.shape[-1] % 2 == 0:  # only for floats do Inductor's own vectors have a fast last step
        sizes = torch.maximum(*sizes.unflatten(-1, (2, -1)).unbind(-2))
    return from_bits(sizes).abs().amax(-1)


def at_least(size: Tensor, least: float) -> Tensor:
    """`size` ≥ 0, or `least` where that is larger. NaN stays NaN, for which a GPU has to compare floats twice."""
    if not on_gpu(size):
        return size.clamp(min=least)
    (bits,) = struct.unpack("i", struct.pack("f", least))
    return from_bits(bits_of(size).clamp(min=bits))


def spread(numbers: Tensor, over: Tensor) -> Tensor:
    """Expand `numbers`, one for each group in a row, so that they combine with the elements of `over`."""
    groups, elements = numbers.shape[-1:].numel(), over.shape[-1:].numel()
    if groups in (1, elements):
        return numbers
    spread = numbers[..., -1:]
    for group in reversed(range(groups - 1)):
        lanes = torch.arange(elements, dtype=torch.int32, device=numbers.device)
        spread = select(lanes < (group + 1) * (elements // groups), numbers[..., group : group + 1], spread)
    return spread


def _group_masks(elements: int, groups: int, device: torch.device, group: int) -> Tensor:
    """A mask with all bits set for a group's elements in a row, and none for others."""
    lanes, each = torch.arange(elements, dtype=torch.int32, device=device), elements // groups
    return -((lanes >= group * each) & (lanes < (group + 1) * each)).to(torch.int32)


# The bits of 1.5·2^23. Adding it to a number below 2^22 pushes the fraction off the significand, which then holds the
# number rounded to even, in two's complement. Each power of two less keeps a bit of the fraction.
_PUSH = 0x4B400000


def centred(noise: Tensor) -> Tensor:
    """A weight's noise as fp32 numbers, uniform over ±1/2."""
    return noise.to(torch.float32) * 2.0**-WEIGHT_NOISE_BITS - (0.5 - 2.0 ** -(WEIGHT_NOISE_BITS + 1))


def whole(
    x: Tensor,
    low: int,
    high: int,
    noise: Tensor | None = None,
    noise_bits: int = STATE_NOISE_BITS,
    never_zero: Tensor | None = None,
    for_gcc: bool = False,
) -> Tensor:
    """Round x to a whole number within bounds, an integer whose low 16 bits are valid, or 8 with `noise`.

    Without `noise`, round to nearest, ties to even. With it, add its `noise_bits` bits as a fraction and round down; x
    must then be below 2^8. NaN becomes one of the bounds. Where `never_zero` is above zero, the result is at least 1.
    """
    if noise is None:
        bits, base = bits_of(x + 1.5 * 2.0**23), _PUSH
    else:
        push = _PUSH - (noise_bits << 23)
        bits, base = bits_of(x + from_bits(noise | push)) >> noise_bits, push >> noise_bits
    least = None if never_zero is None else bits_of(never_zero).clamp(max=1)
    if for_gcc and high < 2**8:  # half the bits, so twice as many numbers per vector
        base &= 0xFFFF
        bits, least = bits.to(torch.int16), None if least is None else least.to(torch.int16)
    bits = bits.clamp(max=base + high)
    return bits.clamp(min=base + low) if least is None else torch.maximum(bits, least + base)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root, the same bits in eager as compiled.

    Inductor emits the hardware's root, which is exact. Eager CPU tensors go through a vector library that is
    an ulp off for up to a fifth of all inputs, so their root is taken in float64. On a GPU an exact root takes 13
    instructions; the square of `fourth_root` takes 3 and is a few ulps off.
    """
    if on_gpu(x):
        return torch.square(fourth_root(x))
    if torch.compiler.is_compiling() or x.dtype != torch.float32:
        return x.sqrt()
    return x.double().sqrt().float()


def inverse_root(x: Tensor) -> Tensor:
    """1/√x of x ≥ 0, for GPUs, which do this in one instruction and 2 ulps."""
    return x.rsqrt()


def fourth_root(x: Tensor) -> Tensor:
    """The fourth root of x ≥ 0, for GPUs: the inverse root of the inverse root, which is right for 0 and Inf too."""
    return inverse_root(inverse_root(x))


def inverse_root_of_size(x: Tensor) -> Tensor:
    """1/√|x|, for GPUs; for 0 it is finite, so that its product with x is 0. `largest` needs these bits too."""
    return at_least(from_bits(bits_of(x) & SIZE), LEAST_NORMAL).rsqrt()


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y of y ≥ 0. On a GPU a division takes 8 instructions, and twice the inverse root 3."""
    if not on_gpu(y):
        return x / y
    inverse = inverse_root(y)
    return x * inverse * inverse


def sign(x: Tensor) -> Tensor:
    """−1, 0 or 1; 0 for NaN."""
    if not on_gpu(x):
        return x.sign()
    return torch.where(x.abs() > 0, from_bits((bits_of(x) & SIGN) | 0x3F800000), 0.0)


def once(x: Tensor, by: Tensor | None = None) -> Tensor:
    """Return `x`. On a CPU, make Inductor compute it in a loop of its own and not at each use, for values of a group.

    Inductor stores what `as_strided` takes. A GPU's kernel holds a group in registers, and storing would take a second
    kernel. If x is a number, which is on the CPU for kernels of every device, `by` is the tensor that uses it.
    """
    return x.as_strided(x.shape, x.stride()) if not on_gpu(x if by is None else by) else x
