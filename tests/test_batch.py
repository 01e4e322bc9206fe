"""Small parameters stepped together: the bits of each alone, in memory they share, whoever has a gradient."""

import copy
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, batch, compiled
from flashopt_compile.batch import Batch, Kernel, Kernels, bind, eager
from flashopt_compile.pieces import Form
from flashopt_compile.step import Step

SHAPES = [(40, 64), (48,), (33, 40), (7, 160), (), (64, 48), (32, 32), (5,), (16, 8, 3, 3), (0, 8)]


def alone(params: list[Parameter], steps: range) -> list[Tensor]:
    """What each parameter and its state are after the steps, each in an optimizer of its own."""
    result: list[Tensor] = []
    optimizers = [FlashAdamW([p], eager=True) for p in params]
    for number in steps:
        give_gradients(params, number)
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        result += stored(optimizer)
    return result


def states(optimizer: FlashOptimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_parameters_stepped_together_are_those_stepped_alone():
    together = train(FlashAdamW(params := parameters(SHAPES), eager=True), range(3))
    apart = alone(parameters(SHAPES), range(3))
    by_parameter = [tensor for p in params for tensor in (p.detach(), *together.state[p].values())]
    assert_identical(sorted_by_bytes(by_parameter), sorted_by_bytes(apart))


def sorted_by_bytes(tensors: list[Tensor]) -> list[Tensor]:
    def key(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(tensor.dtype), tuple(tensor.shape), bytes(raw.numpy())

    return sorted((tensor.detach() for tensor in tensors), key=key)


def test_whoever_has_a_gradient_is_stepped_and_the_others_wait():
    """As experts of a mixture do: the shared memory changes hands each time the company changes."""
    params, reference = parameters(SHAPES), parameters(SHAPES)
    optimizer = FlashAdamW(params, eager=True)
    own = [FlashAdamW([p], eager=True) for p in reference]
    for number in range(9):
        give_gradients(params, number)
        give_gradients(reference, number)
        for position, (p, q, single) in enumerate(zip(params, reference, own, strict=True)):
            if (number + position) % 3 == 0 or (number % 4 == 3 and position % 2):
                p.grad = q.grad = None
            single.step()
        optimizer.step()
    for p, q, single in zip(params, reference, own, strict=True):
        assert_identical([p.detach(), *optimizer.state[p].values()], [q.detach(), *single.state[q].values()])


def test_state_tensors_stay_what_they_are_and_can_be_written_to():
    (p, q) = params = parameters([(40, 64), (32, 64)])
    optimizer = train(FlashAdamW(params, eager=True), range(1))
    before = states(optimizer)
    train(optimizer, range(1, 2))
    assert all(a is b for a, b in zip(states(optimizer), before, strict=True))
    optimizer.state[q]["m.codes"].zero_()
    twin = copy.deepcopy(optimizer)
    assert not twin.state[twin.param_groups[0]["params"][1]]["m.codes"].any()
    p.grad = torch.zeros_like(p)
    q.grad = torch.zeros_like(q)
    optimizer.step()
    assert not optimizer.state[q]["m.codes"].any()
    assert optimizer.state[p]["m.codes"].any()


def test_a_copy_shares_no_memory_with_the_original():
    optimizer = train(FlashAdamW(parameters(SHAPES), eager=True), range(2))
    twin = copy.deepcopy(optimizer)
    before = [tensor.clone() for tensor in stored(optimizer)]
    train(twin, range(2, 4))
    assert_identical(stored(optimizer), before)


def test_a_saved_state_dict_takes_the_bytes_of_its_tensors():
    optimizer = train(FlashAdamW(parameters([(64, 64)] * 20), eager=True), range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 1.1 * sum(value.nbytes for value in states(optimizer)) + 60_000


def test_a_part_of_the_state_that_has_gone_is_missed():
    (p,) = parameters([(40, 64)])
    optimizer = train(FlashAdamW([p], eager=True), range(1))
    del optimizer.state[p]["v.scales"]
    with pytest.raises(ValueError, match=r"the state of parameter 0\.0 is"):
        optimizer.step()


@pytest.mark.parametrize("change", ["load", "add group", "new data"])
def test_what_changes_between_steps_is_noticed(change: str):
    def run(together: bool) -> list[Tensor]:
        params = parameters([(40, 64), (32, 64), (48,)])
        optimizer = train(FlashAdamW(params[:2], eager=True), range(2))
        if change == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif change == "add group":
            optimizer.add_param_group({"params": params[2:]})
        else:
            params[0].data = params[0].detach().clone() * 2
        if not together:
            optimizer._forget()
            for state in optimizer.state.values():
                for value in state.values():
                    value.data = value.clone()
        return stored(train(optimizer, range(2, 4)))

    assert_identical(run(True), run(False))


def test_gradients_may_change_their_dtype(monkeypatch: pytest.MonkeyPatch):
    """Kernels of one dtype may take other rows than those of another: what is kept of a parameter is kept for each."""
    monkeypatch.setattr(batch, "SMALL_ELEMENTS", 100)
    monkeypatch.setattr(batch, "CHUNK_ELEMENTS", 640)

    def run(kernels: Kernels) -> list[Tensor]:
        optimizer = FlashAdamW(params := parameters([(33, 32), (7, 64)]), eager=True)
        for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)):
            give_gradients(params, number)
            work = list(optimizer._work())
            numbers = optimizer._numbers(optimizer.param_groups[0])
            stepping = Batch(kernels, optimizer._packs)
            for group, name, p, state in work:
                entry = optimizer._entry(group, name, p, state)
                assert p.grad is not None
                stepping.add(
                    entry.step, entry.piece, p.grad.to(dtype), torch.tensor(number + 1.0), number + 1.0, numbers
                )
            stepping.flush()
        return stored(optimizer)

    def of_three_groups(step: Step, grad_dtype: torch.dtype, *_: object) -> Kernel:
        return Kernel(partial(bind, step), Form.of(batch.CHUNK_ELEMENTS, 32, 1 if grad_dtype == torch.float16 else 3))

    assert_identical(run(of_three_groups), run(eager))


def test_parts_of_large_parameters_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch, "SMALL_ELEMENTS", 100)
    monkeypatch.setattr(batch, "CHUNK_ELEMENTS", 640)
    optimizer = train(FlashAdamW(parameters([(50, 33), (64, 50)]), eager=True), range(3))
    assert not optimizer._packs


def test_each_call_has_numbers_of_its_own():
    """Groups that differ in lr, and parameters that differ in their step, share no block."""
    calls: list[int] = []

    def run(tensors: Sequence[Tensor], *rest: object) -> None:
        calls.append(len(tensors[0]))

    def watched(*kind: Any) -> Kernel:
        return replace(eager(*kind), bind=partial(bind, run))

    optimizer = FlashAdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters([(32, 64)] * 3), (1, 2, 3), strict=True)]
    )
    work = list(optimizer._work())
    collected = Batch(watched, {})
    numbers = {id(group): optimizer._numbers(group) for group in optimizer.param_groups}
    for group, name, p, state in work:
        entry = optimizer._entry(group, name, p, state)
        collected.add(entry.step, entry.piece, torch.zeros_like(p), torch.tensor(1.0), 1.0, numbers[id(group)])
        collected.add(entry.step, entry.piece, torch.zeros_like(p), torch.tensor(2.0), 2.0, numbers[id(group)])
    collected.flush()
    assert calls == [64] * 6


def test_warmup_compiles_what_the_step_needs_and_changes_nothing(capsys: pytest.CaptureFixture[str]):
    compiled._kernels.clear()
    optimizer = FlashLion(params := parameters([(32, 64), (48,)]), rounding="nearest")
    before = [p.detach().clone() for p in params]
    optimizer.warmup()
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 2
        and told[0].startswith("FlashLion: compiled 1 of 2, lion of weights as Split")
        and "8 bits" in told[0]
    )
    assert "fp32" in told[1] and told[1].endswith(" s")
    assert not optimizer.state
    assert_identical([p.detach() for p in params], before)
    count = len(compiled._kernels)
    train(optimizer, range(1))
    assert len(compiled._kernels) == count == 2
    optimizer.warmup()
    FlashLion(params, eager=True).warmup()
    assert capsys.readouterr().err == ""
