"""torch.amp.GradScaler: the step unscales fp16 gradients in fp32, and a step that overflows changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from training import stored

from flashopt_compile import FlashAdamW, FlashOptimizer, FlashSGD, NumericsError

SHAPES = ((40, 33), (7,))
SCALE = 1000.0  # no power of two, so that unscaling rounds


def weights(dtype: torch.dtype, seed: int = 0) -> list[Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def sgd(params: Any, **options: Any) -> FlashOptimizer:
    """An optimizer that minds its gradients' scale, as Adam hardly does."""
    return FlashSGD(params, **{"lr": 0.1, "momentum": 0.9, "eager": True, **options})


def scaler_of(scale: float = SCALE, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))  # which makes its scale
    return scaler


def give(params: Sequence[Parameter], number: int = 0, factor: float = SCALE, dtype: torch.dtype | None = None) -> None:
    """Gradients of a loss scaled by `factor`, different in each step."""
    random = torch.Generator().manual_seed(100 + number)
    for each in params:
        each.grad = None
        each.grad_dtype = dtype or each.dtype
        each.grad = (torch.randn(each.shape, generator=random) * factor).to(dtype or each.dtype)


def overflow(params: Sequence[Parameter], number: int = 0) -> None:
    give(params, number)
    assert params[1].grad is not None
    params[1].grad[3] = float("inf")


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def steps(params: Sequence[Parameter], opt: FlashOptimizer, count: int = 3) -> list[torch.Tensor]:
    """Take steps under a scaler; the bits of everything after them."""
    scaler = scaler_of()
    for number in range(count):
        give(params, number)
        scaler.step(opt)
        scaler.update()
    return stored(opt)


def by_fp32_gradients(params: Sequence[Parameter], opt: FlashOptimizer, count: int = 3) -> list[torch.Tensor]:
    """The same steps by gradients that were unscaled in fp32, as GradScaler unscales."""
    for number in range(count):
        give(params, number)
        grads = [parameter.grad for parameter in params]
        for parameter, grad in zip(params, grads, strict=True):
            assert grad is not None
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = grad.float() * (torch.tensor(SCALE).double().reciprocal().float())
        opt.step()
    return stored(opt)


@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.1}, {"quantize": False}], ids=str)
def test_fp16_gradients_are_unscaled_in_fp32(options: dict[str, Any]):
    one, other = weights(torch.float16), weights(torch.float16)
    assert same(steps(one, sgd(one, **options)), by_fp32_gradients(other, sgd(other, **options)))


@pytest.mark.parametrize("make", [sgd, FlashAdamW])
def test_compiled_steps_unscale_to_the_same_bits(make: Callable[..., FlashOptimizer]):
    one, other = weights(torch.float16), weights(torch.float16)
    assert same(steps(one, make(one, eager=False)), steps(other, make(other, eager=True)))


def test_small_gradients_survive_that_fp16_would_round_away():
    (weight,) = params = [Parameter(torch.zeros(32, dtype=torch.float16))]
    opt, scaler = sgd(params, lr=2.0**20, momentum=0.0), scaler_of(2.0**20)
    weight.grad = torch.full((32,), 2.0**-10, dtype=torch.float16)  # 2^-30 unscaled, and fp16 ends at 2^-24
    scaler.step(opt)
    assert torch.equal(weight.detach().float(), torch.full((32,), -(2.0**-10)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_gradients_are_unscaled_by_the_scaler_and_can_be_clipped(dtype: torch.dtype):
    one, other = weights(dtype), weights(dtype)
    opts, scaler = (sgd(one), sgd(other)), scaler_of()
    for number in range(3):
        give(one, number)
        give(other, number)
        scaler.unscale_(opts[0])
        torch.nn.utils.clip_grad_norm_(one, 0.5)
        scaler.step(opts[0])
        for parameter in other:
            assert parameter.grad is not None
            parameter.grad *= torch.tensor(SCALE).double().reciprocal().float()
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        opts[1].step()
        scaler.update()
    assert same(stored(opts[0]), stored(opts[1]))


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_step_that_overflows_changes_nothing_but_the_scale(dtype: torch.dtype, first: bool):
    params = weights(dtype)
    opt, scaler = sgd(params), scaler_of(2.0**10)
    if not first:
        give(params)
        scaler.step(opt)
        scaler.update()
    before = stored(opt)
    overflow(params)
    scaler.step(opt)
    scaler.update()
    assert same(stored(opt), before)
    assert scaler.get_scale() == 2.0**9
    give(params)
    scaler.step(opt)
    assert not same(stored(opt), before)


def test_a_growing_scale_keeps_the_plan_and_the_step_right():
    params = weights(torch.float16)
    opt, scaler = sgd(params, momentum=0.0, lr=1.0), scaler_of(4.0, growth_interval=1)
    plans = []
    for number in range(3):
        before = [parameter.detach().float() for parameter in params]
        give(params, factor=0.0)
        for parameter in params:
            parameter.grad = torch.full_like(parameter, 0.5 * 4.0 * 2.0**number)
        scaler.step(opt)
        scaler.update()
        plans.append(opt.plan)
        assert all((old - new.float() - 0.5).abs().max() < 2e-3 for old, new in zip(before, params, strict=True))
    assert plans[0] is not None and all(plan is plans[0] for plan in plans)


def test_steps_without_a_scaler_are_as_before_and_after_it():
    one, other = weights(torch.float16), weights(torch.float16)
    opts, scaler = (sgd(one), sgd(other)), scaler_of(2.0**10)
    for params, opt, step, factor in (
        (one, opts[0], lambda: scaler.step(opts[0]), 2.0**10),
        (other, opts[1], opts[1].step, 1.0),
    ):
        give(params, 0, factor)
        step()
        give(params, 1, 1.0)
        opt.step()
    assert same(stored(opts[0]), stored(opts[1]))
    assert not {"grad_scale", "found_inf"} & vars(opts[0]).keys()


def test_several_optimizers_share_a_scaler_and_each_skips_for_itself():
    one, other = weights(torch.float16), weights(torch.float32, seed=1)
    opts, scaler = (sgd(one), sgd(other)), scaler_of(2.0**10)
    give(one)
    overflow(other)
    before = stored(opts[1])
    for opt in opts:
        scaler.step(opt)
    scaler.update()
    assert float(opts[0].state[one[0]]["step"]) == 1
    assert same(stored(opts[1]), before)
    assert scaler.get_scale() == 2.0**9


def test_fp16_and_fp32_parameters_in_one_optimizer():
    half, full = weights(torch.float16), weights(torch.float32, seed=1)
    expected_half, expected_full = weights(torch.float16), weights(torch.float32, seed=1)
    mixed = sgd([*half, *full])
    got = steps([*half, *full], mixed)
    other = sgd([*expected_half, *expected_full])
    assert same(got, by_fp32_gradients([*expected_half, *expected_full], other))


def test_clipping_of_fp16_parameters_with_gradients_in_fp32():
    params, other = weights(torch.float16), weights(torch.float16)
    opts, scaler = (sgd(params), sgd(other)), scaler_of()
    give(params, dtype=torch.float32)
    scaler.unscale_(opts[0])
    norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
    scaler.step(opts[0])
    assert norm > 0.5
    give(other, dtype=torch.float32)
    for parameter in other:
        assert parameter.grad is not None
        parameter.grad *= torch.tensor(SCALE).double().reciprocal().float()
    torch.nn.utils.clip_grad_norm_(other, 0.5)
    opts[1].step()
    assert same(stored(opts[0]), stored(opts[1]))


def test_a_scaler_that_is_disabled_does_nothing():
    one, other = weights(torch.float16), weights(torch.float16)
    opts, scaler = (sgd(one), sgd(other)), torch.amp.GradScaler("cpu", enabled=False)
    give(one, factor=1.0)
    give(other, factor=1.0)
    scaler.step(opts[0])
    scaler.update()
    opts[1].step()
    assert same(stored(opts[0]), stored(opts[1]))


def test_a_closure_is_refused():
    params = weights(torch.float16)
    give(params)
    opt = sgd(params)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler_of().step(opt, closure=lambda: 0.0)
    assert not opt.state


def test_a_step_that_fails_leaves_no_scale_to_the_next():
    params = weights(torch.float16)
    opt, scaler = sgd(params, lr=1e-12, check_numerics=True, rounding="nearest", momentum=0.0), scaler_of()
    give(params)
    with pytest.raises(NumericsError):
        scaler.step(opt)
    scaler.update()
    assert not {"grad_scale", "found_inf"} & vars(opt).keys()
    opt.param_groups[0].update(lr=0.1, check_numerics=False)
    other = weights(torch.float16)
    give(params)
    scaler.step(opt)
    assert same(stored(opt), steps(other, sgd(other, rounding="nearest", momentum=0.0), 1))


def test_check_numerics_sees_unscaled_gradients():
    params = weights(torch.float16)
    opt = sgd(params, lr=1e-6, check_numerics=True, rounding="nearest", momentum=0.0)
    give(params, factor=1e-3 * SCALE)  # with the scale, updates would be large enough
    with pytest.raises(NumericsError):
        scaler_of().step(opt)


def test_a_scale_that_no_gradient_can_be_divided_by_is_refused():
    params = weights(torch.float16)
    opt, scaler = sgd(params), scaler_of()
    give(params)
    scaler.update(0.0)
    with pytest.raises(ValueError, match=r"grad_scale is 0\.0; allowed is a number from"):
        scaler.step(opt)
    assert not opt.state


def test_capturable_groups_are_refused_for_fp16_gradients():
    params = weights(torch.float16)
    opt = sgd(params, capturable=True)
    give(params)
    with pytest.raises(RuntimeError, match="capturable is True in parameter group 0"):
        scaler_of().step(opt)
    assert not opt.state


def test_a_compiled_step_is_unscaled_and_skipped():
    one, other = weights(torch.float16), weights(torch.float16)
    opts, scaler = (sgd(one, eager=False), sgd(other)), scaler_of()
    opts[0].step = torch.compile(opts[0].step)
    for number in range(3):
        (give if number != 1 else overflow)(one, number)
        scaler.step(opts[0])
        scaler.update(SCALE)
    for number in (0, 2):
        give(other, number)
        scaler.step(opts[1])
        scaler.update(SCALE)
    assert same(stored(opts[0]), stored(opts[1]))


@pytest.mark.parametrize("eager", [True, False], ids=["traced through", "among others"])
def test_a_graph_that_cannot_know_the_scale_is_refused(eager: bool):
    params = weights(torch.float16)
    opt = sgd(params, eager=eager)
    step = opt.step
    opt.step = torch.compile(lambda: step(), fullgraph=True)  # pyright: ignore[reportAttributeAccessIssue]
    give(params)
    before = stored(opt)
    with pytest.raises(Exception, match=r"leave scaler\.step\(opt\) out of what you"):
        scaler_of().step(opt)
    assert same(stored(opt)[: len(before)], before)
