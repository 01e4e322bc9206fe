"""Spacing, rounding, maxima and the square root agree with casts, numpy and the bits."""

import math

import numpy as np
import torch
from hypothesis import given
from strategies import (
    COUNT,
    EXTREME_NANS,
    bits_of,
    chunks,
    differences,
    every_exponent,
    fp32_tensors,
    random_bits,
    ulp,
)
from torch import Tensor

from quant.ulp import (
    BF16,
    FP16,
    STATE_NOISE_BITS,
    WEIGHT_NOISE_BITS,
    binade,
    largest,
    narrowed,
    nearest,
    nearest_fast,
    round_up,
    select,
    spacing,
    spread,
    sqrt,
    two_over,
    whole,
    widened,
    with_sign,
)


def grid(x: Tensor) -> tuple[Tensor, ...]:
    a = x.abs()
    groups = x.view(-1, 32)
    return (
        *(function(x, narrow) for function in (spacing, nearest, nearest_fast) for narrow in (BF16, FP16)),
        two_over(binade(x, BF16)),
        round_up(torch.where(x.isnan(), 0.0, a)),
        largest(groups),
        largest(groups[:, :31]),
        with_sign(a, -x),
        whole(x * 2.0**-100, -127, 127).to(torch.int8),
        sqrt(a),
    )


compiled_grid = torch.compile(grid)
EXPONENTS = every_exponent()


def test_spacing_is_that_of_the_exponent_for_every_exponent():
    finite = EXPONENTS[EXPONENTS.isfinite()]
    assert torch.equal(spacing(finite, BF16).double(), ulp(finite, torch.bfloat16))
    assert torch.equal(spacing(finite, FP16).double(), ulp(finite, torch.float16))


@given(fp32_tensors())
def test_spacing_is_that_of_the_exponent(x: Tensor):
    x = x[x.isfinite()]
    assert torch.equal(spacing(x, BF16).double(), ulp(x, torch.bfloat16))
    assert torch.equal(spacing(x, FP16).double(), ulp(x, torch.float16))


@given(fp32_tensors())
def test_nearest_is_the_cast(x: Tensor):
    for narrow in (BF16, FP16):
        expected = x.to(narrow.dtype).float()
        assert differences(nearest(x, narrow), expected) == 0
        x, expected = x[~x.isnan()], expected[~x.isnan()]
        quick = nearest_fast(x, narrow)
        assert ((quick - x).abs() <= (expected - x).abs())[expected.isfinite()].all()
        assert torch.equal(quick.isfinite(), expected.isfinite())


def test_every_nan_stays_nan():
    """Even NaNs whose bits would round to zero, like a GPU's own. CPU and bf16 NaNs have fewer bits set."""
    for narrow in (BF16, FP16):
        assert nearest(EXTREME_NANS, narrow).isnan().all()
        short = EXTREME_NANS.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
        assert nearest_fast(short, narrow).isnan().all()
    assert largest(EXTREME_NANS.view(-1, 32)).isnan().all()


@given(fp32_tensors())
def test_two_over_a_binade(x: Tensor):
    power = binade(x[x.isfinite()], BF16).double()
    assert torch.equal(two_over(power.float()).double() * power, torch.full_like(power, 2.0))


@given(fp32_tensors())
def test_the_largest_of_a_row(x: Tensor):
    for columns in (1, 6, 7, 32):
        rows = x[: len(x) // columns * columns].view(-1, columns)
        expected = torch.from_numpy(np.abs(rows.numpy()).max(-1, initial=0.0, keepdims=True))
        for for_gcc in (False, True):
            assert differences(largest(rows, for_gcc=for_gcc), expected) == 0


@given(fp32_tensors())
def test_select_is_where(x: Tensor):
    for condition in (x > 1, x.isnan(), x == 0):
        assert differences(select(condition, x, -x), torch.where(condition, x, -x)) == 0


@given(fp32_tensors())
def test_whole_numbers_are_rounded_to_even_and_held(x: Tensor):
    numbers = x[~x.isnan()]
    for scaled in (numbers, torch.arange(-300, 300) / 2):
        assert torch.equal(whole(scaled, -127, 127).to(torch.int8), scaled.round().clamp(-127, 127).to(torch.int8))
        above = scaled.abs()
        floor = torch.where(above > 0, 1.0, 0.0)
        expected = torch.maximum(above.round(), floor).clamp(max=255).to(torch.uint8)
        assert torch.equal(whole(above, 0, 255, never_zero=above).to(torch.uint8), expected)
    assert (whole(torch.tensor([math.nan, -math.nan]), -5, 5).to(torch.int8).abs() == 5).all()


@given(fp32_tensors())
def test_whole_numbers_are_drawn_by_the_fraction_and_held(x: Tensor):
    """The number is rounded to steps of the noise, the noise is added, and the sum is rounded down."""
    for bits in (STATE_NOISE_BITS, WEIGHT_NOISE_BITS):
        for numbers in (x[~x.isnan()], torch.arange(-(2**15), 2**15) / 130):
            noise = torch.arange(len(numbers), dtype=torch.int32) * 37 % 2**bits
            steps = (numbers.double().clamp(-1000, 1000) * 2**bits).round() + noise
            expected = (steps / 2**bits).floor().clamp(-127, 127).to(torch.int8)
            assert torch.equal(whole(numbers, -127, 127, noise, bits).to(torch.int8), expected)
    least = torch.tensor([0.0, -0.0, 1e-45, 1e-9, 1e30])
    nothing = torch.zeros(5, dtype=torch.int32)
    assert whole(torch.zeros(5), 0, 255, nothing, never_zero=least).to(torch.uint8).tolist() == [0, 0, 1, 1, 1]


@given(fp32_tensors())
def test_numbers_of_several_groups_in_a_row(x: Tensor):
    """Each group's maximum and each element's number are the same as if every group were a row."""
    for groups, size in ((2, 32), (4, 16), (3, 5)):
        rows = x[: len(x) // (groups * size) * groups * size].view(-1, groups * size)
        apart = rows.view(-1, size)
        for for_gcc in (False, True):
            assert differences(largest(rows, groups, for_gcc), largest(apart).view(-1, groups)) == 0
        numbers = rows[:, :groups].contiguous()
        for each in (numbers, bits_of(numbers)):
            expected = each.view(-1, 1).expand(-1, size).reshape(rows.shape)
            assert differences(spread(each, rows), expected) == 0
        assert spread(apart[:, :1], apart) is not None and spread(rows, rows) is rows


@given(fp32_tensors())
def test_narrowing_what_lies_on_the_grid_is_a_conversion(x: Tensor):
    on_grid = nearest_fast(x, BF16)
    for for_gcc in (False, True):
        assert differences(narrowed(on_grid, BF16, for_gcc), on_grid.to(torch.bfloat16)) == 0


def test_fp16_by_its_bits_is_the_conversion_both_ways():
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    halves = bits.view(torch.float16)
    assert differences(widened(bits), halves.float()) == 0
    back = narrowed(halves.float(), FP16, for_gcc=True)
    assert back.dtype == torch.int16 and differences(back.view(torch.float16), halves) == 0


def rounded_up_bits(x: Tensor) -> Tensor:
    """The smallest bf16 not below x ≥ 0: the nearest one or the next."""
    rounded = x.to(torch.bfloat16)
    return torch.where(rounded.float() >= x, rounded, (rounded.view(torch.int16) + 1).view(torch.bfloat16)).float()


def test_round_up_to_bf16_is_the_next_pattern_for_every_exponent():
    finite = EXPONENTS[EXPONENTS.isfinite()].abs()
    assert differences(round_up(finite), rounded_up_bits(finite)) == 0
    assert round_up(torch.tensor([3.4e38])).isinf().all()


@given(fp32_tensors())
def test_round_up_to_bf16_is_the_next_pattern(x: Tensor):
    x = x[x.isfinite()].abs()
    assert differences(round_up(x), rounded_up_bits(x)) == 0


def is_correctly_rounded_root(root: Tensor, x: Tensor) -> Tensor:
    """True if x lies between the squares of the midpoints around `root`. They have 25 bits, so float64 is exact."""
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
