"""State dicts: a saved and loaded run continues bit for bit, and loading a wrong state dict changes nothing."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from training import ALIGNED, SHAPES, assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EVERY = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
StateDict = dict[str, Any]


def mixed(row: Row, seed: int = 0, **options: Any) -> FlashOptimizer:
    """Three parameter groups of three dtypes, each stored in its own way."""
    groups = [
        {"params": parameters(SHAPES, torch.bfloat16, seed)},
        {"params": parameters(SHAPES, torch.float16, seed + 1), "master_weight_bits": 32, "rounding": "nearest"},
        {"params": parameters(SHAPES, torch.float32, seed + 2), "quantize": False},
        {"params": parameters([ALIGNED, (), (0,)], torch.bfloat16, seed + 3), "master_weight_bits": None},
    ]
    return row.optimizer(groups, **row.options, **options, eager=True)


def copy_weights(source: FlashOptimizer, target: FlashOptimizer) -> None:
    with torch.no_grad():
        for one, other in zip(source.param_groups, target.param_groups, strict=True):
            for p, q in zip(one["params"], other["params"], strict=True):
                q.copy_(p)


def through_a_file(state_dict: StateDict) -> StateDict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def other_order(state_dict: StateDict) -> StateDict:
    """The state dict with its keys in another order, as after a tool that sorts them."""
    states = {key: dict(sorted(state.items(), reverse=True)) for key, state in state_dict["state"].items()}
    return {"param_groups": state_dict["param_groups"], "state": states}


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file, other_order])
@EVERY
def test_a_loaded_run_continues_bit_for_bit(row: Row, way: Callable[[StateDict], StateDict]):
    optimizer = train(mixed(row), range(3))
    resumed = mixed(row, seed=50)
    resumed.load_state_dict(way(optimizer.state_dict()))
    copy_weights(optimizer, resumed)
    assert_identical(stored(resumed), stored(optimizer))
    assert_identical(stored(train(resumed, range(3, 6))), stored(train(optimizer, range(3, 6))))


@EVERY
def test_states_come_back_in_their_own_dtypes(row: Row):
    """torch.optim.Optimizer.load_state_dict casts every tensor, codes too, to the parameter's dtype."""
    optimizer = train(mixed(row), range(2))
    saved = optimizer.state_dict()
    resumed = mixed(row)
    resumed.load_state_dict(saved)
    for number, parameter in enumerate(p for group in resumed.param_groups for p in group["params"]):
        for key, value in saved["state"][number].items():
            assert_identical([resumed.state[parameter][key]], [value])


def test_loading_neither_aliases_nor_changes_the_callers_dict():
    optimizer = train(mixed(TABLE[0]), range(2))
    saved = through_a_file(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    resumed = mixed(TABLE[0])
    resumed.load_state_dict(saved)
    copy_weights(optimizer, resumed)
    train(resumed, range(2, 4))
    resumed.param_groups[0]["lr"] = 123.0
    assert saved["param_groups"] == kept["param_groups"]
    assert saved["state"].keys() == kept["state"].keys()
    for key, state in kept["state"].items():
        assert list(saved["state"][key]) == list(state)
        assert_identical(list(saved["state"][key].values()), list(state.values()))
    addresses = {value.data_ptr() for state in saved["state"].values() for value in state.values() if value.numel()}
    own = {value.data_ptr() for state in resumed.state.values() for value in state.values() if value.numel()}
    assert not addresses & own


def test_options_of_the_saved_groups_are_loaded():
    first = FlashAdamW(parameters(), lr=0.1, master_weight_bits=32, rounding="nearest", eager=True)
    train(first, range(2))
    second = FlashAdamW(parameters(), eager=True)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    assert second.param_groups[0]["master_weight_bits"] == 32
    assert second.state[second.param_groups[0]["params"][0]]["tail"].dtype == torch.int16
    copy_weights(first, second)
    assert_identical(stored(train(second, range(2, 4))), stored(train(first, range(2, 4))))


def test_a_state_dict_saved_before_the_first_step_loads():
    fresh = FlashAdamW(parameters(), lr=0.5, eager=True).state_dict()
    assert fresh["state"] == {}
    optimizer = FlashAdamW(parameters(), eager=True)
    optimizer.load_state_dict(fresh)
    assert_identical(
        stored(train(optimizer, range(1))), stored(train(FlashAdamW(parameters(), lr=0.5, eager=True), range(1)))
    )


def test_a_scheduler_and_its_optimizer_resume_together():
    def pair() -> tuple[FlashOptimizer, torch.optim.lr_scheduler.OneCycleLR]:
        optimizer = FlashSGD(parameters(), lr=0.1, momentum=0.9, eager=True)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)

    def run(optimizer: FlashOptimizer, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(optimizer, range(step, step + 1))
            scheduler.step()

    (one, schedule), (other, schedule2) = pair(), pair()
    run(one, schedule, range(8))
    other.load_state_dict(one.state_dict())
    schedule2.load_state_dict(schedule.state_dict())
    copy_weights(one, other)
    run(one, schedule, range(8, 15))
    run(other, schedule2, range(8, 15))
    assert_identical(stored(other), stored(one))


def test_hooks_see_plain_tensors():
    optimizer = train(FlashAdamW(parameters(), eager=True), range(1))
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state_dict: seen.append(state_dict["state"][0]["m.codes"].dtype))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: seen.append(state_dict["state"][0]["m.codes"].dtype)
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.int8, torch.int8]


def spoiled(change: Callable[[StateDict], Any], source: FlashOptimizer) -> StateDict:
    state_dict = copy.deepcopy(source.state_dict())
    change(state_dict)
    return state_dict


MISMATCHES: dict[str, tuple[Callable[[StateDict], Any], str]] = {
    "fewer parameters": (lambda d: d["param_groups"][0]["params"].pop(), r"groups of \[2\] parameters.*has \[3\]"),
    "more groups": (lambda d: d["param_groups"].append({"params": []}), r"groups of \[3, 0\] parameters.*has \[3\]"),
    "lacking key": (lambda d: d["state"][0].pop("tail"), "state of parameter 0 has the keys .* expected are .*'tail'"),
    "unknown key": (lambda d: d["state"][2].update(exp_avg=torch.zeros(1)), "parameter 2 .*exp_avg"),
    "wrong shape": (
        lambda d: d["state"][1].update({"m.codes": torch.zeros(3, 3, dtype=torch.int8)}),
        r"m.codes of parameter 1 is torch.int8 of shape \(3, 3\); expected is torch.int8 of shape \(33, 50\)",
    ),
    "wrong dtype": (
        lambda d: d["state"][0].update({"v.codes": d["state"][0]["v.codes"].to(torch.bfloat16)}),
        r"v.codes of parameter 0 is torch.bfloat16 .* expected is torch.uint8",
    ),
    "no tensor": (lambda d: d["state"][0].update(tail=None), "tail of parameter 0 is None"),
    "bad option": (lambda d: d["param_groups"][0].update(betas=(0.9, 2.0)), r"betas is \(0.9, 2.0\)"),
    "newer format": (
        lambda d: d["flashopt"].update(format=2, library="9.9"),
        "has format 2, written by version 9.9; this version reads formats up to 1",
    ),
    "no stamp to speak of": (lambda d: d.update(flashopt=[1]), r"'flashopt' of the state dict is \[1\]"),
    "lost state": (lambda d: d["state"].pop(1), "has 2 states of 3 parameters; when it was written it had 3 of 3"),
    "state of nothing": (lambda d: d["state"].update({7: {}}), r"has the states \[7\] of no parameter"),
    "other dtype": (
        lambda d: d["flashopt"].update(dtypes=["float16"] * 3),
        "parameter 0 has a tail of float16 weights; the parameter is torch.bfloat16",
    ),
    "no groups": (lambda d: d.pop("param_groups"), "expected is a dict with 'state' and 'param_groups'"),
    "negative step": (lambda d: d["state"][0].update(step=-1), "step of parameter 0 is -1; expected is a number"),
    "other storage": (
        lambda d: d["param_groups"][0].update(quantize=False),
        "has the keys .*m.codes.* expected are .*'m'",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_mismatch_is_one_sentence_and_changes_nothing(mismatch: str):
    change, sentence = MISMATCHES[mismatch]
    optimizer = train(FlashAdamW(parameters(), eager=True), range(2))
    wrong = spoiled(change, train(FlashAdamW(parameters(seed=9), lr=0.5, eager=True), range(1)))
    before, groups = stored(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=sentence) as caught:
        optimizer.load_state_dict(wrong)
    assert str(caught.value).startswith("FlashAdamW: ")
    assert "\n" not in str(caught.value)
    assert_identical(stored(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups
    good = optimizer.state_dict()
    optimizer.load_state_dict(good)  # the optimizer still loads a good one


def test_a_state_dict_of_another_optimizer_is_refused():
    lion = train(FlashLion(parameters(), eager=True), range(1)).state_dict()
    unstamped = {key: lion[key] for key in ("state", "param_groups")}
    for wrong, sentence in ((lion, "is of FlashLion; expected is one of FlashAdamW"), (unstamped, "has the keys")):
        optimizer = train(FlashAdamW(parameters(), eager=True), range(1))
        before = stored(optimizer)
        with pytest.raises(ValueError, match=f"FlashAdamW: the state.*{sentence}"):
            optimizer.load_state_dict(wrong)
        assert_identical(stored(optimizer), before)


def test_a_subclass_without_a_rule_of_its_own_is_the_same_optimizer():
    class Mine(FlashAdamW):
        pass

    optimizer = train(Mine(parameters(), eager=True), range(2))
    resumed = FlashAdamW([p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]], eager=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert_identical(stored(resumed), stored(optimizer))
