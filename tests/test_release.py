"""Gradient release: an ordinary loop gives the same bits, and no gradient outlives its step."""

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from released import Net, assert_same, batches, everything, loss_of, made, ordinary, released, train
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.utils.checkpoint import checkpoint

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashSGD, enable_gradient_release, load, save
from flashopt_compile.release import handle as release_module

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (FlashAdamW, {}),
    (FlashAdamW, {"eager": False}),
    (FlashAdam, {"weight_decay": 0.1}),
    (FlashSGD, {"momentum": 0.9, "nesterov": True, "master_weight_bits": 32}),
    (FlashLion, {"rounding": "nearest"}),
    (FlashAdamW, {"dtype": torch.float32, "quantize": False}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_an_ordinary_loop_gives_the_same_bits(kind: Any, options: dict[str, Any]):
    assert_same(released(kind, **options), ordinary(kind, **options))


@pytest.mark.parametrize("gathered", [0, 3000])
def test_the_size_of_bundles_changes_no_bit(monkeypatch: pytest.MonkeyPatch, gathered: int):
    monkeypatch.setattr(release_module, "GATHERED_ELEMENTS", gathered)
    assert_same(released(), ordinary())


def test_without_word_of_the_end_of_a_pass_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release_module.backward, "running", lambda: None)
    assert_same(released(), ordinary())


def test_gradients_are_gone_when_backward_ends():
    model, optimizer = made()
    before = everything((model, optimizer))
    with enable_gradient_release(model, optimizer) as handle:
        loss_of(model, next(batches(1))).backward()
        assert handle.active and all(parameter.grad is None for parameter in model.parameters())
        after = everything((model, optimizer))
        assert not torch.equal(before["first.weight "], after["first.weight "])
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(value, after[key]) for key, value in everything((model, optimizer)).items())
    assert not handle.active


def test_no_more_gradients_live_than_those_of_a_bundle_and_a_layer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release_module, "GATHERED_ELEMENTS", 5000)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), eager=True)
    live: list[int] = []

    def note(_: Any) -> None:
        live.append(sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    largest, everything_ = 64 * 64 * 2, sum(each.nbytes for each in model.parameters())
    with enable_gradient_release(model, optimizer):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        model(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
    assert max(live) <= 5000 * 2 + largest < everything_ / 5
    live.clear()
    model(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
    assert max(live) == everything_


def test_after_remove_the_optimizer_steps_again():
    model, optimizer = made()
    handle = enable_gradient_release(model, optimizer)
    train(model, optimizer, steps=2)
    handle.remove()
    handle.remove()
    reference = ordinary(steps=2)
    for each in ((model, optimizer), reference):
        loss_of(each[0], next(batches(1))).backward()
        assert each[0].get_parameter("first.weight").grad is not None
        each[1].step()
    assert_same((model, optimizer), reference)
    loss = loss_of(model, next(batches(1)))
    handle.backward(loss)  # does what loss.backward() does
    assert model.get_parameter("first.weight").grad is not None
    enable_gradient_release(model, optimizer).remove()


def test_schedulers_closures_and_hooks_run_as_ever():
    calls: list[str] = []

    def loop(release: bool) -> Any:
        model, optimizer = made()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        if release:
            enable_gradient_release(model, optimizer)
        for x in batches(4):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
            scheduler.step()
        return model, optimizer

    assert_same(loop(True), loop(False))
    assert calls == ["before", "after"] * 8


def test_a_loop_without_step_trains_and_its_scheduler_does_not_warn():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0)
    enable_gradient_release(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in batches(4):
            loss_of(model, x).backward()
            scheduler.step()
    assert_same((model, optimizer), ordinary())


def test_groups_keep_their_options():
    def make() -> Any:
        model = Net()
        matrices = [each for each in model.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "lr": 3e-2, "betas": (0.5, 0.9)}]
        return model, FlashAdamW(groups, lr=1e-2, eager=True)

    one, other = make(), make()
    train(*one)
    enable_gradient_release(*other)
    train(*other)
    assert_same(other, one)


def test_two_models_and_two_optimizers_do_not_meet():
    def make(release: bool) -> Any:
        both = [made(), made(FlashSGD, momentum=0.9)]
        if release:
            enable_gradient_release(*both[0])
        for x in batches(3):
            torch.stack([loss_of(model, x) for model, _ in both]).sum().backward()
            for _, optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return both

    for one, other in zip(make(True), make(False), strict=True):
        assert_same(one, other)


def test_two_optimizers_of_one_model_release_their_own():
    def make(release: bool) -> Any:
        model = Net()
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizers = [FlashAdamW(parameters[:3], lr=1e-2, eager=True), FlashSGD(parameters[3:], lr=0.1, eager=True)]
        handles = [enable_gradient_release(model, each) for each in optimizers[: 2 * release]]
        for x in batches(3):
            loss_of(model, x).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        return model, optimizers

    (one, ones), (other, others) = make(True), make(False)
    for mine, theirs in zip(ones, others, strict=True):
        assert_same((one, mine), (other, theirs))


def test_what_is_not_in_the_model_is_stepped_by_step():
    model, optimizer = made()
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    enable_gradient_release(model, optimizer)
    (loss_of(model, next(batches(1))) + extra.sum()).backward()
    assert extra.grad is not None and float(extra.detach().sum()) == 3
    optimizer.step()
    assert float(extra.detach().sum()) < 3 and optimizer.state[extra]["step"] == 1
    assert optimizer.state[model.get_parameter("first.weight")]["step"] == 1


def test_pre_step_skips_a_parameter_and_leaves_its_gradient():
    model, optimizer = made()
    skipped = model.get_parameter("second.weight")
    groups: list[Any] = []

    def take(parameter: Tensor, group: dict[str, Any]) -> bool:
        groups.append(group)
        return parameter is not skipped

    before = skipped.detach().clone()
    with enable_gradient_release(model, optimizer, pre_step=take):
        loss_of(model, next(batches(1))).backward()
        grad = skipped.grad
        assert grad is not None and all(each is optimizer.param_groups[0] for each in groups)
        optimizer.step()
        assert skipped.grad is grad and torch.equal(skipped, before)
        optimizer.step_param(skipped, optimizer.param_groups[0])
        assert not torch.equal(skipped, before)
        optimizer.zero_grad()
        assert skipped.grad is None
    reference, expected = made()
    loss_of(reference, next(batches(1))).backward()
    expected.step()
    assert_same((model, optimizer), (reference, expected))


def test_step_param_steps_one_parameter():
    (model, optimizer), (other, expected) = made(), made()
    for each in (model, other):
        loss_of(each, next(batches(1))).backward()
    expected.step()
    group = optimizer.param_groups[0]
    for parameter in model.parameters():
        if parameter.grad is not None:
            optimizer.step_param(parameter, group)
    assert_same((model, optimizer), (other, expected))
    with pytest.raises(ValueError, match="no parameter of the optimizer"):
        optimizer.step_param(nn.Parameter(torch.ones(3)), group)
    with pytest.raises(ValueError, match="another group"):
        optimizer.step_param(model.get_parameter("first.weight"), dict(group))
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="no gradient"):
        optimizer.step_param(model.get_parameter("first.weight"), group)


def test_an_error_in_one_parameter_leaves_the_others_whole():
    model, optimizer = made()
    handle = enable_gradient_release(model, optimizer)
    train(model, optimizer, steps=1)
    bad = model.get_parameter("first.weight")
    optimizer.state[bad]["m.codes"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"m\.codes|asks? for"):
        loss_of(model, next(batches(1))).backward()
    counts = {int(state["step"]) for parameter, state in optimizer.state.items() if parameter is not bad}
    assert counts <= {0, 1, 2} and int(optimizer.state[bad]["step"]) == 1
    handle.remove()


def test_states_load_and_save_while_gradients_are_released(tmp_path: Path):
    model, optimizer = made()
    with enable_gradient_release(model, optimizer):
        train(model, optimizer, steps=2)
        save(tmp_path / "a.pt", model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        assert optimizer.memory()["parts"].get("gradient", 0) == 0 and optimizer.memory()["plan"] > 0
        assert optimizer.health()[0].nonfinite == 0
        twin = copy.deepcopy(optimizer)
        assert twin.release is None
        torch.save(model, tmp_path / "model.pt")
        train(model, optimizer, steps=2)
        expected = everything((model, optimizer))
        for how in ("state dict", "file"):
            if how == "file":
                load(tmp_path / "a.pt", model, optimizer)
            else:
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            train(model, optimizer, steps=2)
            assert all(torch.equal(value, expected[key]) for key, value in everything((model, optimizer)).items())


def test_distributed_state_dicts_work_before_and_after_the_first_step():
    model, optimizer = made()
    with enable_gradient_release(model, optimizer):
        first = dsd.get_optimizer_state_dict(model, optimizer)
        assert "first.weight" in first["state"]
        train(model, optimizer, steps=2)
        state = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer))
        other, fresh = made()
        other.load_state_dict(model.state_dict())
        with enable_gradient_release(other, fresh):
            dsd.set_optimizer_state_dict(other, fresh, state)
            assert_same((other, fresh), (model, optimizer))


def test_activation_checkpointing_and_a_compiled_model_work():
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def run(release: bool, wrap: Any) -> Any:
        model = Checkpointed()
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
        if release:
            enable_gradient_release(model, optimizer)
        for x in batches(3):
            loss_of(wrap(model), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        torch.compiler.reset()
        assert_same(run(True, wrap), run(False, wrap))


def test_reentrant_checkpointing_works():
    def run(release: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
        handle = enable_gradient_release(model, optimizer) if release else None
        for _ in range(3):
            h = torch.ones(4, 32, requires_grad=True)
            for layer in model:
                h = checkpoint(layer, h, use_reentrant=True)
            h.square().sum().backward()
            assert not release or all(each.grad is None for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        del handle
        return model, optimizer

    assert_same(run(True), run(False))


def test_a_failed_backward_pass_leaves_its_gradients_like_any_other():
    model, optimizer = made()
    enable_gradient_release(model, optimizer)
    train(model, optimizer, steps=1)
    x = next(batches(1))

    def fail(_: Tensor) -> None:
        raise ValueError("of a hook")

    hook = model.get_parameter("embedding.weight").register_hook(fail)
    with pytest.raises(ValueError, match="of a hook"):
        loss_of(model, x).backward()
    hook.remove()
    optimizer.zero_grad()
    reference = ordinary(steps=1)
    train(model, optimizer, steps=2)
    train(*reference, steps=2)
    assert_same((model, optimizer), reference)


def test_release_ends_with_its_optimizer():
    model, optimizer = made()
    enable_gradient_release(model, optimizer)
    del optimizer
    gc.collect()
    loss_of(model, next(batches(1))).backward()
    assert model.get_parameter("first.weight").grad is not None
    enable_gradient_release(model, FlashAdamW(model.parameters(), eager=True))


def test_backward_passes_that_do_not_add_up_are_warned_of():
    model, optimizer = made()
    enable_gradient_release(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=2)
    for x in batches(3):
        loss_of(model, x).backward()
    with pytest.warns(RuntimeWarning, match=r"3 backward passes .* handle\.accumulate\(\)"):
        optimizer.step()
    for x in batches(3):
        loss_of(model, x).backward()
    optimizer.step()  # once is enough


def test_clipping_that_finds_no_gradients_is_warned_of_once():
    model, optimizer = made()
    handle = enable_gradient_release(model, optimizer)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    train(model, optimizer, steps=1)
    loss_of(model, next(batches(1))).backward()
    for each in model.parameters():
        assert each.grad is None and isinstance(each, nn.Parameter)
    clip()
    with pytest.warns(RuntimeWarning, match=r"clip_grad_norm_ found no gradients .* clip_norm"):
        optimizer.step()
    assert all(type(each) is nn.Parameter for each in model.parameters())
    train(model, optimizer, steps=2, before_step=clip)
    handle.remove()
    enable_gradient_release(model, optimizer, clip_norm=1.0)
    train(model, optimizer, steps=2, before_step=clip)  # it does clip


def test_a_padded_row_does_not_take_in_what_another_pack_left():
    def scales(others: list[tuple[int, int]]) -> Tensor:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in [*others, (1, 1030)]]
        optimizer = FlashAdamW(parameters, eager=True)
        for step in range(2):
            for place, each in enumerate(parameters):
                random = torch.Generator().manual_seed(step)
                each.grad = torch.randn(each.shape, generator=random) * (1 if place == len(others) else 1e3)
            optimizer.step()
        return optimizer.state[parameters[-1]]["v.scales"]

    assert torch.equal(scales([(40, 80)]), scales([]))
