"""Clipping, accumulation and GradScaler under gradient release, against the ordinary ways to do them."""

from typing import Any

import pytest
import torch
from released import Made, Net, assert_same, batches, everything, loss_of, made, ordinary, released, train
from torch import nn

from flashopt_compile import FlashAdamW, FlashSGD, enable_gradient_release
from flashopt_compile.release.sums import STORED, Sums
from quant.bounds import split_bound

NORM = 0.3  # less than the gradients have


@pytest.mark.parametrize("options", [{}, {"eager": False}, {"dtype": torch.float32}, {"kind": FlashSGD, "lr": 1.0}])
def test_exact_clipping_gives_the_bits_of_clip_grad_norm(options: dict[str, Any]):
    exact = released(release={"clip_norm": NORM, "clip_mode": "exact"}, **options)
    assert_same(exact, ordinary(clip_norm=NORM, **options))
    different = everything(ordinary(**options))
    assert any(not torch.equal(value, different[key]) for key, value in everything(exact).items())


def test_exact_clipping_gives_the_bits_with_parameters_of_two_dtypes():
    def run(release: bool) -> Made:
        model = Net()
        model.norm.to(torch.float32)
        model.norm.register_forward_pre_hook(lambda _, given: tuple(each.float() for each in given))
        model.norm.register_forward_hook(lambda _, __, result: result.to(torch.bfloat16))
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
        if release:
            handle = enable_gradient_release(model, optimizer, clip_norm=NORM, clip_mode="exact")
            train(model, optimizer, handle.backward)
        else:
            train(model, optimizer, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), NORM))
        return model, optimizer

    assert_same(run(True), run(False))


def test_previous_clipping_takes_the_norm_of_the_step_before():
    """The reference clips by a norm of its own. The first step takes the norm of what has come so far."""
    model, optimizer = made(FlashSGD, lr=1.0)
    with enable_gradient_release(model, optimizer, clip_norm=NORM):
        train(model, optimizer, steps=1)
        other, expected = made(FlashSGD, lr=1.0)
        other.load_state_dict(model.state_dict())
        expected.load_state_dict(optimizer.state_dict())
        x = next(batches(1))
        first, _ = made()
        loss_of(first, x).backward()
        norm = nn.utils.get_total_norm([each.grad for each in first.parameters() if each.grad is not None])
        for x in batches(3, seed=5):
            for each, release in ((model, True), (other, False)):
                loss_of(each, x).backward()
                if not release:
                    grads = [each.grad for each in other.parameters() if each.grad is not None]
                    following = nn.utils.get_total_norm(grads)
                    nn.utils.clip_grads_with_norm_(other.parameters(), NORM, norm)
                    norm = following
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        assert_same((model, optimizer), (other, expected))


def test_the_first_step_of_previous_clipping_is_clipped():
    model, optimizer = made(FlashSGD, lr=1.0, dtype=torch.float32)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with enable_gradient_release(model, optimizer, clip_norm=1e-3):
        train(model, optimizer, steps=1)
    moved = [(each.detach() - before[name]).norm() for name, each in model.named_parameters()]
    assert 1e-4 < float(torch.stack(moved).max()) <= 1.01e-3


@pytest.mark.parametrize("clip", [{"clip_value": 1e-3}, {"clip_param_norm": 1e-2}])
def test_each_parameter_is_clipped_like_by_torch(clip: dict[str, float]):
    def expected() -> Made:
        model, optimizer = made()

        def by_torch() -> None:
            for each in model.parameters():
                if each.grad is not None and "clip_value" in clip:
                    nn.utils.clip_grad_value_(each, clip["clip_value"])
                elif each.grad is not None:
                    nn.utils.clip_grad_norm_(each, clip["clip_param_norm"])

        train(model, optimizer, before_step=by_torch)
        return model, optimizer

    assert_same(released(release=clip), expected())


def test_exact_clipping_gives_other_tensors_their_gradients_once():
    model, optimizer = made()
    scale = torch.ones((), requires_grad=True)
    handle = enable_gradient_release(model, optimizer, clip_norm=NORM, clip_mode="exact")
    handle.backward(loss_of(model, next(batches(1))) * scale)
    assert scale.grad is not None
    assert torch.equal(scale.grad, loss_of(made()[0], next(batches(1))).detach())


def test_exact_clipping_counts_gradients_that_pre_step_has_left():
    def run(release: bool) -> Made:
        model, optimizer = made(dtype=torch.float32)
        late = model.get_parameter("second.weight")
        taken = [False, True]
        handle = None
        if release:
            options: Any = {"clip_norm": NORM, "clip_mode": "exact", "pre_step": lambda p, _: p is not late or taken[0]}
            handle = enable_gradient_release(model, optimizer, **options)
        for x in batches(2):
            if handle:
                handle.backward(loss_of(model, x))
                optimizer.step()
            else:
                loss_of(model, x).backward()
                left = None if late.grad is None or taken[0] else late.grad.clone()
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
                if left is not None:
                    late.grad = None
                optimizer.step()
                optimizer.zero_grad()
                late.grad = left
            taken.pop(0)
        return model, optimizer

    assert_same(run(True), run(False))


# Accumulation.


def accumulated(release: Any, micro: int = 4, last_outside: bool = True, **options: Any) -> Made:
    """Two steps of some micro-batches each, whose losses are divided as Accelerate and Trainer do."""
    model, optimizer = made(**options)
    handle = None if release is None else enable_gradient_release(model, optimizer, **release)
    for number in range(2):
        for place, x in enumerate(batches(micro, seed=number)):
            loss = loss_of(model, x) / micro
            if handle is None:
                loss.backward()
            elif place == micro - 1 and last_outside:
                handle.backward(loss)
            else:
                with handle.accumulate():
                    handle.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        if handle is None and options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return model, optimizer


@pytest.mark.parametrize("rounding", ["bf16", "fp32", "fp16"])
def test_sums_keep_to_their_bound(rounding: str):
    """n gradients are summed within n roundings of a 24-bit weight; see docs/release.md."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[rounding]
    parameter = nn.Parameter(torch.zeros(64, 96, dtype=dtype))
    sums, count = Sums([parameter], eager=True), 16
    exact = torch.zeros(64, 96, dtype=torch.float64)
    bound = torch.zeros_like(exact)
    per_step = split_bound(STORED)
    for step in range(count):
        random = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(64, 96, generator=random).mul(0.1).to(dtype)
        exact += parameter.grad.double()
        sums.add([parameter])
        ulp = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
        bound += 1.01 * per_step.number(ulp_head=1.0, ulp_fp32=2.0**-16) * ulp + 2.0**-22 * exact.abs()
    total = sums.total(parameter).double()
    half_ulp = {"bf16": 2.0**-8, "fp32": 0.0, "fp16": 2.0**-11}[rounding]
    error = (total - exact).abs()
    assert bool((error <= bound + half_ulp * exact.abs() + bound * half_ulp + 2.0**-24).all())
    if dtype == torch.float32:
        assert float(error.max()) < count * 2.0**-15 * float(exact.abs().max())
        plain = torch.zeros(64, 96, dtype=torch.bfloat16)
        for step in range(count):
            plain += torch.randn(64, 96, generator=torch.Generator().manual_seed(step)).mul(0.1).to(dtype)
        assert float(error.mean()) * 20 < float((plain.double() - exact).abs().mean())
    sums.drop([parameter])
    assert not sums.begun and not sums.total(parameter).any()


@pytest.mark.parametrize("last_outside", [True, False])
@pytest.mark.parametrize("release", [{}, {"clip_norm": NORM, "clip_mode": "exact"}, {"clip_value": 10.0}], ids=str)
def test_micro_batches_add_up(release: dict[str, Any], last_outside: bool):
    """Weights stay within the gradients' error of ordinary accumulation; without it they would be a step away."""
    options: dict[str, Any] = {"kind": FlashSGD, "lr": 1.0, "dtype": torch.float32}
    found = everything(accumulated(release, last_outside=last_outside, **options))
    model, optimizer = made(**options)
    for number in range(2):
        for x in batches(4, seed=number):
            (loss_of(model, x) / 4).backward()
        if "clip_norm" in release:
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    expected, before = everything((model, optimizer)), everything(made(**options))
    for key, value in expected.items():
        if key.endswith(" step"):
            assert torch.equal(value, found[key])
        elif key.endswith(" "):
            moved = float((value - before[key]).abs().max())
            assert float((value - found[key]).abs().max()) <= 4 * 2.0**-14 * moved, key


def test_an_accumulation_can_be_dropped_removed_or_finished_but_not_saved():
    model, optimizer = made()
    handle = enable_gradient_release(model, optimizer)
    train(model, optimizer, steps=1)
    before = everything((model, optimizer))

    def begin() -> None:
        with handle.accumulate():
            loss_of(model, next(batches(1))).backward()
        assert all(each.grad is None for each in model.parameters())

    begin()
    with pytest.raises(RuntimeError, match=r"accumulated for 7 parameters.*zero_grad"):
        optimizer.state_dict()
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in everything((model, optimizer)).items())
    optimizer.state_dict()
    begin()
    handle.remove()
    assert model.get_parameter("first.weight").grad is not None
    optimizer.step()
    reference = ordinary(steps=1)
    loss_of(reference[0], next(batches(1))).backward()
    reference[1].step()
    assert_same((model, optimizer), reference)


def test_compiled_sums_equal_uncompiled_ones():
    one, other = (accumulated({}, eager=eager) for eager in (True, False))
    assert_same(one, other)


# GradScaler.


def scaled(release: bool, dtype: torch.dtype, scale: float, clip: Any = None, bad: int | None = None) -> Any:
    model, optimizer = made(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    options = {"clip_norm": clip, "clip_mode": "exact"} if clip else {}
    handle = enable_gradient_release(model, optimizer, grad_scaler=scaler, **options) if release else None
    scales = []
    for number, x in enumerate(batches(4)):
        loss = scaler.scale(loss_of(model, x) * (float("inf") if number == bad else 1.0))
        if handle is not None:
            handle.backward(loss)
        else:
            loss.backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return (model, optimizer), scales


@pytest.mark.parametrize("clip", [None, NORM])
@pytest.mark.parametrize("bad", [None, 1])
def test_a_scaler_gives_the_same_bits_and_skips_whole_steps(clip: float | None, bad: int | None):
    one, scales = scaled(True, torch.bfloat16, 2.0**10, clip, bad)
    other, expected = scaled(False, torch.bfloat16, 2.0**10, clip, bad)
    assert scales == expected and (bad is None or min(scales) < 2.0**10)
    assert_same(one, other)
    steps = {int(state["step"]) for state in one[1].state.values() if int(state["step"])}
    assert steps == {4 if bad is None else 3}


def test_fp16_gradients_are_unscaled_in_fp32():
    (model, optimizer), _ = scaled(True, torch.float16, 2.0**8)
    other, expected = made(dtype=torch.float16)
    for x in batches(4):
        (loss_of(other, x) * 2.0**8).backward()
        for each in other.parameters():
            if each.grad is not None:
                each.grad.data = each.grad.float() / 2.0**8
        expected.step()
        expected.zero_grad()
    assert_same((model, optimizer), (other, expected))


def test_a_scaler_that_is_off_changes_nothing():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    enable_gradient_release(model, optimizer, grad_scaler=scaler)
    for x in batches(4):
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_same((model, optimizer), ordinary())


def test_a_scaler_sees_what_micro_batches_have_found():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = enable_gradient_release(model, optimizer, grad_scaler=scaler)
    for bad in (1.0, float("inf")):
        with handle.accumulate():
            handle.backward(scaler.scale(loss_of(model, next(batches(1))) * bad))
        handle.backward(scaler.scale(loss_of(model, next(batches(1)))))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0
    assert {int(state["step"]) for state in optimizer.state.values()} == {0, 1}
    optimizer.state_dict()


def test_skip_nonfinite_skips_whole_steps():
    model, optimizer = made(skip_nonfinite=True)
    handle = enable_gradient_release(model, optimizer, clip_norm=NORM, clip_mode="exact")
    before = everything((model, optimizer))
    hook = model.get_parameter("embedding.weight").register_hook(lambda grad: grad * float("inf"))
    handle.backward(loss_of(model, next(batches(1))))
    optimizer.step()
    assert all(torch.equal(value, everything((model, optimizer))[key]) for key, value in before.items())
    hook.remove()
    train(model, optimizer, handle.backward)
    assert_same((model, optimizer), ordinary(clip_norm=NORM))
