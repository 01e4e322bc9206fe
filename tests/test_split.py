"""Heads and tails: the head equals the cast, the error is within the bound, and compilers change no bit."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    COUNT,
    EXTREME_NANS,
    SPECIAL,
    Compiled,
    chunks,
    differences,
    every_exponent,
    fp32_tensors,
    joined,
    random_bits,
    ulp,
)
from torch import Tensor
from torch._inductor.cpu_vec_isa import pick_vec_isa

from quant import Rounded, Split, compute_ecc_bits, reconstruct_fp32_param
from quant.bounds import SPLITS, split_bound
from quant.dither import mix, noise
from quant.ulp import WEIGHT_NOISE_BITS

LARGEST_NOISE = 2**WEIGHT_NOISE_BITS - 1
Parts = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]
HEADS = (torch.bfloat16, torch.float16)


def name(format: Split) -> str:
    return f"{format.head}+{format.tail}".replace("torch.", "")


def round_trip_of(format: Split) -> Callable[[Tensor], Parts]:
    def round_trip(w: Tensor) -> Parts:
        head, tail = format.encode(w)
        return head, tail, format.decode(head, tail)

    return round_trip


def two_moves_of(format: Split) -> Callable[..., Parts]:
    def two_moves(head: Tensor, tail: Tensor, by: Tensor, u: Tensor, by_again: Tensor) -> Parts:
        first = format.advance(head, tail, by, u)
        second = format.advance(*first, by_again, LARGEST_NOISE - u)
        return *first, *second, format.decode(*second)

    return two_moves


ROUND_TRIP = {
    "eager": {format: round_trip_of(format) for format in SPLITS},
    "compiled": {format: Compiled(round_trip_of(format)) for format in SPLITS},
}
TWO_MOVES = {format: Compiled(two_moves_of(format)) for format in SPLITS}

each_format = pytest.mark.parametrize("format", SPLITS, ids=name)
each_mode = pytest.mark.parametrize("mode", ROUND_TRIP)


def padded(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(-len(x) % COUNT)])


EDGES = torch.cat([every_exponent(), padded(SPECIAL)])


def check_round_trip(format: Split, w: Tensor, head: Tensor, tail: Tensor, decoded: Tensor) -> Tensor:
    """Check that heads equal the cast, non-finite ones have tail 0, and errors are within the bound. Return shares."""
    assert differences(head, w.to(format.head)) == 0
    finite = head.isfinite()
    assert not tail[~finite].any()
    assert differences(decoded[~finite], head[~finite].float()) == 0
    w, head, decoded = w[finite], head[finite], decoded[finite]
    limit = split_bound(format).function()(ulp_head=ulp(head, format.head), ulp_fp32=ulp(w, torch.float32))
    share = (decoded.double() - w.double()).abs() / limit
    assert (share <= 1).all(), f"{w[share.argmax()]} errs by {share.max()} of the bound"
    return share


@each_format
@each_mode
def test_head_is_the_cast_and_error_is_within_the_bound_at_every_exponent(format: Split, mode: str):
    for w in chunks(EDGES):
        check_round_trip(format, w, *ROUND_TRIP[mode][format](w))


@each_format
@each_mode
@given(w=fp32_tensors())
@settings(max_examples=60)
def test_head_is_the_cast_and_error_is_within_the_bound(format: Split, mode: str, w: Tensor):
    check_round_trip(format, w, *ROUND_TRIP[mode][format](w))


def near_the_bound(format: Split) -> Tensor:
    """Inputs dense enough around one head to come close to the bound. fp32 is much finer than the codes there."""
    generator = np.random.default_rng(2)
    if format.head == torch.bfloat16:
        return torch.from_numpy(1.5 + np.arange(-(2**15), 2**15) * 2.0**-23).float()
    return torch.from_numpy(2.0**-26 + generator.integers(0, 2**23, 2**16) * 2.0**-49).float()


@each_format
@each_mode
def test_bound_is_tight(format: Split, mode: str):
    shares = [check_round_trip(format, w, *ROUND_TRIP[mode][format](w)).max() for w in chunks(near_the_bound(format))]
    assert max(shares) > 0.99


@each_format
@each_mode
def test_what_fits_the_head_comes_back_exactly(format: Split, mode: str):
    every_head = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(format.head)
    for w in chunks(every_head.float()):
        _, tail, decoded = ROUND_TRIP[mode][format](w)
        assert not tail.any()
        assert differences(decoded, w) == 0  # −0.0 included


@each_format
def test_compiled_equals_eager_on_a_million_values_and_every_exponent(format: Split):
    for w in chunks(torch.cat([EDGES, random_bits(3, 2**20)])):
        results = zip(ROUND_TRIP["compiled"][format](w), ROUND_TRIP["eager"][format](w), strict=True)
        assert [differences(ours, theirs) for ours, theirs in results] == [0, 0, 0]


@each_format
def test_default_dtype_changes_nothing(format: Split):
    w = random_bits(4)
    expected = ROUND_TRIP["eager"][format](w)
    torch.set_default_dtype(torch.float64)
    try:
        results = ROUND_TRIP["eager"][format](w)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [differences(a, b) for a, b in zip(results, expected, strict=True)] == [0, 0, 0]


@each_format
def test_rounding_is_as_fine_for_both_signs(format: Split):
    w = random_bits(5)
    (head, tail), (other_head, other_tail) = format.encode(w), format.encode(-w)
    assert differences(-head, other_head) == 0
    assert torch.equal(-tail, other_tail)


@each_format
def test_head_is_the_nearest_to_the_value_of_the_pair(format: Split):
    """This holds even if rounding carried into the next binade, whose codes are too coarse to hit the tie below."""
    exponent = torch.arange(-14, 16).repeat_interleave(2**15)
    below_power = torch.ldexp(1 - torch.arange(2**15).repeat(30) * 2.0**-24, exponent)
    for w in (below_power.float(), -below_power.float(), EDGES, random_bits(7)):
        head, tail = format.encode(w)
        head, tail = head[head.isfinite()], tail[head.isfinite()]
        outward = (joined(head, tail) - head.double()) * head.double().sign()
        spacing = ulp(head, format.head)
        fraction, _ = torch.frexp(head.double().abs())
        inner_spacing = torch.where(
            (fraction == 0.5) & (head.abs() > torch.finfo(format.head).tiny), spacing / 2, spacing
        )
        assert (outward <= spacing / 2).all()
        assert (outward >= -inner_spacing / 2).all()


# Moving stored weights


def noises(count: int, step: int = 0) -> Tensor:
    return noise(mix(torch.arange(count, dtype=torch.int32), torch.tensor(step, dtype=torch.int32)), stream=0)


# Far enough from the ends that no move overflows or is too small for fp32.
LEAST_MOVED, MOST_MOVED = 2.0**-100, 2.0**126


def stored(format: Split, generator: np.random.Generator, count: int = COUNT) -> Pair:
    """Encoded weights from the whole range in which moves are correct, except the last binade."""
    patterns = torch.from_numpy(generator.integers(0, 2**16, count, dtype=np.uint16).view(np.int16))
    head = patterns.view(format.head)
    head = torch.where(head.abs() < min(torch.finfo(format.head).max / 2, MOST_MOVED), head, 1)
    head = torch.where(head.abs() >= LEAST_MOVED, head, 2 * LEAST_MOVED)
    tail = torch.from_numpy(generator.integers(-format.levels, format.levels + 1, count)).to(format.tail)
    return format.encode(joined(head, tail).float())


def small_moves(head: Tensor, generator: np.random.Generator) -> Tensor:
    """fp32 moves of both signs and all magnitudes up to an ulp of the head."""
    size = 2.0 ** -generator.uniform(0, 30, len(head)) * generator.choice([-1.0, 1.0], len(head))
    return (ulp(head, head.dtype) * torch.from_numpy(size)).float()


def check_move(format: Split, before: Pair, by: Tensor, after: Pair, whole_codes: float) -> Tensor:
    """Check that the exact sum of head and tail moved `by`, within the bound. Return the errors as shares of it."""
    larger = torch.maximum(ulp(before[0], format.head), ulp(after[0], format.head))
    limit = split_bound(format, "dither").function()(ulp_head=larger) - (1 - whole_codes) * larger / (2 * format.levels)
    share = (joined(*after) - joined(*before) - by.double()).abs() / limit
    assert (share <= 1).all(), f"a move errs by {share.max()} of the bound"
    return share


@each_format
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_dithered_move_is_within_the_bound(format: Split, seed: int):
    generator = np.random.default_rng(seed)
    parts = stored(format, generator)
    by = small_moves(parts[0], generator)
    after = format.advance(*parts, by, noises(COUNT, seed % 2**31))
    check_move(format, parts, by, after, whole_codes=1)


@each_format
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_nearest_move_is_within_half_a_code_less(format: Split, seed: int):
    generator = np.random.default_rng(seed)
    parts = stored(format, generator)
    by = small_moves(parts[0], generator)
    check_move(format, parts, by, format.advance(*parts, by, None), whole_codes=0.5)


@each_format
def test_bound_of_a_dithered_move_is_tight(format: Split):
    parts = format.encode(torch.full((2**16,), 1.5))
    by = torch.full((2**16,), 2.0**-10 * ulp(parts[0][:1], format.head).item() / (2 * format.levels))
    assert check_move(format, parts, by, format.advance(*parts, by, noises(2**16)), whole_codes=1).max() > 0.99


@each_format
def test_moves_within_one_compiled_function_equal_separate_eager_ones(format: Split):
    for seed in range(16):
        generator = np.random.default_rng(seed)
        parts = stored(format, generator)
        by, by_again = small_moves(parts[0], generator), small_moves(parts[0], generator)
        by[::5] = 0
        u = noises(COUNT, seed)
        head, tail = format.advance(*parts, by, u)
        expected = head, tail, *format.advance(head, tail, by_again, LARGEST_NOISE - u)
        expected = *expected, format.decode(*expected[2:])
        results = TWO_MOVES[format](*parts, by, u, by_again)
        assert [differences(a, b) for a, b in zip(results, expected, strict=True)] == [0] * 5


@each_format
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_moving_by_zero_keeps_every_pair_that_encode_makes(format: Split, zero: float):
    dense = torch.cat([near_the_bound(format), 2 - torch.arange(2**16) * 2.0**-22])  # all tails, and the carry
    for w in chunks(torch.cat([EDGES, dense.float(), random_bits(6)])):
        parts = format.encode(w)
        for u in (noises(COUNT), None, *(torch.full((COUNT,), edge, dtype=torch.int32) for edge in (0, LARGEST_NOISE))):
            after = format.advance(*parts, torch.full((COUNT,), zero), u)
            assert [differences(a, b) for a, b in zip(after, parts, strict=True)] == [0, 0]


def mean_move(format: Split, parts: Pair, codes: float, steps: int) -> tuple[float, float]:
    """The mean move per step in codes of `parts`, and 5 standard deviations of it."""
    count = len(parts[0])
    size = ulp(parts[0][:1], format.head).item() / (2 * format.levels)
    start, by = joined(*parts), torch.full((count,), codes * size)
    for step in range(steps):
        parts = format.advance(*parts, by, noises(count, step))
    mean = ((joined(*parts) - start) / size).mean().item() / steps
    fraction = abs(codes) % 1
    return mean, 5 * math.sqrt(max(fraction * (1 - fraction), 2.0**-9) / (count * steps))


# 16-bit tails reach fp32's own resolution, 2^-9 of a code. Smaller moves cannot be distinguished.
SMALL_SHARE = {torch.int8: 1e-3, torch.int16: 2.0**-6}


@each_format
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("start", ["in a binade", "below a power of two", "above a power of two"])
def test_dithered_moves_are_right_on_average(format: Split, sign: int, start: str):
    count = 2**16
    head = torch.full((count,), {"in a binade": 1.5}.get(start, 2.0), dtype=format.head)
    tail = torch.arange(count) % 64 + 1
    tail = torch.where(tail % 2 == 0, tail, -tail) if start == "in a binade" else tail
    tail = (-tail if start == "below a power of two" else tail).to(format.tail)
    for codes in (SMALL_SHARE[format.tail], 0.3, 1.7):
        mean, stray = mean_move(format, (head, tail), sign * codes, steps=16)
        assert abs(mean - sign * codes) < stray


@each_format
def test_small_moves_cross_from_head_to_head(format: Split):
    """Weights start 30 codes below a tie and move 60 codes by a third per step. None stays behind at the tie."""
    count = 2**12
    for first_head in (1.5, 1.5 + 2 * torch.finfo(format.head).eps / 2, 2 - torch.finfo(format.head).eps):
        head = torch.full((count,), first_head, dtype=format.head)
        tail = torch.full((count,), format.levels - 30, dtype=format.tail)
        mean, _ = mean_move(format, (head, tail), 1 / 3, steps=180)
        assert abs(mean - 1 / 3) < 0.01


@each_format
def test_small_moves_stall_without_dither(format: Split):
    parts = format.encode(torch.full((COUNT,), 1.5) + torch.arange(COUNT) * 2.0**-23)
    by = torch.full((COUNT,), 0.3 * ulp(parts[0][:1], format.head).item() / (2 * format.levels))
    after = format.advance(*parts, by, None)
    assert torch.equal(joined(*after), joined(*parts))


@each_format
def test_large_moves_round_like_fp32(format: Split):
    """A move of any size errs by at most a code plus fp32 roundings of the weight and the move."""
    generator = np.random.default_rng(8)
    parts = stored(format, generator)
    by = (parts[0].double() * torch.from_numpy(generator.uniform(-1.9, 1, COUNT))).float()
    after = format.advance(*parts, by, noises(COUNT))
    code = split_bound(format, "dither").function()(ulp_head=ulp(after[0], format.head))
    fp32 = ulp(torch.maximum(parts[0].abs().float(), by.abs()), torch.float32)
    error = (joined(*after) - joined(*parts) - by.double()).abs()
    assert (error <= code + 2 * fp32).all()


@each_format
def test_the_least_weights_are_moved_like_others(format: Split):
    exponents = torch.arange(-149, -80).repeat_interleave(16)
    w = torch.ldexp(1 + torch.arange(len(exponents)) % 16 / 16, exponents).float()
    parts = format.encode(w)
    for by in (w.flip(0), -w.flip(0), w / 3):
        after = format.advance(*parts, by, None)
        moved = joined(*after) - joined(*parts)
        code = ulp(after[0], format.head) / format.levels
        assert ((moved - by.double()).abs() <= code + 2.0**-149).all()


@each_format
def test_nonfinite_or_overflowing_moves_give_nonfinite_weights(format: Split):
    largest = torch.finfo(format.head).max
    head = torch.tensor([largest, -largest, 1.0, 1.0, 1.0, math.inf, math.nan], dtype=format.head)
    by = torch.tensor([largest, -largest, math.inf, -math.inf, math.nan, 1.0, 1.0])
    tail = torch.tensor([1, 1, 1, 1, 1, 0, 0], dtype=format.tail)
    for u in (None, *(torch.full((7,), u, dtype=torch.int32) for u in (0, LARGEST_NOISE))):
        after = format.advance(head, tail, by, u)
        assert not after[0].isfinite().any() and not format.decode(*after).isfinite().any()


@each_format
def test_a_move_by_any_nan_gives_nan(format: Split):
    ones = torch.ones(len(EXTREME_NANS))
    for by in (EXTREME_NANS, ones * math.nan, -ones * math.nan):
        head, tail = format.advance(*format.encode(ones), by, noises(len(by)))
        assert head.isnan().all() and not tail.any()


# Inductor's code


def vectorized(code: str) -> bool:
    """True if all loops of the generated C++ run over vectors and none steps by one element."""
    return "at::vec::Vectorized" in code and "x0+=static_cast<int64_t>(1L)" not in code


def generated_code(format: Split) -> list[str]:
    generator = np.random.default_rng(9)
    parts = stored(format, generator)
    by = small_moves(parts[0], generator)
    ROUND_TRIP["compiled"][format](random_bits(9))
    TWO_MOVES[format](*parts, by, noises(COUNT), by.clone())  # passing the same tensor twice would make another graph
    return [ROUND_TRIP["compiled"][format].code, TWO_MOVES[format].code]


@each_format
@pytest.mark.skipif(not pick_vec_isa(), reason="this machine has no vector instructions that Inductor knows")
def test_generated_code_is_vectorized_for_tails_of_8_bits(format: Split):
    for code in generated_code(format):
        # Inductor's C++ backend has no int16 vectors (torch 2.13). If this changes, update the documentation.
        assert vectorized(code) == (format.tail == torch.int8)


def test_inductor_folds_a_cast_and_back_to_nothing():
    """Our formulation avoids this trap. If this test fails, PyTorch has changed and the trap is gone."""

    def naive_rest(w: Tensor) -> Tensor:
        return w - w.to(torch.bfloat16).to(torch.float32)

    w = torch.linspace(1, 2, COUNT)
    assert naive_rest(w).count_nonzero() > COUNT // 2
    assert not torch.compile(naive_rest)(w).any()


# The 16-bit weight without a tail


@pytest.mark.parametrize("head", HEADS)
def test_rounded_is_the_cast(head: torch.dtype):
    for w in (EDGES, random_bits(10)):
        (stored,) = Rounded(head).encode(w)
        assert differences(stored, w.to(head)) == 0
        assert differences(Rounded(head).decode(stored), w.to(head).float()) == 0


@pytest.mark.parametrize("head", HEADS)
def test_rounded_moved_by_zero_stays(head: torch.dtype):
    start = random_bits(11).to(head)
    (after,) = Rounded(head).advance(start, torch.zeros(COUNT), noises(COUNT))
    assert differences(after, start) == 0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("start", [1.0, 1.5, -2.0])
@pytest.mark.parametrize("share", [1e-3, -1e-3, 0.3, -0.3])
def test_rounded_moves_are_right_on_average(head: torch.dtype, start: float, share: float):
    count = 2**20
    before = torch.full((count,), start, dtype=head)
    size = ulp(before[:1], head).item()
    (after,) = Rounded(head).advance(before, torch.full((count,), share * size), noises(count))
    mean = ((after.double() - start) / size).mean().item()
    assert abs(mean - share) < 5 * math.sqrt(abs(share) * (1 - abs(share)) / count)


# The public functions and bad input


@each_format
def test_public_functions_are_the_format(format: Split):
    w = random_bits(12)
    head, tail = format.encode(w)
    width = {torch.int8: 3, torch.int16: 4}[format.tail]
    assert torch.equal(compute_ecc_bits(w, head, master_bytewidth=width), tail)
    assert differences(reconstruct_fp32_param(head, tail), format.decode(head, tail)) == 0


@each_format
@pytest.mark.parametrize("way", ["cut off", "away from zero", "nearest"])
@given(w=fp32_tensors())
def test_the_tail_of_a_given_head_is_the_best_there_is(format: Split, way: str, w: Tensor):
    """However the head was rounded: no other code comes closer to the weight, by more than roundings of fp32."""
    head = w.to(format.head)
    apart = torch.nextafter(head, torch.full_like(head, 0 if way == "cut off" else math.inf).copysign(head))
    is_other = {
        "cut off": head.abs().double() > w.abs().double(),
        "away from zero": head.abs().double() < w.abs().double(),
        "nearest": torch.zeros_like(w, dtype=torch.bool),
    }[way]
    head = torch.where(is_other, apart, head)
    tail = compute_ecc_bits(w, head, master_bytewidth=3 if format.tail == torch.int8 else 4)
    limit = torch.iinfo(format.tail).max
    finite = head.isfinite() & w.isfinite()
    assert not tail[~finite].any() and tail.min() >= -limit
    w, head, tail = w[finite], head[finite], tail[finite]
    error = (joined(head, tail) - w.double()).abs()
    for other in (-limit, 0, limit, tail.int() - 1, tail.int() + 1):
        codes = torch.as_tensor(other).clamp(-limit, limit).expand(tail.shape).to(format.tail)
        slack = 2.0**-21 * ulp(head, format.head)
        assert (error <= (joined(head, codes) - w.double()).abs() + slack).all()


@each_format
def test_parts_have_the_shape_of_the_weight_and_the_promised_bytes(format: Split):
    parts = format.parts((3, 5))
    head, tail = format.encode(torch.randn(3, 5))
    assert {name: (part.shape, part.dtype) for name, part in parts.items()} == {
        "head": (head.shape, head.dtype),
        "tail": (tail.shape, tail.dtype),
    }
    assert sum(part.bytes for part in parts.values()) == 15 * split_bound(format).bytes
    assert format.decode(head, tail).shape == (3, 5)


@each_format
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_any_shape_splits(format: Split, shape: tuple[int, ...]):
    head, tail = format.encode(torch.full(shape, 1.25))
    assert head.shape == tail.shape == shape
    assert torch.equal(format.decode(head, tail), torch.full(shape, 1.25))


W = torch.zeros(4)
H = torch.zeros(4, dtype=torch.bfloat16)
T = torch.zeros(4, dtype=torch.int8)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: Split(torch.float32),
            TypeError,
            "head has dtype torch.float32; allowed is torch.bfloat16 or torch.float16.",
        ),
        (
            lambda: Split(tail=torch.int32),
            TypeError,
            "tail has dtype torch.int32; allowed is torch.int8 or torch.int16.",
        ),
        (lambda: Rounded(torch.float64), TypeError, "head has dtype torch.float64; allowed is"),
        (
            lambda: compute_ecc_bits(W.double(), H),
            TypeError,
            "fp32_param has dtype torch.float64; allowed is torch.float32.",
        ),
        (lambda: compute_ecc_bits(W, W), TypeError, "head has dtype torch.float32; allowed is"),
        (lambda: compute_ecc_bits(W, H[:3]), ValueError, r"narrow_param has shape \(3,\); .* fp32_param, \(4,\)."),
        (lambda: compute_ecc_bits(W, H, 2), ValueError, "master_bytewidth is 2; allowed are 3 .* and 4"),
        (lambda: reconstruct_fp32_param(H, T[:3]), ValueError, r"error_bits has shape \(3,\); .* param, \(4,\)."),
        (lambda: reconstruct_fp32_param(H, T.int()), TypeError, "tail has dtype torch.int32; allowed is"),
        (lambda: reconstruct_fp32_param(W, T), TypeError, "head has dtype torch.float32; allowed is"),
    ],
)
def test_bad_input_gets_one_clear_sentence(call: Callable[[], object], error: type[Exception], message: str):
    with pytest.raises(error, match=message) as raised:
        call()
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
