"""A GPU's formulas, computed on the CPU: what of their results may differ from a CPU's, and what may not."""

import math

import pytest
import torch
from hypothesis import given
from kernel_cases import RULES, WEIGHTS, every_number, like_gpu, of_a_training, run_eager
from strategies import bits_of, differences, fp32_tensors
from torch import Tensor

from flashopt_compile.engine.step import Place, Step
from flashopt_compile.engine.storage import storage_of
from quant import ROOT8, SIGNED8, Grouped, Split
from quant.bounds import gpu_distance
from quant.compand import SOFTSIGN, root
from quant.dither import STREAMS, mix_phases, noise
from quant.ulp import (
    BF16,
    FP16,
    binade,
    fourth_root,
    inverse_root_of_size,
    largest,
    nearest_fast,
    quotient,
    sign,
    sqrt,
    two_over,
    two_over_binade,
    widened,
)

SHAPE = (512, 128)
STEPS = [(rule, weight) for rule in RULES for weight in WEIGHTS]


def step_of(rule: str, weight: str) -> Step:
    dtype, bits = WEIGHTS[weight]
    return Step(RULES[rule], storage_of(RULES[rule], dtype, SHAPE, bits, True), "dither", False)


def both(step: Step, before: list[Tensor], t: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parts after a step by a CPU's formulas, and by a GPU's."""
    names = ("head", "gradient", *step.storage.parts(SHAPE))
    results = []
    for like_a_gpu in (False, True):
        tensors = [tensor.clone() for tensor in before]
        run_eager(step, tensors, t, like_a_gpu)
        results.append(dict(zip(names, tensors, strict=True)))
    return results[0], results[1]


def weight_of(parts: dict[str, Tensor], step: Step) -> Tensor:
    if "tail" not in parts:
        return parts["head"].double()
    assert isinstance(step.storage.weight, Split)
    value, correction = step.storage.weight._terms(parts["head"], parts["tail"])
    return value.double() + correction.double()


@pytest.mark.parametrize("rule, weight", STEPS)
def test_after_a_training_weights_differ_by_a_code_or_ulps_of_the_update_and_states_by_a_code(rule: str, weight: str):
    step = step_of(rule, weight)
    before = of_a_training(step, SHAPE, WEIGHTS[weight][0])
    ours, theirs = both(step, before, 9)
    old = weight_of(dict(zip(ours, before, strict=True)), step)
    w, other = weight_of(ours, step), weight_of(theirs, step)
    # The largest, as a decoded momentum's error is no smaller where the gradient cancels most of it.
    update = (w - old).abs().max()
    code = step.storage.weight.resolution(*(ours[name] for name in ("head", "tail") if name in ours)).double()
    # The update: the root of v has three inverse roots of 2^-22, the quotient two, beside a dozen roundings of 2^-24.
    # Weights of 32 bits are themselves rounded to fp32, or nearly.
    rounding = 2.0**-23 if weight in ("fp32", "bf16+16") else 0.0
    assert ((other - w).abs() <= code + (5 * 4 + 12) * 2.0**-24 * update + rounding * w.abs()).all()
    if "tail" in ours:
        moved = ours["head"] != theirs["head"]
        assert moved.double().mean() <= 1e-3
        largest_tail = torch.iinfo(ours["tail"].dtype).max
        apart = (other - w).abs() / code
        assert (largest_tail - ours["tail"].double().abs() <= 1 + apart)[moved].all()  # midway between two heads
    for name in ours:
        if name.endswith("codes"):
            same_scale = (ours[name.replace("codes", "scales")] == theirs[name.replace("codes", "scales")]).float()
            assert same_scale.mean() >= 0.999
            alike = same_scale.repeat_interleave(32, -1) > 0
            off = (ours[name].int() - theirs[name].int()).abs()[alike]
            assert off.max() <= 1
            assert off.double().mean() <= 1e-3


@pytest.mark.parametrize("rule, weight", STEPS)
def test_nan_and_inf_end_where_they_do_on_a_cpu(rule: str, weight: str):
    step = step_of(rule, weight)
    ours, theirs = both(step, every_number(step, SHAPE, WEIGHTS[weight][0]), 7)
    assert torch.equal(ours["head"].isfinite(), theirs["head"].isfinite())
    assert weight == "fp32" or not ours["head"].isfinite().all()
    for name in ours:
        if name.endswith("scales"):
            assert torch.equal(ours[name].isnan(), theirs[name].isnan())


@pytest.mark.parametrize("tensor", ["head", "gradient", "m.scales", "v.scales"])
def test_a_single_nan_stays_in_its_element_or_group(tensor: str):
    step = step_of("adamw", "bf16+8")
    before = of_a_training(step, SHAPE, torch.bfloat16)
    names = ("head", "gradient", *step.storage.parts(SHAPE))
    before[names.index(tensor)].view(-1)[5] = math.nan
    ours, theirs = both(step, before, 9)
    assert 1 <= (~theirs["head"].isfinite()).sum() <= 32
    assert torch.equal(ours["head"].isfinite(), theirs["head"].isfinite())
    for name in ("m.scales", "v.scales"):
        assert torch.equal(ours[name].isnan(), theirs[name].isnan())


@pytest.mark.parametrize("head", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tail", [torch.int8, torch.int16], ids=str)
def test_a_weight_moved_by_zero_keeps_its_parts(head: torch.dtype, tail: torch.dtype):
    """All heads, with tails up to halfway to the next, by dithered and nearest rounding."""
    format = Split(head, tail)
    heads = torch.arange(-(2**15), 2**15).to(torch.int16).view(head)
    # −0.0 may become 0.0, and tails of weights below 2^-119 end among fp32's subnormal numbers.
    heads = heads[heads.isfinite() & ((heads == 0) | (heads.abs() >= 2.0**-119))]
    some = (-1, -0.9, -0.5, -0.3, -0.01, 0, 0.01, 0.25, 0.49, 0.7, 0.99, 1)
    for share in some:
        tails = torch.full_like(heads, round(share * format.levels), dtype=tail)
        # Below a power of two heads lie twice as close. Rounding leaves no such weight more than half of these tails.
        significand = 2 ** (format.narrow.significand_bits - 1) - 1
        is_power = (heads.view(torch.int16) & significand) == 0
        own = ~(is_power & (tails.sign() != heads.sign()) & (tails.int().abs() > format.levels // 2))
        own &= (heads != 0) | (tails == 0)
        own_heads, own_tails = heads[own], tails[own]
        drawn = torch.randint(2**14, own_heads.shape, dtype=torch.int32)
        for noise_bits in (None, drawn, torch.full_like(drawn, 2**14 - 1)):
            with like_gpu():
                new_head, new_tail = format.advance(own_heads, own_tails, torch.zeros(len(own_heads)), noise_bits)
            assert torch.equal(new_head, own_heads)
            assert torch.equal(new_tail, own_tails)


@pytest.mark.parametrize("format", [SIGNED8, ROOT8], ids=["momentum", "variance"])
def test_codes_of_the_same_values_differ_by_one_and_as_seldom_as_derived(format: Grouped):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 15, 32, generator=random) ** 3 * 2.0 ** torch.randint(-100, 30, (1 << 15, 1), generator=random)
    x = x if format.signed else x.square().sqrt()
    drawn = torch.randint(2**12, x.shape, generator=random, dtype=torch.int32)
    codes, scales = format.encode(x, drawn)
    with like_gpu():
        other_codes, other_scales = format.encode(x, drawn)
    assert torch.equal(scales, other_scales)
    off = (codes.int() - other_codes.int()).abs()
    assert off.max() == 1
    assert 0 < off.double().mean() <= float(gpu_distance(format))
    if not format.signed:
        assert torch.equal(codes == 0, other_codes == 0)


def test_only_root_companders_have_formulas_of_their_own():
    assert gpu_distance(Grouped(root(2), signed=False)) > 0
    with pytest.raises(ValueError, match="compander 'softsign' has the same formulas on a GPU"):
        gpu_distance(Grouped(SOFTSIGN))


@pytest.mark.parametrize("format", [SIGNED8, ROOT8, Grouped(root(8), signed=False)], ids=lambda f: f.compander.name)
def test_a_gpu_reads_the_codes_as_a_cpu_does(format: Grouped):
    codes = torch.arange(format.levels + 1).to(format.dtype).expand(200, -1)
    codes = -codes if format.signed else codes
    scales = (2.0 ** torch.arange(-118.0, 82.0)).to(torch.bfloat16).unsqueeze(-1)
    scales[0] = 0
    expected = format.decode(codes, scales)
    with like_gpu():
        found = format.decode(codes, scales)
    # A momentum's unit becomes subnormal below a scale of 2^-112: a few of its bits are lost.
    error = torch.where(scales.float() < 2.0**-100, 1e-4, 2e-6)
    assert ((found - expected).abs() <= error * expected.abs() + 2.0**-149).all()
    assert (found[0] == 0).all()


def test_noise_and_phases_are_the_same_bits():
    random = torch.Generator().manual_seed(0)
    block = torch.zeros(37, 32)
    step = torch.tensor(7, dtype=torch.int32)
    place = Place.at(123_456_789)
    expected = mix_phases(place.phases(block, step))
    with like_gpu():
        found = mix_phases(place.phases(block, step))
    assert torch.equal(found, expected)
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=random).to(torch.int32)
    for stream in range(len(STREAMS)):
        with like_gpu():
            found = noise(bits, stream)
        assert torch.equal(found, noise(bits, stream))


@given(fp32_tensors())
def test_bits_that_need_no_root_are_a_cpus(x: Tensor):
    rows = x[: len(x) // 32 * 32].view(-1, 32)
    narrow = x.to(torch.bfloat16)
    finite = x[x.isfinite()]
    with like_gpu():
        found = largest(rows), widened(narrow), sign(x)
        rounded = nearest_fast(x, BF16), nearest_fast(x, FP16).to(torch.float16).float()
        over = [two_over_binade(finite, each) for each in (BF16, FP16)]
    assert differences(found[0], largest(rows)) == 0
    assert differences(found[1], widened(narrow)) == 0
    assert differences(found[2], torch.where(x.isnan(), 0.0, sign(x))) == 0
    for mine, narrow_float in zip(rounded, (BF16, FP16), strict=True):
        expected = nearest_fast(x, narrow_float)
        assert differences(mine[x.isfinite()], expected[x.isfinite()]) == 0
        assert not mine[~x.isfinite()].isfinite().any()
    for mine, narrow_float in zip(over, (BF16, FP16), strict=True):
        assert torch.equal(mine, two_over(binade(finite, narrow_float)))


@given(fp32_tensors())
def test_roots_and_quotients_are_right_to_a_few_ulps_and_for_zero_and_infinity(x: Tensor):
    x = x.abs()
    normal = x[(x >= 2.0**-126) & x.isfinite()]
    with like_gpu():
        roots, fourths, halves = sqrt(normal), fourth_root(normal), inverse_root_of_size(-normal)
        ratios = quotient(normal.sqrt(), normal)
        ends = sqrt(torch.tensor([0.0, math.inf, math.nan]))
        product = torch.zeros(2) * inverse_root_of_size(torch.tensor([0.0, -0.0]))
    exact = normal.double()
    for found, expected in ((roots, exact.sqrt()), (fourths, exact**0.25), (halves, exact**-0.5)):
        assert ((found - expected).abs() <= 4 * 2.0**-24 * expected).all()
    expected = normal.sqrt().double() / exact
    assert ((ratios - expected).abs() <= 6 * 2.0**-24 * expected).all()
    assert ends[0] == 0 and ends[1] == math.inf and ends[2].isnan()
    assert (product == 0).all()
    assert bits_of(roots).dtype == torch.int32
