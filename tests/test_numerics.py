"""Numerical problems are refused, skipped or counted, as the options ask."""

from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from torch.nn import Parameter
from training import ALIGNED, RAGGED, assert_identical, give_gradients, held, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, Health, NumericsError
from flashopt_compile.engine.storage import storage_of
from flashopt_compile.rules.sgd import sgd

BF16 = torch.bfloat16
NOTHING = {"saturated": 0.0, "zeroed": 0.0, "stalled": 0.0, "nonfinite": 0.0}


def filled(value: float, shape: tuple[int, ...] = (64, 64), dtype: torch.dtype = BF16) -> Parameter:
    return Parameter(torch.full(shape, value, dtype=dtype))


def health_of(optimizer: FlashOptimizer) -> Health:
    (found,) = optimizer.health()
    return found


# check_numerics


@pytest.mark.parametrize("shape", [(64, 64), (64, 50), (7,), ()], ids=str)
def test_lost_updates_are_refused_by_name_lr_and_resolution(shape: tuple[int, ...]):
    p = filled(1.5, shape)
    p.grad = torch.ones_like(p)
    optimizer = FlashSGD([("wide.weight", p)], lr=1e-6, rounding="nearest", check_numerics=True, eager=True)
    with pytest.raises(NumericsError) as caught:
        optimizer.step()
    sentence = str(caught.value)
    resolution = 2.0**-7 / 2 / 127
    for part in ("wide.weight", "lr 1e-06", "weight, 1.5,", f"{resolution:.3g}", "master_weight_bits=32", "'dither'"):
        assert part in sentence
    assert "\n" not in sentence


def test_the_largest_weight_decides():
    p = filled(0.001)
    p.grad = torch.ones_like(p)
    FlashSGD([p], lr=1e-6, rounding="nearest", check_numerics=True, eager=True).step()
    with torch.no_grad():
        p[50, 50] = -3.0
    with pytest.raises(NumericsError, match="largest weight, 3,"):
        FlashSGD([p], lr=1e-6, rounding="nearest", check_numerics=True, eager=True).step()


def test_a_refused_step_changes_no_parameter_of_any_group():
    fine, lost = parameters([ALIGNED])[0], filled(1.5)
    groups = [{"params": [fine]}, {"params": [lost], "lr": 1e-9, "rounding": "nearest", "check_numerics": True}]
    optimizer = FlashAdamW(groups, lr=0.1, eager=True)
    optimizer.param_groups[1]["lr"] = 0.1
    train(optimizer, range(2))
    optimizer.param_groups[1]["lr"] = 1e-9
    before = stored(optimizer)
    with pytest.raises(NumericsError, match=r"parameter 1\.0"):
        train(optimizer, range(2, 3))
    assert_identical(stored(optimizer), before)


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "dither"},
        {"rounding": "nearest", "check_numerics": False},
        {"rounding": "nearest", "master_weight_bits": 32},
        {"rounding": "nearest", "lr": 1e-4},
        {"rounding": "nearest", "lr": 0.0},
    ],
    ids=str,
)
def test_updates_that_are_kept_or_intentionally_zero_pass(options: dict[str, Any]):
    p = filled(1.5)
    p.grad = torch.ones_like(p)
    options = {"lr": 1e-6, "check_numerics": True, **options}
    optimizer = FlashSGD([p], **options, eager=True)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1
    # Dither keeps the update on average, and enough bits keep it. It is lost without the check, and zero without lr.
    moved = (held(optimizer, p)["w"] - 1.5).mean().item()
    is_lost = not options["check_numerics"] or options["lr"] == 0
    assert moved == 0 if is_lost else moved == pytest.approx(-options["lr"], rel=0.35)


def test_numerics_of_weights_without_a_tail():
    p = filled(1.5)
    p.grad = torch.ones_like(p)
    optimizer = FlashSGD([p], lr=1e-3, master_weight_bits=None, rounding="nearest", check_numerics=True, eager=True)
    with pytest.raises(NumericsError, match=r"resolution of 0\.00781"):
        optimizer.step()


NARROW = [(dtype, bits) for dtype in (BF16, torch.float16) for bits in (24, 32, None)]


@pytest.mark.parametrize("dtype, bits", NARROW, ids=str)
def test_under_dither_an_update_is_refused_if_no_draw_keeps_it(dtype: torch.dtype, bits: int | None):
    weight = storage_of(sgd, dtype, (64, 64), bits, True).weight
    parts = weight.encode(torch.full((), 1.5))
    resolved = weight.resolution(*parts).item() * weight.dithered_share
    for lr, is_lost in ((0.4 * resolved, True), (4 * resolved, False)):
        p = filled(1.5, dtype=dtype)
        p.grad = torch.ones_like(p)
        unchecked = FlashSGD([p], lr=lr, master_weight_bits=bits, eager=True)
        unchecked.step()
        if is_lost:
            assert bool((held(unchecked, p)["w"] == 1.5).all())
        p = filled(1.5, dtype=dtype)
        p.grad = torch.ones_like(p)
        checked = FlashSGD([p], lr=lr, master_weight_bits=bits, check_numerics=True, eager=True)
        if not is_lost:
            checked.step()
            continue
        with pytest.raises(NumericsError, match="under dither; raise lr") as caught:
            checked.step()
        assert "rounding='dither'" not in str(caught.value)
        assert ("master_weight_bits=32" in str(caught.value)) == (bits != 32)


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_fp32_weights_have_no_dither_to_keep_updates(rounding: str):
    p = filled(1.5, dtype=torch.float32)
    p.grad = torch.ones_like(p)
    optimizer = FlashSGD([p], lr=1e-8, rounding=rounding, check_numerics=True, eager=True)
    with pytest.raises(NumericsError, match=r"less than half its resolution of 1.19e-07; raise lr\.$"):
        optimizer.step()


# Non-finite gradients


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [TABLE[0], TABLE[4]], ids=lambda row: row.name)
def test_a_nonfinite_gradient_reaches_its_group_of_32_and_no_other(row: Row, value: float):
    clean, dirty = (row.optimizer(parameters([ALIGNED, RAGGED]), **row.options, eager=True) for _ in range(2))
    for step in range(3):
        for optimizer in (clean, dirty):
            params = optimizer.param_groups[0]["params"]
            give_gradients(params, step)
            if optimizer is dirty and step == 0:
                params[0].grad[3, 40] = value
                params[1].grad[5, 49] = value  # in the short group at the row's end
            optimizer.step()
    spoiled = [torch.zeros(ALIGNED, dtype=torch.bool), torch.zeros(RAGGED, dtype=torch.bool)]
    spoiled[0][3, 32:64] = True
    spoiled[1][5, 32:50] = True
    for one, other, group in zip(*(each.param_groups[0]["params"] for each in (clean, dirty)), spoiled, strict=True):
        assert torch.equal(~other.isfinite(), group)
        assert torch.equal(other[~group], one[~group])


def test_a_nonfinite_gradient_is_counted():
    p = filled(1.0)
    optimizer = FlashAdamW([p], eager=True)
    give_gradients([p], 0)
    assert p.grad is not None
    p.grad[3, 40] = torch.nan
    optimizer.step()
    assert health_of(optimizer).nonfinite == (1 + 32 + 32) / (3 * 64 * 64)  # the weight and its group's m and v
    give_gradients([p], 1)
    optimizer.step()
    assert health_of(optimizer).nonfinite == (32 + 32 + 32) / (3 * 64 * 64)


@pytest.mark.parametrize(("shape", "at"), [((7,), (6,)), ((64, 50), (63, 49)), ((1500, 1024), (1499, 1023))], ids=str)
def test_a_single_nonfinite_number_is_counted_wherever_it_is(shape: tuple[int, ...], at: tuple[int, ...]):
    p = filled(1.0, shape)
    optimizer = FlashLion([p], eager=True)
    optimizer.step()
    assert health_of(optimizer).nonfinite == 0
    with torch.no_grad():
        p[at] = torch.inf
    assert health_of(optimizer).nonfinite == 1 / (2 * p.numel())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_skip_nonfinite_skips_the_whole_step(value: float):
    careful, clean = (FlashAdamW(parameters(), skip_nonfinite=True, eager=True) for _ in range(2))
    for optimizer in (careful, clean):
        train(optimizer, range(2))
    params = careful.param_groups[0]["params"]
    give_gradients(params, 77)
    params[1].grad[0, 0] = value
    before = stored(careful)
    assert careful.step(lambda: 1.25) == 1.25
    assert_identical(stored(careful), before)  # including the step counts
    for optimizer in (careful, clean):
        train(optimizer, range(2, 4))
    assert_identical(stored(careful), stored(clean))


def test_skip_nonfinite_before_the_first_step():
    (p,) = parameters([(0, 3)])
    q = filled(1.0)
    optimizer = FlashAdamW([p, q], skip_nonfinite=True, eager=True)
    give_gradients([p, q], 0)
    assert q.grad is not None
    q.grad[0, 0] = -torch.inf
    optimizer.step()
    assert optimizer.state[q]["step"] == 0
    assert torch.equal(q, filled(1.0))
    give_gradients([p, q], 0)
    optimizer.step()
    assert optimizer.state[q]["step"] == 1


def test_skip_nonfinite_checks_only_the_parameter_groups_that_ask():
    first, second = parameters([ALIGNED] * 2)
    optimizer = FlashAdamW([{"params": [first], "skip_nonfinite": True}, {"params": [second]}], eager=True)
    give_gradients([first, second], 0)
    assert second.grad is not None
    second.grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.state[first]["step"] == 1
    assert not second[0, 0].isfinite()


# health


def test_health_before_any_step_and_of_exact_states_is_zero():
    optimizer = FlashAdamW([filled(1.0), filled(1.0, (7,))], weight_decay=0.0, eager=True)
    assert vars(health_of(optimizer)) == NOTHING
    assert not optimizer.state
    optimizer.step()
    assert vars(health_of(optimizer)) == NOTHING


def test_saturated_counts_codes_at_the_end_of_their_range():
    alike, spiky = torch.full((64, 64), 0.5, dtype=BF16), torch.full((64, 64), 0.01, dtype=BF16)
    spiky[:, ::32] = -1.0
    for grad, share in ((alike, 1), (spiky, 1 / 32)):
        p = filled(1.0)
        p.grad = grad
        optimizer = FlashSGD([p], lr=0.1, momentum=0.9, rounding="nearest", eager=True)
        optimizer.step()
        assert health_of(optimizer).saturated == share


def test_zeroed_counts_zeros_among_others():
    p = filled(1.0)
    p.grad = torch.zeros_like(p)
    p.grad[:, ::4] = 1.0
    p.grad[:32] = 0.0  # groups of only zeros do not count
    optimizer = FlashAdamW([p], lr=0.1, eager=True)
    optimizer.step()
    assert health_of(optimizer).zeroed == 0.5 * 0.75


def test_small_variances_are_never_zeroed():
    p = filled(1.0)
    p.grad = torch.full_like(p, 1e-4)
    p.grad[:, ::32] = 1e4
    optimizer = FlashAdamW([p], lr=0.1, rounding="nearest", eager=True)
    optimizer.step()
    assert (optimizer.state[p]["v.codes"] >= 1).all()
    assert health_of(optimizer).zeroed == 31 / 32 / 2  # only the momentum's codes


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_stalled_counts_updates_under_half_a_code(rounding: str):
    p = filled(1.0)
    with torch.no_grad():
        p[:16] = 2.0**-10  # a quarter has codes fine enough
    optimizer = FlashSGD([p], lr=1e-6, rounding=rounding, eager=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert health_of(optimizer).stalled == 0.75
    p.grad.zero_()
    assert health_of(optimizer).stalled == 0  # a zero update does not count as stalled
    p.grad.fill_(1000.0)
    assert health_of(optimizer).stalled == 0
    p.grad = None
    assert health_of(optimizer).stalled == 0


def test_health_is_reported_per_parameter_group_and_changes_nothing():
    good, bad = filled(1.0), filled(1.0)
    optimizer = FlashSGD([{"params": [good], "lr": 0.1}, {"params": [bad], "lr": 1e-7}], momentum=0.9, eager=True)
    good.grad = torch.ones_like(good)
    bad.grad = torch.ones_like(bad)
    optimizer.step()
    before = stored(optimizer)
    first, second = optimizer.health()
    assert (first.stalled, second.stalled) == (0, 1)
    assert_identical(stored(optimizer), before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("columns", [1024, 1000])
def test_health_of_a_large_parameter_samples_all_of_it(columns: int, momentum: float):
    p = filled(1.0, (2000, columns))
    optimizer = FlashSGD([p], lr=1e-6, momentum=momentum, eager=True)
    optimizer.step()
    p.grad = torch.ones_like(p)
    p.grad[:, ::2] = 0
    p.grad[1000:] = 0
    assert health_of(optimizer).stalled == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_health_of_every_rule_dtype_and_shape(row: Row):
    shapes = [ALIGNED, RAGGED, (7,), (), (0,), (1, 2049)]
    params = [p for dtype in (BF16, torch.float16, torch.float32) for p in parameters(shapes, dtype)]
    optimizer = train(row.optimizer(params, **row.options, eager=True), range(2))
    found = health_of(optimizer)
    assert found.nonfinite == 0
    assert all(0 <= share <= 1 for share in vars(found).values())
    assert found.saturated > 1 / 64 or "momentum" in row.optimizer.hyper
