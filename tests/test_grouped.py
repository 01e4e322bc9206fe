"""Companded groups: errors are within the derived bound and zero on average, and groups never affect each other."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COUNT, Compiled, bits_of, differences
from torch import Tensor

from quant import ROOT8, SIGNED8, Compander, Grouped, dequantize, quantize
from quant.bounds import GROUPS, grouped_bound, mean_bend
from quant.compand import FOURTH_ROOT, LINEAR, SOFTSIGN, SQUARE_ROOT, Y, mu_law, rational
from quant.compand import X as PHI
from quant.dither import mix, noise
from quant.grouped import SLACK
from quant.ulp import STATE_NOISE_BITS

FORMATS = [*GROUPS, Grouped(LINEAR, signed=False), Grouped(SOFTSIGN, signed=False), Grouped(mu_law(), signed=False)]
ROUNDINGS = ("nearest", "dither")
DRAWN_EDGES = (0, 2**STATE_NOISE_BITS - 1)
# A code may be off by this much and still count as whole.
MARGIN = 2.0 ** -(STATE_NOISE_BITS + 1)
# The optimizers' formats and the published momentum, each compiled once for COUNT elements.
COMPILED = [SIGNED8, ROOT8, Grouped(SOFTSIGN)]


def name(format: Grouped) -> str:
    return f"{format.compander.name}, {'signed' if format.signed else 'unsigned'}"


def round_trips_of(format: Grouped) -> Callable[[Tensor, Tensor], dict[str, tuple[Tensor, ...]]]:
    def round_trips(x: Tensor, u: Tensor) -> dict[str, tuple[Tensor, ...]]:
        parts = {"nearest": format.encode(x), "dither": format.encode(x, u)}
        return {rounding: (*each, format.decode(*each)) for rounding, each in parts.items()}

    return round_trips


EAGER = {format: round_trips_of(format) for format in FORMATS}
COMPILED_TRIPS = {format: Compiled(round_trips_of(format)) for format in COMPILED}

each_format = pytest.mark.parametrize("format", FORMATS, ids=name)
each_compiled = pytest.mark.parametrize("format", COMPILED, ids=name)
each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def noises(shape: tuple[int, ...], step: int = 0) -> Tensor:
    index = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    return noise(mix(index, torch.tensor(step, dtype=torch.int32)), stream=1)


def groups(seed: int, signed: bool, size: int = 32) -> Tensor:
    """COUNT elements in groups of all scales and spreads, with zeros and repeated values."""
    generator = np.random.default_rng(seed)
    shape = (COUNT // size, size)
    scale = 10.0 ** generator.uniform(-42, 36, (shape[0], 1))
    spread = generator.choice([0.0, 0.5, 3.0, 20.0], (shape[0], 1))
    x = scale * np.exp(spread * generator.standard_normal(shape)) * generator.choice([-1.0, 1.0], shape)
    x[generator.random(shape) < generator.choice([0.0, 0.3, 0.9], (shape[0], 1))] = 0
    x = torch.from_numpy(np.clip(x, -1e36, 1e36)).float()
    return x if signed else x.abs()


def check_bound(format: Grouped, rounding: str, x: Tensor, scales: Tensor, decoded: Tensor) -> Tensor:
    """Check that finite groups err within the bound. Return the errors as shares of it."""
    limit = grouped_bound(format, rounding).function()(scale=scales.double())
    share = (decoded.double() - x.double()).abs() / limit
    worst = int(share.argmax())
    assert (share <= 1).all(), f"{x.flatten()[worst]} errs by {share.flatten()[worst]} of the bound"
    return share


def check_scales(x: Tensor, scales: Tensor) -> None:
    """Check from its bits that each scale is the least bf16 not below the group's largest value, minus the slack."""
    largest = x.abs().amax(-1, keepdim=True).double()
    scale, least = scales.double(), 2.0**-118
    assert not scale[largest == 0].any()
    assert (scale >= largest * (1 - SLACK) * (1 - 2.0**-24)).all()
    assert (scale[(largest > 0) & (largest <= least)] == least).all()
    below = (bits_of(scales) - 1).view(torch.bfloat16).double()
    assert (below < largest * (1 - SLACK) * (1 + 2.0**-24))[largest > least].all()


@each_format
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_error_is_within_the_bound_and_scale_is_the_least(format: Grouped, seed: int):
    x = groups(seed, format.signed)
    for rounding, (_, scales, decoded) in EAGER[format](x, noises(x.shape, seed % 2**31)).items():
        check_bound(format, rounding, x, scales, decoded)
        check_scales(x, scales)


@each_compiled
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_compiled_error_is_within_the_bound_and_equals_eager_bit_for_bit(format: Grouped, seed: int):
    x = groups(seed, format.signed)
    args = x, noises(x.shape, seed % 2**31)
    eager = EAGER[format](*args)
    for rounding, (codes, scales, decoded) in COMPILED_TRIPS[format](*args).items():
        check_bound(format, rounding, x, scales, decoded)
        results = zip((codes, scales, decoded), eager[rounding], strict=True)
        assert [differences(a, b) for a, b in results] == [0, 0, 0]


@each_format
@pytest.mark.parametrize("size", [2, 32, 64, 128])
@each_rounding
def test_bound_holds_for_every_group_size(format: Grouped, size: int, rounding: str):
    format = Grouped(format.compander, format.signed, size)
    x = groups(size, format.signed, size)
    codes, scales = format.encode(x, noises(x.shape) if rounding == "dither" else None)
    check_bound(format, rounding, x, scales, format.decode(codes, scales))


def dense(format: Grouped, count: int = 2**18) -> Tensor:
    """One group of scale one, with values evenly from 0 to 1 and right above zero."""
    ends = torch.tensor([1.0, 1e-30, 1e-8])
    return torch.cat([ends, torch.linspace(0, 1, count)])[None]


@each_format
def test_bound_is_tight_for_nearest(format: Grouped):
    x = dense(format)
    codes, scales = format.encode(x)
    assert check_bound(format, "nearest", x, scales, format.decode(codes, scales)).max() > 0.99


@each_format
def test_bound_is_tight_for_dither(format: Grouped):
    x = dense(format)
    shares = []
    for edge in DRAWN_EDGES:  # always the lower code, then always the upper
        codes, scales = format.encode(x, torch.full_like(x, edge, dtype=torch.int32))
        shares.append(check_bound(format, "dither", x, scales, format.decode(codes, scales)).max())
    assert max(shares) > 0.99


def neighbours(format: Grouped, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The representable values on either side of each ratio ≥ 0, as shares of the scale, in float64 from ψ."""
    psi = sympy.lambdify(Y, format.compander.inverse, "numpy")
    values = np.concatenate([[0.0], psi(np.arange(1, format.levels + 1) / format.levels)])
    above = np.searchsorted(values, ratio, side="left").clip(1, format.levels)
    return values[above - 1], values[above]


@each_format
def test_dithered_codes_and_values_are_right_on_average(format: Grouped):
    """Besides chance, codes may be off by MARGIN, values by ψ's bend between two codes as well."""
    draws = 2**14
    phi = sympy.lambdify(PHI, format.compander.expression, "numpy")
    ratio = np.concatenate([[1.0], np.random.default_rng(3).uniform(0.01, 1, 31)]).astype(np.float32)
    sign = np.where(np.arange(32) % 2 == 0, 1, -1) if format.signed else np.ones(32)
    x = torch.from_numpy(ratio * sign).float()
    codes, scales = format.encode(x.expand(draws, 32), noises((draws, 32)))
    values = format.decode(codes, scales).double()

    exact_codes = format.levels * sign * phi(ratio.astype(float))
    fraction = exact_codes % 1
    chance = 5 * np.sqrt(fraction * (1 - fraction) / draws)
    allowed = chance + MARGIN + 1e-4
    assert (abs(codes.double().mean(0).numpy() - exact_codes) < allowed).all()
    below, above = neighbours(format, ratio.astype(float))
    error = abs(values.mean(0).numpy() - x.double().numpy())
    assert (error < allowed * (above - below) + mean_bend(format)).all()


@each_format
def test_whole_codes_come_back_to_within_the_margin_of_dither(format: Grouped):
    codes = torch.arange(1, format.levels + 1).float()
    for exponent in range(-60, 112, 4):
        for significand in (1.0, 1.2578125, 1.9921875):
            scale = torch.tensor(significand * 2.0**exponent)
            value = format.decode(codes, scale)
            again = format.compander.compressor(format.levels)(value, scale)
            assert (again - codes).abs().max() < MARGIN


@each_format
def test_dither_chooses_between_the_two_neighbours(format: Grouped):
    x = dense(format, 2**14)
    codes, scales = format.encode(x, noises(x.shape))
    decoded = format.decode(codes, scales)[0].double().numpy()
    below, above = neighbours(format, x[0].double().numpy())
    inside = x[0].numpy() > above.min()
    nearest = np.minimum(abs(decoded - below), abs(decoded - above))
    assert (nearest[inside] < 1e-5 * above[inside] + 1e-7).all()


@each_format
@pytest.mark.parametrize("scale", [1.0, 3.5, 2.0**-100, 1e30])
def test_representable_values_stay_whatever_is_drawn(format: Grouped, scale: float):
    codes = torch.arange(-format.levels if format.signed else 0, format.levels + 1).to(format.dtype)[None]
    scales = torch.tensor([[scale]]).to(torch.bfloat16)
    x = format.decode(codes, scales)
    for u in (
        None,
        *(torch.full_like(x, edge, dtype=torch.int32) for edge in DRAWN_EDGES),
        *(noises(x.shape, t) for t in range(64)),
    ):
        again, again_scales = format.encode(x, u)
        assert torch.equal(again, codes)
        assert torch.equal(again_scales, scales)


@each_format
@each_rounding
def test_zero_stays_zero(format: Grouped, rounding: str):
    x = torch.zeros(3, 32)
    x[0, 5] = 1e-3
    x[1] = -0.0
    codes, scales = format.encode(x, noises(x.shape) if rounding == "dither" else None)
    decoded = format.decode(codes, scales)
    assert torch.equal(decoded == 0, x == 0)
    assert not scales[1:].any()


@pytest.mark.parametrize("format", [format for format in FORMATS if not format.signed], ids=name)
@each_rounding
def test_unsigned_value_above_zero_never_vanishes(format: Grouped, rounding: str):
    x = torch.logspace(-37, 0, COUNT).view(-1, 32)
    x[:, -1] = 1.0
    x[0, 0] = 1e-45
    codes, scales = format.encode(x, noises(x.shape) if rounding == "dither" else None)
    assert (codes > 0).all()
    assert (format.decode(codes, scales) > 0).all()


@each_format
@each_rounding
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3.4e38])
def test_nonfinite_values_poison_only_their_own_group(format: Grouped, rounding: str, poison: float):
    if poison < 0 and not format.signed:
        poison = math.inf
    x = groups(4, format.signed)[:64].clone()
    u = noises(x.shape) if rounding == "dither" else None
    clean = format.decode(*format.encode(x, u))
    x[10, 3] = poison
    codes, scales = format.encode(x, u)
    decoded = format.decode(codes, scales)
    assert decoded[10].isnan().all() and scales[10].isnan().all() and not codes[10].any()
    others = torch.arange(64) != 10
    assert differences(decoded[others], clean[others]) == 0


@each_compiled
def test_compiled_poison_equals_eager(format: Grouped):
    x = groups(5, format.signed)
    for row, poison in enumerate((math.nan, math.inf, 3.4e38, 1e38, 1e-40, 0.0)):
        x[row, row] = poison
    args = x, noises(x.shape)
    eager, compiled = EAGER[format](*args), COMPILED_TRIPS[format](*args)
    for rounding in ROUNDINGS:
        results = zip(compiled[rounding], eager[rounding], strict=True)
        assert [differences(a, b) for a, b in results] == [0, 0, 0]
        assert compiled[rounding][2][:3].isnan().all()
        assert compiled[rounding][2][3:].isfinite().all()


@each_format
@each_rounding
def test_huge_and_tiny_values_err_within_the_bound(format: Grouped, rounding: str):
    huge = min(1e38, format.compander.largest_scale(format.levels))
    x = torch.tensor([[huge], [huge / 1e3], [1e-30], [1e-36], [1e-40], [1e-45]]) * torch.linspace(0, 1, 32)
    codes, scales = format.encode(x, noises(x.shape) if rounding == "dither" else None)
    check_bound(format, rounding, x, scales, format.decode(codes, scales))
    check_scales(x, scales)


# Whole tensors

SHAPES = [(), (1,), (31,), (32,), (70,), (4, 64), (5, 75), (3, 7), (2, 3, 5, 7), (2, 3, 40), (3, 4, 8, 8), (2, 1, 3)]
EMPTY = [(0,), (0, 5), (5, 0), (3, 0, 4), (0, 32)]
OPTIONS = [
    {},
    {"rounding": "dither", "step": 3},
    {"signed": False, "sqrt": True},
    {"signed": False, "compander": FOURTH_ROOT, "rounding": "dither"},
    {"softsign": False},
    {"group_size": 2},
    {"group_size": 64, "compander": rational(3)},
    {"group_size": 128, "rounding": "dither"},
]


def tensor_of(shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(6).standard_normal(shape)).float()
    return x if options.get("signed", True) else x.abs()


def without_rounding(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("rounding", "step")}


def format_of(options: dict[str, Any]) -> Grouped:
    compander = SQUARE_ROOT if options.get("sqrt") else SOFTSIGN if options.get("softsign", True) else LINEAR
    compander = options.get("compander", compander)
    return Grouped(compander, options.get("signed", True), options.get("group_size", 32))


def rows_of(shape: tuple[int, ...], size: int) -> int:
    """The number of rows. As documented, a row is the trailing dims, never the first, until they hold a group."""
    start = len(shape) - 1
    while start > 1 and math.prod(shape[start:]) < size:
        start -= 1
    return math.prod(shape[:start]) if start > 0 else 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_group_is_quantized_by_itself(shape: tuple[int, ...], options: dict[str, Any]):
    """Compare with the simplest loop, which takes each group as a vector of its own."""
    x = tensor_of(shape, options)
    format = format_of(options)
    codes, scales = quantize(x, **options)
    decoded = dequantize(codes, scales, **without_rounding(options))
    assert codes.shape == decoded.shape == x.shape and codes.dtype == format.dtype
    rows = rows_of(shape, format.group_size)
    position = torch.arange(x.numel(), dtype=torch.int32).view(rows, -1)
    scale_rows = scales.view(rows, -1)
    for row in range(rows):
        for number, at in enumerate(position[row].split(format.group_size)):
            u = None
            if "rounding" in options:
                u = noise(mix(at, torch.tensor(options.get("step", 0), dtype=torch.int32)), stream=1)
            group_codes, group_scale = format.encode(x.flatten()[at.long()], u)
            assert torch.equal(codes.flatten()[at.long()], group_codes)
            assert torch.equal(scale_rows[row, number : number + 1], group_scale)
    assert torch.equal(scales, scale_rows.view(format.parts(shape)["scales"].shape))
    limit = grouped_bound(format, options.get("rounding", "nearest")).number(scale=scales.max().item())
    assert (decoded - x).abs().max() <= limit


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_tensor_has_empty_codes(shape: tuple[int, ...]):
    every: list[dict[str, Any]] = [{}, {"rounding": "dither"}, {"signed": False}]
    for options in every:
        codes, scales = quantize(torch.empty(shape), **options)
        assert codes.shape == shape and scales.numel() == 0
        assert dequantize(codes, scales, **without_rounding(options)).shape == shape


@pytest.mark.parametrize("shape", [(6, 75), (6, 64), (6, 5, 7), (6, 2, 3)], ids=str)
def test_groups_never_cross_rows(shape: tuple[int, ...]):
    x = tensor_of(shape, {})
    codes, scales = quantize(x)
    for cut in range(1, 6):
        for part in (slice(None, cut), slice(cut, None)):
            part_codes, part_scales = quantize(x[part])
            assert torch.equal(part_codes, codes[part]) and torch.equal(part_scales, scales[part])
            assert torch.equal(dequantize(codes[part], scales[part]), dequantize(codes, scales)[part])


def test_layout_in_memory_does_not_matter():
    x = tensor_of((40, 75), {})
    expected = quantize(x)
    for twin in (x.t().contiguous().t(), torch.stack([x, x], dim=-1)[..., 0], x.clone().requires_grad_()):
        for ours, theirs in zip(quantize(twin), expected, strict=True):
            assert torch.equal(ours, theirs)
    codes, scales = expected
    assert torch.equal(dequantize(codes.t().contiguous().t(), scales.t().contiguous().t()), dequantize(codes, scales))


def test_draws_differ_by_step_and_repeat_for_the_same():
    x = tensor_of((64, 32), {})
    first, again, later = (quantize(x, rounding="dither", step=step)[0] for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != later).float().mean() > 0.2


def test_own_compander_works_like_a_shipped_one():
    own = Compander("own", "5*x / (1 + 4*Abs(x))")
    x = tensor_of((64, 32), {})
    codes, scales = quantize(x, compander=own)
    decoded = dequantize(codes, scales, compander=own)
    check_bound(Grouped(own), "nearest", x, scales, decoded)


@pytest.mark.parametrize("options", [{}, {"signed": False, "sqrt": True, "rounding": "dither", "step": 5}], ids=str)
def test_whole_graph_compiles_and_equals_eager(options: dict[str, Any]):
    x = tensor_of((8, 75), options)

    def there_and_back(x: Tensor) -> tuple[Tensor, ...]:
        codes, scales = quantize(x, **options)
        return codes, scales, dequantize(codes, scales, **without_rounding(options))

    results = zip(torch.compile(there_and_back, fullgraph=True)(x), there_and_back(x), strict=True)
    assert [differences(a, b) for a, b in results] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(shape=st.sampled_from(SHAPES))
@settings(max_examples=5)
def test_16_bit_input_is_quantized_like_its_values_in_fp32(
    dtype: torch.dtype, options: dict[str, Any], shape: tuple[int, ...]
):
    x = tensor_of(shape, options).to(dtype)
    for ours, expected in zip(quantize(x, **options), quantize(x.float(), **options), strict=True):
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_positional_arguments_are_in_the_published_order_and_results_are_written_where_asked(dtype: torch.dtype):
    x = tensor_of((6, 75), {"signed": False})
    expected = quantize(x, signed=False, group_size=16, sqrt=True)
    out = codes, scales = [torch.zeros_like(each).t().contiguous().t() for each in expected]
    assert all(a is b for a, b in zip(quantize(x, codes, scales, False, 16, True, False), out, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    decoded = torch.empty(x.shape, dtype=dtype)
    assert dequantize(codes, scales, decoded, False, 16, True, False) is decoded
    assert torch.equal(decoded, dequantize(expected[0], expected[1], signed=False, group_size=16, sqrt=True).to(dtype))


def test_parts_are_what_is_stored():
    for shape in SHAPES:
        parts = Grouped().parts(shape)
        codes, scales = quantize(tensor_of(shape, {}))
        assert [(p.shape, p.dtype) for p in parts.values()] == [(t.shape, t.dtype) for t in (codes, scales)]


def untyped(value: Any) -> Any:
    """A value of the wrong type, as an untyped caller gives it."""
    return value


X, C, S = torch.ones(2, 32), torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: quantize(X.double()), TypeError, "x_float has dtype torch.float64; allowed is torch.float32 or"),
        (lambda: quantize(X, untyped(True)), TypeError, "out_int8 is True; allowed is None or a tensor to write to."),
        (lambda: quantize(X, C.byte()), TypeError, "out_int8 has dtype torch.uint8; allowed is torch.int8."),
        (lambda: quantize(X, C, S[:1]), ValueError, r"out_scales has shape \(1, 1\); expected is \(2, 1\)."),
        (
            lambda: dequantize(C, S, X.double()),
            TypeError,
            "out_float has dtype torch.float64; allowed is torch.float32",
        ),
        (
            lambda: dequantize(C, S, untyped(True)),
            TypeError,
            "out_float is True; allowed is None or a tensor to write to.",
        ),
        (lambda: quantize(X, group_size=1), ValueError, "group_size is 1; it must be a whole number of at least 2."),
        (lambda: quantize(X, group_size=0), ValueError, "group_size is 0; it must be"),
        (lambda: quantize(X, group_size=-32), ValueError, "group_size is -32; it must be"),
        (lambda: Grouped(group_size=32.0), ValueError, "group_size is 32.0; it must be"),  # pyright: ignore
        (lambda: quantize(X, rounding="up"), ValueError, "rounding is 'up'; allowed are 'nearest' and 'dither'."),
        (
            lambda: quantize(X - 2, signed=False),
            ValueError,
            r"x_float has negative values \(least -1\); unsigned codes need",
        ),
        (lambda: quantize(X, sqrt=True), ValueError, "compander 'square root' = sqrt.* is not odd; signed codes need"),
        (lambda: dequantize(C.byte(), S), TypeError, "in_int8 has dtype torch.uint8; allowed is torch.int8."),
        (lambda: dequantize(C, S, signed=False), TypeError, "in_int8 has dtype torch.int8; allowed is torch.uint8."),
        (lambda: dequantize(C, S.half()), TypeError, "in_scales has dtype torch.float16; allowed is torch.bfloat16."),
        (
            lambda: dequantize(C, S[:1]),
            ValueError,
            r"in_scales has shape \(1, 1\); codes of shape \(2, 32\) need \(2, 1\).",
        ),
        (
            lambda: dequantize(C, S[:, 0]),
            ValueError,
            r"in_scales has shape \(2,\); codes of shape \(2, 32\) need \(2, 1\).",
        ),
        (lambda: dequantize(C, S, group_size=16), ValueError, r"in_scales has shape \(2, 1\); codes .* need \(2, 2\)."),
    ],
)
def test_bad_input_gets_one_clear_sentence(call: Callable[[], object], error: type[Exception], message: str):
    with pytest.raises(error, match=message) as raised:
        call()
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
