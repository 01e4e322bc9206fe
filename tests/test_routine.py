"""A step like the last one is not worked out anew; whatever differs is noticed, and the bits are the same."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashOptimizer, batch

SHAPES = [(40, 64), (48,), (33, 40), (512, 160)]  # the last is stepped by itself


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[FlashOptimizer]:
    """The optimizers that worked a step out anew, in order."""
    seen: list[FlashOptimizer] = []
    real = FlashOptimizer._step_anew

    def step_anew(self: FlashOptimizer) -> None:
        seen.append(self)
        real(self)

    monkeypatch.setattr(FlashOptimizer, "_step_anew", step_anew)
    return seen


def apart_and_anew(
    change: Callable[[FlashOptimizer, list[Parameter]], Any], make: type[FlashOptimizer] = FlashAdamW, **options: Any
) -> None:
    """A change between steps has the same effect on an optimizer that remembers nothing of the last step."""

    def run(forget: bool) -> list[Tensor]:
        optimizer = make(params := parameters(SHAPES), eager=True, **options)
        train(optimizer, range(3))
        give_gradients(params, 3)
        change(optimizer, params)
        for _ in range(3):
            if forget:
                optimizer._forget()
            optimizer.step()
        return stored(optimizer)

    assert_identical(run(False), run(True))


def scheduled(forget: bool, eager: bool = True) -> list[Tensor]:
    """What five steps under a schedule come to."""
    optimizer = FlashAdamW(params := parameters(SHAPES), eager=eager)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    for number in range(5):
        give_gradients(params, number)
        if forget:
            optimizer._forget()
        optimizer.step()
        scheduler.step()
    return stored(optimizer)


@pytest.mark.parametrize("eager", [True, False])
def test_a_step_is_worked_out_once(eager: bool, worked_out: list[FlashOptimizer]):
    once = scheduled(forget=False, eager=eager)
    assert len(worked_out) == 1
    assert_identical(once, scheduled(forget=True))


def set_option(name: str, value: Any) -> Callable[..., None]:
    return lambda optimizer, _: optimizer.param_groups[0].update({name: value})


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def drop_gradient(_: Any, params: list[Parameter]) -> None:
    params[1].grad = None


def freeze(_: Any, params: list[Parameter]) -> None:
    params[0].requires_grad_(False)


def other_gradient_dtype(_: Any, params: list[Parameter]) -> None:
    for parameter in params:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.float() * 1.001


def other_gradient_strides(_: Any, params: list[Parameter]) -> None:
    for parameter in (params[0], params[3]):
        assert parameter.grad is not None
        parameter.grad = transposed(parameter.grad)


def gradient_with_history(_: Any, params: list[Parameter]) -> None:
    for parameter in params:
        assert parameter.grad is not None
        parameter.grad.requires_grad_()


def move_data(_: Any, params: list[Parameter]) -> None:
    for parameter in params:
        parameter.data = parameter.detach() * 2


def other_strides(_: Any, params: list[Parameter]) -> None:
    for parameter in (params[0], params[3]):
        parameter.data = transposed(parameter.detach())


def other_order(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def fewer_parameters(optimizer: FlashOptimizer, _: Any) -> None:
    del optimizer.param_groups[0]["params"][1]


def fresh_states(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.state.clear()


def other_state(optimizer: FlashOptimizer, params: list[Parameter]) -> None:
    for parameter in (params[0], params[3]):
        optimizer.state[parameter]["m.codes"] = optimizer.state[parameter]["m.codes"] // 2


def state_written_to(optimizer: FlashOptimizer, params: list[Parameter]) -> None:
    for parameter in (params[0], params[3]):
        optimizer.state[parameter]["m.codes"].zero_()


def other_step(optimizer: FlashOptimizer, params: list[Parameter]) -> None:
    optimizer.state[params[0]]["step"].fill_(10)
    optimizer.state[params[1]]["step"] = torch.tensor(20.0)
    optimizer.state[params[3]]["step"].data = torch.tensor(30.0)


def equal_step(optimizer: FlashOptimizer, params: list[Parameter]) -> None:
    optimizer.state[params[0]]["step"] = optimizer.state[params[0]]["step"].clone()


def another_group(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.add_param_group({"params": (more := parameters([(32, 32)], seed=1)), "lr": 0.1})
    give_gradients(more, 5)


def list_of_betas(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.param_groups[0]["betas"] = [0.5, 0.6]
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 0.7


CHANGES = [
    *(set_option(name, value) for name, value in {"lr": 0.5, "betas": (0.5, 0.6), "maximize": True}.items()),
    *(set_option(name, value) for name, value in {"rounding": "nearest", "lr": torch.tensor(0.3)}.items()),
    *(drop_gradient, freeze, other_gradient_dtype, other_gradient_strides, gradient_with_history, move_data),
    *(other_strides, other_order, fewer_parameters, fresh_states, other_state, state_written_to, other_step),
    *(equal_step, another_group, list_of_betas),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: Callable[..., None]):
    apart_and_anew(change)


def test_a_rule_chosen_by_a_number_is_noticed():
    apart_and_anew(set_option("weight_decay", 0.5), FlashAdam)


def test_an_initial_lr_that_changes_is_noticed():
    apart_and_anew(set_option("initial_lr", 0.5), lr=0.1, weight_decay=0.1, decouple_lr=True)


def test_a_parameter_that_gets_its_first_gradient_joins(worked_out: list[FlashOptimizer]):
    optimizer = FlashAdamW(params := parameters(SHAPES), eager=True)
    for number in range(4):
        give_gradients(params, number)
        if number < 2:
            params[0].grad = None
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2.0, 4.0, 4.0, 4.0]
    assert len(worked_out) == 2


@pytest.mark.parametrize("shape", [(48,), (512, 160)], ids=str)
def test_a_gradient_that_does_not_fit_is_refused_and_nothing_changes(shape: tuple[int, ...]):
    (p,) = params = parameters([shape])
    optimizer = train(FlashAdamW(params, eager=True), range(2))
    before = stored(optimizer)
    assert p.grad is not None
    p.grad.data = torch.zeros(shape[0] // 2, *shape[1:])
    with pytest.raises(ValueError, match="it must match the parameter's"):
        optimizer.step()
    p.grad = None
    p.grad = torch.zeros(shape, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(TypeError, match="layout"):
        optimizer.step()
    assert_identical(stored(optimizer), before)


def test_gradients_are_not_kept():
    optimizer = train(FlashAdamW(params := parameters(SHAPES)), range(3))
    gradients = [weakref.ref(p.grad) for p in params if p.grad is not None]
    optimizer.zero_grad()
    gc.collect()
    assert len(gradients) == len(SHAPES) and not any(each() for each in gradients)


def test_a_number_of_threads_that_changes_is_noticed(worked_out: list[FlashOptimizer]):
    optimizer = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        train(optimizer, range(2, 4))
    finally:
        torch.set_num_threads(threads)
    assert len(worked_out) == 2


def test_another_thread_has_scratch_memory_of_its_own():
    """As two optimizers do that step at once: what the first was worked out with is not for the second thread."""
    one = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    other = train(FlashAdamW(parameters(SHAPES), eager=True), range(4))
    before = batch.scratch.cache_info().currsize
    thread = threading.Thread(target=train, args=(one, range(2, 4)))
    thread.start()
    thread.join()
    assert batch.scratch.cache_info().currsize > before
    assert_identical(stored(one), stored(other))


def test_hooks_see_every_step_once(worked_out: list[FlashOptimizer]):
    seen: list[str] = []
    optimizer = train(FlashAdamW(params := parameters(SHAPES), eager=True), range(2))
    before = optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(f"before {len(args)}"))
    after = register_optimizer_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, range(2, 4))
    optimizer.step(lambda: params[0].sum())
    before.remove()
    after.remove()
    train(optimizer, range(4, 5))
    assert seen == ["before 1", "after", "before 1", "after", "before 2", "after"]
    assert len(worked_out) == 1


def test_a_profiler_sees_steps_by_their_name():
    optimizer = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    with torch.profiler.profile() as profile:
        train(optimizer, range(2, 4))
    names = [event.name for event in profile.events() or ()]
    assert names.count("Optimizer.step#FlashAdamW.step") == 2


def test_a_step_of_a_subclass_is_called_and_hooked_once():
    calls: list[str] = []

    class Announced(FlashAdamW):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

    optimizer = Announced(parameters(SHAPES), eager=True)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    train(optimizer, range(3))
    assert calls == ["step", "hook"] * 3
    assert_identical(stored(optimizer), stored(train(FlashAdamW(parameters(SHAPES), eager=True), range(3))))


def test_steps_that_look_at_numbers_look_each_time(worked_out: list[FlashOptimizer]):
    (p,) = params = parameters([(40, 64)])
    optimizer = train(FlashAdamW(params, eager=True, skip_nonfinite=True), range(2))
    before = stored(optimizer)
    p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    assert_identical(stored(optimizer), before)
    assert len(worked_out) == 3
