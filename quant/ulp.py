"""Where the grid of a 16-bit float lies, read from the bits of fp32: the ground under heads, tails and scales.

The bits of a float, taken as an integer, rise with its size: a mask gives the power of two below it, an addition
rounds it. Casting between the two costs nothing, neither on a GPU nor in the C++ that Inductor writes, where the
compiler makes nothing of the loop that a cast is (docs/performance.md says when). What is never done is a cast to 16
bits and back: Inductor folds fp32 → bf16 → fp32 to the identity. Every formula gives the same bits whether or not a
compiler contracts a multiply and an add into one FMA.

`for_gcc` asks for the same bits by operations that gcc can vectorize: it is set where Inductor writes loops over single
elements and leaves the vectors to gcc.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT = 0x7F800000
SIZE = 0x7FFFFFFF
SIGN = -(2**31)
# Bits of noise: for weights, as many as fp32 has behind a code of 8 bits; for states, whose codes come back from fp32
# arithmetic off by up to 8e-5, so few that it rounds them to what they were.
WEIGHT_NOISE_BITS = 14
STATE_NOISE_BITS = 12


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
    """fp32 or int32 x or y, as `torch.where` has it, by masks.

    Of a choice a C++ compiler may make a branch, to skip what only one side needs, and loops with branches are none
    that it can vectorize.
    """
    mask = -condition.to(torch.int32)
    if x.dtype == torch.int32:
        return (x & mask) | (y & ~mask)
    return from_bits((bits_of(x) & mask) | (bits_of(y) & ~mask))


def binade(x: Tensor, narrow: NarrowFloat, bounded: bool = True) -> Tensor:
    """The power of two at or below |x|, from that of the least normal of `narrow` to the largest, 2^127.

    Inf and NaN have that too or, if not `bounded`, Inf.
    """
    return from_bits((bits_of(x) & EXPONENT).clamp((narrow.min_exponent + 127) << 23, 254 << 23 if bounded else None))


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
    """`nearest` but for ties, which may go either way, for Inf, which may become NaN, and for NaN.

    On a CPU a NaN that is not made there, and has bits that bf16 lacks, may become zero; a GPU makes such.
    """
    if narrow.is_cut_fp32:
        rounded = from_bits((bits_of(x) + 0x8000) & -0x10000)
        return rounded if x.device.type == "cpu" else torch.where(x == x, rounded, x)
    return overflow(_pushed(x, binade(x, narrow), narrow), narrow)


def _pushed(x: Tensor, power: Tensor, narrow: NarrowFloat) -> Tensor:
    """x of the binade of `power`, rounded by a number that pushes the unwanted bits off the end of the significand."""
    push = power * (1.5 * 2.0 ** (24 - narrow.significand_bits))
    return (x + push) - push


def overflow(rounded: Tensor, narrow: NarrowFloat) -> Tensor:
    """±Inf beyond the largest value of `narrow`, before a cast to it that a compiler may fold away."""
    return select(rounded.abs() <= narrow.max, rounded, rounded * math.inf)


def narrowed(x: Tensor, narrow: NarrowFloat, for_gcc: bool = False) -> Tensor:
    """fp32 x, which lies on the grid of `narrow`, in its dtype; for gcc, fp16 as its bits in int16."""
    if not for_gcc:
        return x.to(narrow.dtype)
    if narrow.is_cut_fp32:  # a conversion would round once more, and mind NaN
        return (bits_of(x) >> 16).to(torch.int16).view(narrow.dtype)
    size = (bits_of(x.abs() * 2.0**-112) >> 13).clamp(max=0x7C00)
    size = size | (-(x != x).to(torch.int32) & 0x200)
    return (size | (bits_of(x) >> 16) & 0x8000).to(torch.int16)


def widened(x: Tensor) -> Tensor:
    """The fp32 values of floats, or of the bits of fp16, as which a compiler takes it that has no vectors for it."""
    if x.dtype != torch.int16:
        return x.to(torch.float32)
    bits = x.to(torch.int32)
    size = (bits & 0x7FFF) << 13
    infinite = -(size >= 0x7C00 << 13).to(torch.int32) & EXPONENT
    return from_bits(bits_of(from_bits(size) * 2.0**112) | infinite | (bits & SIGN))


def round_up(x: Tensor) -> Tensor:
    """The least bf16 that is not below x ≥ 0, as fp32; x not NaN."""
    return from_bits((bits_of(x) + 0xFFFF) & -0x10000)


def with_sign(size: Tensor, x: Tensor) -> Tensor:
    """`size` ≥ 0 with the sign of x."""
    if x.dtype != torch.float32:
        return torch.copysign(size, x)
    return from_bits(bits_of(size) | (bits_of(x) & SIGN))


def largest(x: Tensor, groups: int = 1, for_gcc: bool = False) -> Tensor:
    """The largest |x| of each group in each row, NaN where one is NaN."""
    if x.device.type != "cpu":
        return x.abs().unflatten(-1, (groups, -1)).amax(-1)
    # Integers have no NaN to mind, as floats have in each step of `amax`.
    sizes = bits_of(x) & SIZE
    if for_gcc:
        if groups == 1:
            return from_bits(sizes.amax(-1, keepdim=True))
        members = (_group_masks(x.shape[-1], groups, x.device, group) for group in range(groups))
        return from_bits(torch.cat([(sizes & mask).amax(-1, keepdim=True) for mask in members], -1))
    sizes = sizes.unflatten(-1, (groups, -1))
    if sizes.shape[-1] % 2 == 0:  # Inductor's own vectors have a fast last step for floats alone
        sizes = torch.maximum(*sizes.unflatten(-1, (2, -1)).unbind(-2))
    return from_bits(sizes).abs().amax(-1)


def spread(numbers: Tensor, over: Tensor) -> Tensor:
    """`numbers` of the groups in each row, as they are to be combined with the elements of `over`."""
    groups, elements = numbers.shape[-1:].numel(), over.shape[-1:].numel()
    if groups in (1, elements):
        return numbers
    spread = numbers[..., -1:]
    for group in reversed(range(groups - 1)):
        lanes = torch.arange(elements, dtype=torch.int32, device=numbers.device)
        spread = select(lanes < (group + 1) * (elements // groups), numbers[..., group : group + 1], spread)
    return spread


def _group_masks(elements: int, groups: int, device: torch.device, group: int) -> Tensor:
    """All bits for the elements of a group in a row, none for the others'."""
    lanes, each = torch.arange(elements, dtype=torch.int32, device=device), elements // groups
    return -((lanes >= group * each) & (lanes < (group + 1) * each)).to(torch.int32)


# The bits of 1.5·2^23. Added to a number of less than 2^22, it pushes the fraction off the end of the significand: what
# is left there is the number, rounded to even, in two's complement. A power of two less leaves a bit of the fraction.
_PUSH = 0x4B400000


def centred(noise: Tensor) -> Tensor:
    """Noise for a weight as fp32 numbers even over ±1/2."""
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
    """x as a whole number within bounds: an integer of which the low 16 bits count, or 8 with `noise`.

    Rounded to nearest, ties to even, or down after adding `noise`, whole numbers of so many bits taken as a fraction; x
    is then to be less than 2^8. NaN ends at one of the bounds. Where `never_zero` is above zero, 1 is the least.
    """
    if noise is None:
        bits, base = bits_of(x + 1.5 * 2.0**23), _PUSH
    else:
        push = _PUSH - (noise_bits << 23)
        bits, base = bits_of(x + from_bits(noise | push)) >> noise_bits, push >> noise_bits
    least = None if never_zero is None else bits_of(never_zero).clamp(max=1)
    if for_gcc and high < 2**8:  # half of the bits, and so twice as many numbers in a vector
        base &= 0xFFFF
        bits, least = bits.to(torch.int16), None if least is None else least.to(torch.int16)
    bits = bits.clamp(max=base + high)
    return bits.clamp(min=base + low) if least is None else torch.maximum(bits, least + base)


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
