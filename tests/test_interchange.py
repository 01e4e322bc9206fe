"""torch.optim's states load here, ours load in torch.optim, and toggling the format keeps them within the bound."""

import copy
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from torch.nn import Parameter
from training import (
    ALIGNED,
    RAGGED,
    SHAPES,
    STATE_LETTERS,
    assert_identical,
    assert_state_within_bound,
    give_gradients,
    held,
    parameters,
    params_of,
    stored,
    train,
)

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashSGD

NAMESAKES = [row for row in TABLE if row.namesake is not None]


def trained_namesake(row: Row, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.optim.Optimizer:
    assert row.namesake is not None
    options = {key: value for key, value in row.options.items() if key != "decouple_lr"}
    optimizer: Any = row.namesake(parameters(SHAPES, dtype, seed), **options)
    for step in range(3):
        give_gradients(params_of(optimizer), step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", NAMESAKES, ids=lambda row: row.name)
def test_ours_loads_what_torch_optim_saved(row: Row, dtype: torch.dtype):
    theirs = trained_namesake(row, dtype)
    ours = row.optimizer(parameters(SHAPES, dtype), eager=True)
    saved = theirs.state_dict()
    kept = copy.deepcopy(saved)
    ours.load_state_dict(saved)
    assert repr(saved) == repr(kept)
    for name, value in row.options.items():
        assert ours.param_groups[0][name] == value
    for parameter, other in zip(params_of(ours), params_of(theirs), strict=True):
        expected = theirs.state[other]
        for name, value in expected.items():
            if name == "step":
                assert ours.state[parameter]["step"] == value
            else:
                assert_state_within_bound(ours, parameter, name, value)
        assert (ours.state.get(parameter, {}) != {}) == (expected != {})
    train(ours, range(3, 4))


@pytest.mark.parametrize("row", NAMESAKES, ids=lambda row: row.name)
def test_torch_optim_loads_what_ours_saved_and_steps_alike(row: Row):
    """With an fp32 model and fp32 states, both follow the same path up to rounding."""
    ours = row.optimizer(
        parameters(SHAPES, torch.float32), **row.options, quantize=False, compress_state_dict=False, eager=True
    )
    train(ours, range(3))
    assert row.namesake is not None
    namesake: Any = row.namesake
    theirs = namesake([Parameter(p.detach().clone()) for p in params_of(ours)])
    theirs.load_state_dict(ours.state_dict())
    for name, value in row.options.items():
        assert theirs.param_groups[0][name] == value
    for step in range(3, 6):
        give_gradients(params_of(theirs), step)
        theirs.step()
    train(ours, range(3, 6))
    for one, other in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_toggling_keeps_states_to_the_bound_and_the_rest_to_the_bit(row: Row):
    optimizer = train(row.optimizer(parameters(), **row.options, eager=True), range(3))
    optimizer.param_groups[0]["compress_state_dict"] = False
    expanded = optimizer.state_dict()
    for state in expanded["state"].values():
        assert {key: value.dtype for key, value in state.items() if key in STATE_LETTERS} == {
            key: torch.float32 for key in state if key in STATE_LETTERS
        }
        assert not any(key.endswith((".codes", ".scales")) for key in state)
    resumed = row.optimizer(parameters(), **row.options, eager=True)
    resumed.load_state_dict(expanded)
    assert resumed.param_groups[0]["compress_state_dict"]  # the loading optimizer's own choice
    for one, other in zip(params_of(optimizer), params_of(resumed), strict=True):
        assert_identical(
            [resumed.state[other][key] for key in ("step", "tail")],
            [optimizer.state[one][key] for key in ("step", "tail")],
        )
        for name, letter in STATE_LETTERS.items():
            if name in expanded["state"][0]:
                assert_state_within_bound(resumed, other, name, held(optimizer, one)[letter])
    back = resumed.state_dict()
    assert {frozenset(state) for state in back["state"].values()} == {
        frozenset(state)
        for state in train(row.optimizer(parameters(), **row.options, eager=True), range(1))
        .state_dict()["state"]
        .values()
    }


def test_states_rounded_to_nearest_survive_toggling_bit_for_bit():
    optimizer = train(FlashLion(parameters(), rounding="nearest", compress_state_dict=False, eager=True), range(3))
    resumed = FlashLion([Parameter(p.detach().clone()) for p in params_of(optimizer)], eager=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert_identical(stored(resumed), stored(optimizer))


def test_a_single_parameter_group_may_be_saved_uncompressed():
    groups = [
        {"params": parameters([ALIGNED])},
        {"params": parameters([RAGGED], seed=1), "compress_state_dict": False},
    ]
    optimizer = train(FlashLion(groups, eager=True), range(2))
    states = optimizer.state_dict()["state"]
    assert set(states[0]) == {"step", "tail", "m.codes", "m.scales"}
    assert set(states[1]) == {"step", "tail", "exp_avg"}
    resumed = FlashLion([{"params": parameters([ALIGNED])}, {"params": parameters([RAGGED])}], eager=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[resumed.param_groups[1]["params"][0]]["m.codes"].dtype == torch.int8


def test_a_stale_tail_from_torch_optim_is_ignored():
    """torch.optim casts and keeps the unknown tail while the weights change, so the tail is stale."""
    ours = train(FlashAdamW(parameters(), compress_state_dict=False, eager=True), range(2))
    theirs = torch.optim.AdamW([Parameter(p.detach().clone()) for p in params_of(ours)])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict()["state"][0]["tail"].dtype == torch.bfloat16
    resumed = FlashAdamW(parameters(), eager=True)
    resumed.load_state_dict(theirs.state_dict())
    assert not resumed.state[params_of(resumed)[0]]["tail"].any()


def test_tails_stay_if_a_state_dict_has_none():
    """Exact weights are set first, then the states of torch.optim are loaded."""
    model = torch.nn.Linear(64, 40)
    theirs = torch.optim.AdamW(model.parameters())
    give_gradients(params_of(theirs), 0)
    theirs.step()
    exact = copy.deepcopy(model.state_dict())
    model.to(torch.bfloat16)
    ours = FlashAdamW(model.parameters(), eager=True)
    ours.set_fp32_model_state_dict(model, exact)
    before = ours.get_fp32_model_state_dict(model)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[model.weight]["tail"].any()
    assert_identical(list(ours.get_fp32_model_state_dict(model).values()), list(before.values()))


def test_torch_optim_options_that_we_lack_are_refused():
    amsgrad = torch.optim.AdamW(parameters(), amsgrad=True)
    give_gradients(params_of(amsgrad), 0)
    amsgrad.step()
    unsaid = amsgrad.state_dict()
    unsaid["param_groups"][0].pop("amsgrad")
    coupled = trained_namesake(NAMESAKES[1]).state_dict()
    decoupled = trained_namesake(NAMESAKES[0]).state_dict()
    cases = [
        (FlashAdamW, amsgrad.state_dict(), "amsgrad of the state dict is True; supported is False"),
        (FlashAdamW, unsaid, "parameter 0 has max_exp_avg_sq, of amsgrad"),
        (FlashAdamW, coupled, "decoupled_weight_decay of the state dict is False; expected is True"),
        (FlashAdam, decoupled, "decoupled_weight_decay of the state dict is True; expected is False"),
        (FlashSGD, decoupled, "has the keys .*exp_avg"),
    ]
    for optimizer, wrong, sentence in cases:
        ours = train(optimizer(parameters(), eager=True), range(1))
        before = stored(ours)
        with pytest.raises(ValueError, match=sentence) as caught:
            ours.load_state_dict(wrong)
        assert "\n" not in str(caught.value)
        assert_identical(stored(ours), before)
