"""State dicts in practice: torch.distributed.checkpoint, other devices, and 500 randomly spoiled ones."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from saving import go_on, new_model, pair, snapshot
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, rule
from quant import SIGNED8, Raw


def test_the_stamp_is_plain_and_says_what_wrote_the_dict():
    optimizer = train(FlashAdamW(parameters(), eager=True), range(1))
    stamp = optimizer.state_dict()["flashopt"]
    assert stamp["format"] == 1
    assert stamp["optimizer"] == "FlashAdamW"
    assert stamp["states"] == 3
    assert stamp["dtypes"] == ["bfloat16"] * 3
    assert isinstance(stamp["library"], str)


@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "expanded"])
def test_distributed_checkpoints_of_one_process_resume(is_compressed: bool, tmp_path: Path):
    kind = FlashAdamW if is_compressed else FlashLion  # whose states come back to the bit
    model, optimizer = pair(kind=kind, compress_state_dict=is_compressed, rounding="nearest")
    for parameter in model.parameters():
        parameter.grad = None
    saved: Any = get_optimizer_state_dict(model, optimizer)
    assert ("m.codes" in saved["state"]["0.weight"]) == is_compressed
    save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = pair(seed=9, steps=0, kind=kind, compress_state_dict=is_compressed)
    other.load_state_dict(model.state_dict())
    loaded = {"optimizer": get_optimizer_state_dict(other, resumed)}
    load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
    go_on(other, resumed, range(2, 4))
    go_on(model, optimizer, range(2, 4))
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))


def test_a_distributed_checkpoint_of_a_version_without_the_options_of_torch_loads(tmp_path: Path):
    model, optimizer = pair()
    model.zero_grad()
    saved: Any = get_optimizer_state_dict(model, optimizer)
    for group in saved["param_groups"]:
        for name in FlashAdamW.implementation:
            del group[name]
    save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = pair(seed=9, steps=0)
    other.load_state_dict(model.state_dict())
    loaded = {"optimizer": get_optimizer_state_dict(other, resumed)}
    load(loaded, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))


@pytest.mark.parametrize("options", [{}, {"fused": True, "foreach": False}], ids=["defaults", "given"])
def test_a_flattened_distributed_state_dict_resumes(options: dict[str, Any]):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = pair(**options)
    model.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    other, resumed = pair(seed=9, steps=0, **options)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=flat)
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))


def test_a_flattened_state_dict_goes_through_a_distributed_checkpoint(tmp_path: Path):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = pair()
    model.zero_grad()
    save({"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = pair(seed=9, steps=0)
    other.load_state_dict(model.state_dict())
    loaded = {"optimizer": get_optimizer_state_dict(other, resumed, options=flat)}
    load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, resumed, loaded["optimizer"], options=flat)
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))


def test_a_flattened_state_dict_that_is_not_compressed_is_refused_with_a_way_out():
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = pair(compress_state_dict=False)
    model.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"an empty m\.codes: .*; set compress_state_dict=True, or flatten_optimizer"):
        set_optimizer_state_dict(model, optimizer, saved, options=flat)
    assert_identical(snapshot(model, optimizer), before)


def test_initializing_for_a_distributed_checkpoint_leaves_the_weights_alone():
    model, optimizer = pair(steps=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert_identical([parameter.detach() for parameter in model.parameters()], before)


def test_states_without_values_are_refused():
    optimizer = train(FlashAdamW(parameters(), eager=True), range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["tail"] = saved["state"][0]["tail"].to("meta")
    before = stored(optimizer)
    with pytest.raises(ValueError, match=r"tail of parameter 0 is torch.int8"):
        optimizer.load_state_dict(saved)
    assert_identical(stored(optimizer), before)


@rule(a=SIGNED8, b=Raw())
def own_rule(w, g, a, b, t, *, lr=1e-2):
    return w - lr * (a + b), 0.9 * a + g, 0.5 * b + g


class Own(FlashOptimizer, rule=own_rule):
    """A custom rule whose states have no names in torch.optim."""


@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "expanded"])
def test_a_rule_of_the_users_own_keeps_its_letters(is_compressed: bool):
    optimizer = train(Own(parameters(), rounding="nearest", compress_state_dict=is_compressed, eager=True), range(3))
    state = optimizer.state_dict()["state"][0]
    assert set(state) == {"step", "tail", "b", *(["a.codes", "a.scales"] if is_compressed else ["a"])}
    resumed = Own([p.detach().clone().requires_grad_() for p in optimizer.param_groups[0]["params"]], eager=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert_identical(stored(resumed), stored(optimizer))


JUNK: list[Callable[[random.Random], Any]] = [
    lambda _: None,
    lambda _: "junk",
    lambda _: [],
    lambda _: {},
    lambda _: {"x": 1},
    lambda _: float("nan"),
    lambda _: float("inf"),
    lambda _: -1,
    lambda _: 2**70,
    lambda _: True,
    lambda _: object(),
    lambda _: torch.zeros(3),
    lambda _: torch.zeros(0),
    lambda _: torch.tensor(float("nan")),
    lambda _: torch.zeros(2, 2).to_sparse(),
    lambda _: torch.zeros(40, 64, dtype=torch.complex64),
    lambda _: torch.zeros(40, 64, device="meta"),
    lambda r: r.randrange(5),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in nested dicts and lists, paired with each of its keys."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def spoil(state_dict: dict[str, Any], choice: random.Random) -> None:
    container, key = choice.choice(places(state_dict))
    action = choice.randrange(4)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[choice.choice(["junk", 9, "exp_avg", "m.codes", "state1", "error_bits"])] = container.pop(key)
    elif action == 2 and isinstance(container[key], torch.Tensor):
        tensor = container[key]
        container[key] = choice.choice(
            [tensor.double(), tensor[..., :-1] if tensor.dim() else tensor[None], tensor.bool()]
        )
    else:
        container[key] = choice.choice(JUNK)(choice)


SOURCES: dict[str, Callable[[Row], dict[str, Any]]] = {
    "ours": lambda row: train(row.optimizer(parameters(seed=5), **row.options, eager=True), range(2)).state_dict(),
    "expanded": lambda row: train(
        row.optimizer(parameters(seed=5), **row.options, compress_state_dict=False, eager=True), range(2)
    ).state_dict(),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("row", [TABLE[0], TABLE[4]], ids=lambda row: row.name)
def test_spoiled_dicts_load_soundly_or_change_nothing(row: Row, source: str):
    """125 dicts of each kind are refused in one sentence without any change, or load to a state that can step."""
    good = copy.deepcopy(SOURCES[source](row))
    choice = random.Random(3)
    refused = 0

    def fresh() -> FlashOptimizer:
        return train(row.optimizer(parameters(), **row.options, eager=True), range(1))

    optimizer = fresh()
    before, groups = stored(optimizer), repr(optimizer.param_groups)
    for _ in range(125):
        spoiled = copy.deepcopy(good)
        spoil(spoiled, choice)
        try:
            optimizer.load_state_dict(spoiled)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(row.optimizer.__name__)
            assert "\n" not in str(error)
            assert all(map(torch.equal, stored(optimizer), before))
            assert repr(optimizer.param_groups) == groups
        else:
            train(optimizer, range(1, 2))
            optimizer = fresh()
    assert refused > 60


def test_an_invalid_dict_is_refused_in_one_sentence():
    optimizer = FlashAdamW(new_model().parameters(), eager=True)
    for wrong in (None, [], "dict", {"state": {}}, {"state": [], "param_groups": []}, {"state": {}, "param_groups": 3}):
        with pytest.raises(ValueError, match=r"FlashAdamW: .*expected is a"):
            optimizer.load_state_dict(wrong)  # pyright: ignore[reportArgumentType]
