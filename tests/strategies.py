"""fp32 inputs of every kind, and oracles that work on their bits and share nothing with `quant`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

COUNT = 2**14  # elements in every compiled call of these tests, so that one graph is enough

# Significand bits including the hidden one, and the least normal exponent.
LAYOUT = {torch.float32: (24, -126), torch.bfloat16: (8, -126), torch.float16: (11, -14)}
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def from_bits(bits: np.ndarray | Iterable[int]) -> Tensor:
    """The fp32 tensor of the given 32-bit patterns."""
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGER_OF_SIZE[x.dtype.itemsize])


def differences(a: Tensor, b: Tensor) -> int:
    """The number of elements whose bits differ. All NaNs are equal."""
    assert a.dtype == b.dtype and a.shape == b.shape
    differ = bits_of(a) != bits_of(b)
    return int((differ & ~(a.isnan() & b.isnan())).sum())


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` in the binade of finite x, in float64, from frexp's exponent."""
    significand_bits, least = LAYOUT[dtype]
    magnitude = x.double().abs().numpy()
    exponent = np.where(magnitude == 0, least, np.frexp(magnitude)[1] - 1)
    return torch.from_numpy(np.ldexp(1.0, np.maximum(exponent, least) - significand_bits + 1))


def joined(head: Tensor, tail: Tensor) -> Tensor:
    """The exact value of a head and a tail, in float64, never rounded to fp32."""
    half = ulp(head, head.dtype) / 2
    return head.double() + tail.double() * half / torch.iinfo(tail.dtype).max


def every_exponent() -> Tensor:
    """Both signs, all 256 exponent fields, and the significands near which rounding changes direction."""
    significands = {0, 1, 2, 2**22, 2**23 - 2, 2**23 - 1}
    for dropped in (16, 13):  # bits that bf16 and fp16 drop: ties, their neighbours, and the carry
        half, unit = 2 ** (dropped - 1), 2**dropped
        for multiple in (0, 1, 2, 3, 2 ** (23 - dropped) // 2, 2 ** (23 - dropped) - 2, 2 ** (23 - dropped) - 1):
            significands |= {multiple * unit + half + offset for offset in (-2, -1, 0, 1, 2)} | {multiple * unit}
    generator = np.random.default_rng(0)
    while len(significands) < 128:
        significands.add(int(generator.integers(2**23)))
    fields = np.arange(512, dtype=np.uint32)[:, None] << 23
    return from_bits((fields + np.array(sorted(significands), dtype=np.uint32)).ravel())


def random_bits(seed: int, count: int = COUNT) -> Tensor:
    """fp32 numbers with uniformly random bits: every exponent, subnormals, a few infinities and NaNs."""
    return from_bits(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32))


@st.composite
def fp32_tensors(draw: Callable) -> Tensor:
    """COUNT numbers with random bits. Hypothesis chooses the first few and can shrink them."""
    chosen = draw(st.lists(st.integers(0, 2**32 - 1), max_size=8))
    x = random_bits(draw(st.integers(0, 2**32 - 1)))
    x[: len(chosen)] = from_bits(chosen)
    return x


class Compiled:
    """A function under `torch.compile` without options, and the code generated at its first call.

    It must be one graph, so that one recompile too many is an error and not a silent fall back to eager.
    """

    def __init__(self, function: Callable) -> None:
        self.function = torch.compile(function, fullgraph=True)
        self.code = ""

    def __call__(self, *args: Tensor) -> Any:
        if not self.code:
            result, sources = run_and_get_code(self.function, *args)
            self.code = "\n".join(sources)
            return result
        return self.function(*args)


def chunks(x: Tensor) -> Iterator[Tensor]:
    """`x` in pieces of COUNT, the size that functions are compiled for."""
    assert len(x) % COUNT == 0
    yield from x.split(COUNT)


# ±0, the ends of the subnormals, ±max; both sides of bf16's and fp16's overflow, of fp16's underflow to zero and
# of its least normal value; ±Inf and three NaNs.
SPECIAL = from_bits(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x7F7F7FFF, 0x7F7F8000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FDFFF, 0x387FE000),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001),
    ]
)
# The NaNs with the largest bits, a GPU's own among them. Rounding to bf16 by an addition would carry them to zero.
EXTREME_NANS = from_bits([*range(0x7FFF0000, 0x80000000), *range(0xFFFF0000, 0x100000000)])
