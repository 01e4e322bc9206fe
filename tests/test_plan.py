"""A step like the last one reuses its plan. All differences are noticed, and the bits stay the same."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashOptimizer, NumericsError, stepping

SHAPES = [(40, 64), (48,), (33, 40), (512, 160)]  # the last is too large to pack


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[FlashOptimizer]:
    """The optimizers that made a new plan, in order."""
    seen: list[FlashOptimizer] = []
    real = stepping._new_plan

    def new_plan(optimizer: FlashOptimizer, *args: Any) -> Any:
        seen.append(optimizer)
        return real(optimizer, *args)

    monkeypatch.setattr(stepping, "_new_plan", new_plan)
    return seen


Change = Callable[[FlashOptimizer, list[Parameter]], Any]


def changed(
    change: Change | None, forget: bool, eager: bool, make: type[FlashOptimizer] = FlashAdamW, **options: Any
) -> list[Tensor]:
    """Weights and states after a change between two steps. With `forget`, every step makes a new plan."""
    optimizer = make(params := parameters(SHAPES), eager=eager, **options)
    for number in range(6):
        if number <= 3:
            give_gradients(params, number)
        if number == 3 and change is not None:
            change(optimizer, params)
        if forget:
            optimizer.plan = None
        optimizer.step()
    return [tensor for p in params for tensor in (p.detach(), *(v for _, v in sorted(optimizer.state[p].items())))]


def assert_noticed(change: Change, eager: bool, has_effect: bool = True, **options: Any) -> None:
    """Assert that a change has the same effect with and without a remembered plan."""
    found = changed(change, forget=False, eager=eager, **options)
    assert_identical(found, changed(change, forget=True, eager=eager, **options))
    without = changed(None, forget=False, eager=eager, **options)
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, without, strict=True))
    assert same != has_effect


each_way = pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])


def scheduled(forget: bool, eager: bool = True) -> list[Tensor]:
    """Weights and states after five steps under a schedule."""
    optimizer = FlashAdamW(params := parameters(SHAPES), eager=eager)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    for number in range(5):
        give_gradients(params, number)
        if forget:
            optimizer.plan = None
        optimizer.step()
        scheduler.step()
    return stored(optimizer)


@each_way
def test_a_plan_is_made_once(eager: bool, worked_out: list[FlashOptimizer]):
    once = scheduled(forget=False, eager=eager)
    assert len(worked_out) == 1
    assert_identical(once, scheduled(forget=True))


# Changes between steps


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


def frozen_without_a_gradient(_: Any, params: list[Parameter]) -> None:
    params[3].requires_grad_(False)
    params[3].grad = None


def fresh_states(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.state.clear()


def loaded_states(optimizer: FlashOptimizer, _: Any) -> None:
    other = FlashAdamW(parameters(SHAPES), lr=0.7, eager=True)
    optimizer.load_state_dict(train(other, range(7, 9)).state_dict())


def states_loaded_again(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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


def two_groups(optimizer: FlashOptimizer, params: list[Parameter]) -> None:
    (group,) = optimizer.param_groups
    group["params"] = params[:2]
    optimizer.param_groups.append({**group, "params": params[2:], "lr": 0.2})


def another_group(optimizer: FlashOptimizer, _: Any) -> None:
    more = parameters([(32, 32)], seed=1)
    give_gradients(more, 5)
    optimizer.add_param_group({"params": more, "lr": 0.1})


def tensor_as_lr(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.4)


def list_of_betas(optimizer: FlashOptimizer, _: Any) -> None:
    optimizer.param_groups[0]["betas"] = [0.5, 0.6]
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 0.7


CHANGES: dict[str, Change] = {
    "lr": set_option("lr", 0.5),
    "betas": set_option("betas", (0.5, 0.6)),
    "eps": set_option("eps", 0.1),
    "weight decay": set_option("weight_decay", 0.5),
    "lr as a tensor": set_option("lr", torch.tensor(0.3)),
    "lr as a tensor that is written to": tensor_as_lr,
    "betas as a list that is written to": list_of_betas,
    "maximize": set_option("maximize", True),
    "rounding": set_option("rounding", "nearest"),
    "no gradient": drop_gradient,
    "frozen, without a gradient": frozen_without_a_gradient,
    "gradients of another dtype": other_gradient_dtype,
    "other data": move_data,
    "fewer parameters": fewer_parameters,
    "two groups": two_groups,
    "fresh states": fresh_states,
    "loaded states": loaded_states,
    "another state": other_state,
    "a state that was written to": state_written_to,
    "other step counts": other_step,
}
# These change no bit of the existing parameters.
WITHOUT_EFFECT: dict[str, Change] = {
    "frozen, with a gradient": freeze,
    "gradients with other strides": other_gradient_strides,
    "gradients with a history": gradient_with_history,
    "parameters with other strides": other_strides,
    "another order": other_order,
    "states loaded again": states_loaded_again,
    "an equal step count": equal_step,
    "another group": another_group,
}


@each_way
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str, eager: bool):
    assert_noticed(CHANGES[change], eager)


@each_way
@pytest.mark.parametrize("change", WITHOUT_EFFECT)
def test_changes_without_an_effect_have_none(change: str, eager: bool):
    assert_noticed(WITHOUT_EFFECT[change], eager, has_effect=False)


@each_way
def test_a_rule_chosen_by_a_number_is_noticed(eager: bool):
    assert_noticed(set_option("weight_decay", 0.5), eager, make=FlashAdam)


@each_way
def test_an_initial_lr_that_changes_is_noticed(eager: bool):
    assert_noticed(set_option("initial_lr", 0.5), eager, lr=0.1, weight_decay=0.1, decouple_lr=True)


@pytest.mark.parametrize("shapes", [[(40, 64)], [(512, 160)]], ids=str)
def test_a_parameter_that_takes_the_place_of_another_in_memory_is_noticed(shapes: list[tuple[int, ...]]):
    """The new head lies at the old one's address, by which the plan knows heads."""

    def run(forget: bool) -> list[Tensor]:
        (p,) = params = parameters(shapes)
        optimizer = train(FlashAdamW(params, eager=True), range(2))
        other = Parameter(p.detach())  # in the same memory
        optimizer.param_groups[0]["params"] = [other]
        if forget:
            optimizer.plan = None
        return stored(train(optimizer, range(2, 4)))

    assert_identical(run(False), run(True))


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


def test_a_changed_number_of_threads_is_noticed(worked_out: list[FlashOptimizer]):
    optimizer = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        train(optimizer, range(2, 4))
    finally:
        torch.set_num_threads(threads)
    assert len(worked_out) == 2


def test_a_step_in_another_thread_follows_the_same_plan(worked_out: list[FlashOptimizer]):
    one = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    other = train(FlashAdamW(parameters(SHAPES), eager=True), range(4))
    thread = threading.Thread(target=train, args=(one, range(2, 4)))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert_identical(stored(one), stored(other))
    assert len(worked_out) == 2


def test_a_first_step_in_inference_mode_leaves_tensors_of_every_mode(worked_out: list[FlashOptimizer]):
    one, other = (FlashAdamW(parameters(SHAPES), eager=True) for _ in range(2))
    with torch.inference_mode():
        train(one, range(2))
    assert_identical(stored(train(one, range(2, 4))), stored(train(other, range(4))))
    assert not any(value.is_inference() for state in one.state.values() for value in state.values())


# Step counts


def test_each_parameter_has_its_own_count():
    params = parameters([(8,), (9,), (10,), (512, 160)])
    optimizer = FlashAdamW(params, eager=True)
    optimizer.step()  # makes the states
    counts = [optimizer.state[p]["step"] for p in params]
    for number, count in enumerate(counts):
        count.fill_(number)
    for company in ((0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (0, 1), (1, 3), (1, 3)):
        give_gradients(params, 0)
        for number, p in enumerate(params):
            if number not in company:
                p.grad = None
        optimizer.step()
    assert [count.item() for count in counts] == [3.0, 7.0, 4.0, 8.0]
    assert all(optimizer.state[p]["step"] is count for p, count in zip(params, counts, strict=True))
    assert all(count.shape == () and count.dtype == torch.float32 for count in counts)


def test_a_count_that_was_set_or_replaced_is_counted_on():
    optimizer = FlashAdamW(params := parameters([(8,), (9,), (10,)]), eager=True)
    for number in range(2):
        give_gradients(params, number)
        optimizer.step()
    optimizer.state[params[0]]["step"].fill_(10)
    optimizer.state[params[1]]["step"] = torch.tensor(20.0)
    optimizer.state[params[2]]["step"].data = torch.tensor(30.0)
    give_gradients(params, 2)
    optimizer.step()
    optimizer.state[params[2]]["step"].data = torch.tensor(40.0)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [12.0, 22.0, 41.0]


def test_a_copy_counts_for_itself():
    optimizer = FlashAdamW(params := parameters([(8,), (9,)]), eager=True)
    give_gradients(params, 0)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    own = copied.param_groups[0]["params"]
    give_gradients(own, 1)
    copied.step()
    assert [copied.state[p]["step"].item() for p in own] == [2.0, 2.0]
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]
    other = FlashAdamW(again := parameters([(8,), (9,)]), eager=True)
    other.load_state_dict(optimizer.state_dict())
    give_gradients(again, 1)
    other.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]


# Hooks, profilers and subclasses


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


# Steps that check numbers


def test_a_step_that_is_skipped_keeps_the_plan(worked_out: list[FlashOptimizer]):
    (p,) = params = parameters([(40, 64)])
    optimizer = train(FlashAdamW(params, eager=True, skip_nonfinite=True), range(2))
    before = stored(optimizer)
    p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    assert_identical(stored(optimizer), before)
    train(optimizer, range(2, 4))
    assert_identical(stored(optimizer), stored(train(FlashAdamW(parameters([(40, 64)]), eager=True), range(4))))
    assert len(worked_out) == 2  # one for each of the two optimizers


def test_check_numerics_checks_every_step_of_a_plan(worked_out: list[FlashOptimizer]):
    p = Parameter(torch.full((64, 64), 1.5, dtype=torch.bfloat16))
    optimizer = FlashAdamW([p], lr=0.1, rounding="nearest", check_numerics=True, eager=True)
    train(optimizer, range(3))
    before = stored(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-9
    with pytest.raises(NumericsError):
        optimizer.step()
    assert_identical(stored(optimizer), before)
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, range(3, 5))
    assert len(worked_out) == 1


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64)], ids=["fp32", "fp64"])
def test_a_tensor_lr_is_read_in_every_step_of_a_plan(lr: Tensor, worked_out: list[FlashOptimizer]):
    one = FlashAdamW(params := parameters(SHAPES), lr=lr, eager=True)
    other = FlashAdamW(again := parameters(SHAPES), lr=0.1, eager=True)
    for number in range(4):
        give_gradients(params, number)
        give_gradients(again, number)
        lr.fill_(0.1 / (number + 1))
        other.param_groups[0]["lr"] = lr.item()
        one.step()
        other.step()
    assert_identical(stored(one), stored(other))
    assert len(worked_out) == 2


def test_sharded_parameters_have_a_plan(worked_out: list[FlashOptimizer]):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = parameters(SHAPES)
        sharded = [Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
        one, other = FlashAdamW(sharded, eager=True), FlashAdamW(plain, eager=True)
        for number in range(3):
            give_gradients(plain, number)
            for p, q in zip(sharded, plain, strict=True):
                assert q.grad is not None
                p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
            one.step()
            other.step()
        for p, q in zip(sharded, plain, strict=True):
            assert_identical([p.detach().full_tensor()], [q.detach()])  # pyright: ignore[reportAttributeAccessIssue]
        assert len(worked_out) == 2
    finally:
        distributed.destroy_process_group()
