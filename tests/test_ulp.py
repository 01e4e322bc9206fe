"""Spacing, rounding up and the square root, against the bits themselves."""

import numpy as np
import torch
from hypothesis import given
from strategies import COUNT, bits_of, chunks, differences, every_exponent, fp32_tensors, from_bits, random_bits, ulp
from torch import Tensor

from quant.ulp import BF16, FP16, Frame, NarrowFloat, round_up, sqrt


def spacing(x: Tensor, narrow: NarrowFloat) -> Tensor:
    frame = Frame.around(x, narrow)
    return frame.leave(frame.spacing(frame.enter(x)))


def grid(x: Tensor) -> tuple[Tensor, ...]:
    a = x.abs()
    return spacing(x, BF16), spacing(x, FP16), round_up(a, BF16), round_up(a, FP16), sqrt(a)


compiled_grid = torch.compile(grid)
EXPONENTS = every_exponent()
# Beyond, the formula for fp16, which ends at 2^16, is out of use.
FP16_REACH = 2.0**100


def test_spacing_is_that_of_the_exponent_for_every_exponent():
    finite = EXPONENTS[EXPONENTS.isfinite()]
    assert torch.equal(spacing(finite, BF16).double(), ulp(finite, torch.bfloat16))
    reached = finite[finite.abs() < FP16_REACH]
    assert torch.equal(spacing(reached, FP16).double(), ulp(reached, torch.float16))


@given(fp32_tensors())
def test_spacing_is_that_of_the_exponent(x: Tensor):
    x = x[x.isfinite()]
    assert torch.equal(spacing(x, BF16).double(), ulp(x, torch.bfloat16))
    x = x[x.abs() < FP16_REACH]
    assert torch.equal(spacing(x, FP16).double(), ulp(x, torch.float16))


def rounded_up_bits(x: Tensor) -> Tensor:
    """The bf16 not below x ≥ 0: the next pattern whose low 16 bits are zero."""
    return from_bits((bits_of(x).numpy().view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000))


def test_round_up_to_bf16_is_the_next_pattern_for_every_exponent():
    finite = EXPONENTS[EXPONENTS.isfinite()].abs()
    assert differences(round_up(finite, BF16), rounded_up_bits(finite)) == 0
    assert round_up(torch.tensor([3.4e38])).isinf().all()


@given(fp32_tensors())
def test_round_up_to_bf16_is_the_next_pattern(x: Tensor):
    x = x[x.isfinite()].abs()
    assert differences(round_up(x, BF16), rounded_up_bits(x)) == 0


@given(fp32_tensors())
def test_round_up_to_fp16_is_the_next_multiple_of_the_spacing(x: Tensor):
    x = x[x.abs() < 2.0**16].abs()
    step = ulp(x, torch.float16)
    assert torch.equal(round_up(x, FP16).double(), (x.double() / step).ceil() * step)


def is_correctly_rounded_root(root: Tensor, x: Tensor) -> Tensor:
    """Whether x lies between the squares of the midpoints about `root`: 25 bits, so exact in float64."""
    half = ulp(root, torch.float32) / 2
    below = (root.double() - torch.where(bits_of(root) % 2**23 == 0, half / 2, half)) ** 2
    return (below < x.double()) & (x.double() < (root.double() + half) ** 2)


@given(fp32_tensors())
def test_sqrt_is_correctly_rounded(x: Tensor):
    x = x[x.isfinite() & (x != 0)].abs()
    assert is_correctly_rounded_root(sqrt(x), x).all()


def test_sqrt_of_the_ends():
    ends = torch.tensor([0.0, -0.0, float("inf"), float("nan"), -1.0])
    assert differences(sqrt(ends), torch.tensor([0.0, -0.0, float("inf"), float("nan"), float("nan")])) == 0


def test_compiled_equals_eager_bit_for_bit():
    for x in chunks(torch.cat([EXPONENTS, random_bits(0, 2**20 - len(EXPONENTS))])):
        for ours, theirs in zip(compiled_grid(x), grid(x), strict=True):
            assert differences(ours, theirs) == 0


def test_compiled_sqrt_is_correctly_rounded():
    x = random_bits(1).abs()
    root = compiled_grid(x)[-1]
    checked = x.isfinite() & (x != 0)
    assert is_correctly_rounded_root(root[checked], x[checked]).all()
    assert len(x) == COUNT
