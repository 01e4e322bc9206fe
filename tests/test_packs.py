"""Packs of small parameters and of the short ends of rows: each parameter gets the same bits as alone."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from planning import Watched, carry_out, clones, eager_of_width, item_of, step_by_blocks, with_calls_of
from torch import Tensor
from torch.nn import Parameter
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer
from flashopt_compile.engine import planner
from flashopt_compile.engine.kernel import Kernels
from flashopt_compile.engine.numbers import as_numbers
from flashopt_compile.engine.planner import shared_memory
from flashopt_compile.engine.step import Step
from flashopt_compile.engine.storage import storage_of
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.rules.adamw import adamw

SHAPES = [(40, 64), (48,), (33, 40), (7, 160), (), (64, 48), (32, 32), (5,), (16, 8, 3, 3), (0, 8)]
# Besides small ones: long rows of whole groups, an odd number of groups, rows that end in short groups, a vector.
MIXED_SHAPES = [(40, 64), (48,), (33, 40), (64, 96), (50, 33), (64, 50), (1, 2049), (6, 5, 70), (3000,), (16, 8, 3, 3)]
HYPER = as_numbers({"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, pack and stage small tensors as if they were large."""
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", 1100)
    monkeypatch.setattr(planner, "PACK_ELEMENTS", 640)
    monkeypatch.setattr(planner, "STAGED_ELEMENTS", 1024)


def call_with_fewer(monkeypatch: pytest.MonkeyPatch, most_elements: int) -> None:
    """Call compiled kernels with at most `most_elements` elements."""
    monkeypatch.setattr(inductor, "kernel", with_calls_of(inductor.kernel, most_elements))


def of_each(optimizer: FlashOptimizer, params: Sequence[Parameter]) -> list[dict[str, Tensor]]:
    """Copies of each parameter and its states, by name."""
    return [{"": p.detach().clone(), **{k: v.clone() for k, v in optimizer.state[p].items()}} for p in params]


def assert_same_each(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    """Compare parameter by parameter and state by state."""
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.keys() == other.keys()
        for key in one:
            same = one[key].dtype == other[key].dtype and torch.equal(one[key], other[key])
            assert same, f"{key or 'the weight'} of parameter {number} differs"


def alone(params: list[Parameter], steps: range) -> list[dict[str, Tensor]]:
    """Each parameter and its states after steps in an optimizer of its own."""
    optimizers = [FlashAdamW([p], eager=True) for p in params]
    for number in steps:
        give_gradients(params, number)
        for optimizer in optimizers:
            optimizer.step()
    return [of_each(optimizer, [p])[0] for optimizer, p in zip(optimizers, params, strict=True)]


def states(optimizer: FlashOptimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


each_way = pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])


@each_way
@pytest.mark.parametrize("shapes", [SHAPES, MIXED_SHAPES], ids=["small", "mixed"])
def test_parameters_get_the_same_bits_together_as_alone(
    shapes: list[tuple[int, ...]], eager: bool, monkeypatch: pytest.MonkeyPatch
):
    apart = alone(parameters(shapes), range(3))
    assert_same_each(of_each(train(FlashAdamW(params := parameters(shapes), eager=eager), range(3)), params), apart)
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", 1100)
    monkeypatch.setattr(planner, "PACK_ELEMENTS", 640)
    call_with_fewer(monkeypatch, 1000)
    assert_same_each(of_each(train(FlashAdamW(params := parameters(shapes), eager=eager), range(3)), params), apart)


@each_way
def test_only_parameters_with_gradients_are_stepped(eager: bool):
    """Experts of a mixture come and go like this. Packs are remade each time the set changes."""
    params, reference = parameters(SHAPES), parameters(SHAPES)
    optimizer = FlashAdamW(params, eager=eager)
    own = [FlashAdamW([p], eager=True) for p in reference]
    for number in range(9):
        give_gradients(params, number)
        give_gradients(reference, number)
        for position, (p, q, single) in enumerate(zip(params, reference, own, strict=True)):
            if (number + position) % 3 == 0 or (number % 4 == 3 and position % 2):
                p.grad = q.grad = None
            single.step()
        optimizer.step()
    expected = [of_each(single, [q])[0] for q, single in zip(reference, own, strict=True)]
    assert_same_each(of_each(optimizer, params), expected)


def strided(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


@each_way
@pytest.mark.parametrize("which", ["head", "gradient", "both"])
def test_parameters_whose_memory_has_another_order_get_the_same_bits(which: str, eager: bool, small_limits: None):
    """Small parameters are copied into packs, large ones a few rows at a time."""
    shapes = [(100, 64), (31, 33), (64, 50), (48, 96)]
    plain = train(FlashAdamW(params := parameters(shapes), eager=True), range(3))
    expected = of_each(plain, params)
    again = parameters(shapes)
    if which != "gradient":
        again = [Parameter(strided(p.detach())) for p in again]
    optimizer = FlashAdamW(again, eager=eager)
    for number in range(3):
        give_gradients(again, number)
        for p in again:
            assert p.grad is not None
            p.grad = p.grad.contiguous() if which == "head" else strided(p.grad)
        optimizer.step()
    assert_same_each(of_each(optimizer, again), expected)


# The memory of states


def test_state_tensors_keep_their_identity_and_can_be_written_to():
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


def saved_by_torch(state: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    file = io.BytesIO()
    torch.save(state, file)
    size = file.tell()
    file.seek(0)
    return size, torch.load(file, weights_only=True)


def pickled(state: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    data = pickle.dumps(state)
    return len(data), pickle.loads(data)


def copied(state: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    twin = copy.deepcopy(state)
    return sum(value.untyped_storage().nbytes() for value in twin.values()), twin


@pytest.mark.parametrize("way", [saved_by_torch, pickled, copied])
@pytest.mark.parametrize("shapes", [[(64, 64)] * 40, [(48,)] * 40, [(64, 50)] * 40, [(300, 256), (300, 250)]], ids=str)
def test_the_state_of_one_layer_takes_only_its_own_bytes(
    shapes: list[tuple[int, ...]], way: Callable[[dict[str, Tensor]], tuple[int, dict[str, Tensor]]]
):
    """States share a pack's memory, and torch saves a tensor with its whole storage."""
    optimizer = train(FlashAdamW(params := parameters(shapes), eager=True), range(2))
    for p in (params[0], params[-1]):
        state = optimizer.state[p]
        for key, value in state.items():
            assert value.untyped_storage().nbytes() == value.nbytes, key
            assert value.storage_offset() == 0, key
        size, back = way(state)
        assert size <= sum(value.nbytes for value in state.values()) + 6000
        assert_identical(list(back.values()), list(state.values()))
        before = clones(state.values())
        for value in back.values():
            value.zero_()
        assert_identical(list(state.values()), before)


def test_a_missing_part_of_a_state_is_noticed():
    (p,) = parameters([(40, 64)])
    optimizer = train(FlashAdamW([p], eager=True), range(1))
    del optimizer.state[p]["v.scales"]
    with pytest.raises(ValueError, match=r"the state of parameter 0\.0 is"):
        optimizer.step()


@pytest.mark.parametrize("change", ["load", "add group", "new data"])
def test_changes_between_steps_are_noticed(change: str):
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
            optimizer.plan = None
            for state in optimizer.state.values():
                for value in state.values():
                    value.data = value.clone()
        return stored(train(optimizer, range(2, 4)))

    assert_identical(run(True), run(False))


# The planner, without an optimizer


def step_of(shape: tuple[int, ...]) -> Step:
    return Step(adamw, storage_of(adamw, torch.bfloat16, shape, 24, True), "dither", maximize=False)


def tensors_of(step: Step, shape: tuple[int, ...], seed: int, grad_dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Head, gradient and parts of a parameter after one step, so that no state is zero."""
    (head,) = parameters([shape], seed=seed)
    give_gradients([head], seed)
    assert head.grad is not None
    rest = [torch.zeros(part.shape, dtype=part.dtype) for part in step.storage.parts(shape).values()]
    tensors = [head.detach(), head.grad.to(grad_dtype), *rest]
    step_by_blocks(step, tensors, torch.tensor(1.0), HYPER)
    return tensors


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("most_elements", [96, 1000, 1 << 22])
def test_kernels_of_any_width_give_the_same_bits(groups: int, most_elements: int, small_limits: None):
    t, steps = torch.tensor(2.0), [step_of(shape) for shape in MIXED_SHAPES]
    expected, found = (
        [tensors_of(step, shape, seed) for seed, (step, shape) in enumerate(zip(steps, MIXED_SHAPES, strict=True))]
        for _ in range(2)
    )
    for step, tensors in zip(steps, expected, strict=True):
        step_by_blocks(step, tensors, t, HYPER)
    watched = Watched(eager_of_width(groups, most_elements))
    carry_out(watched, [item_of(step, tensors, t, HYPER) for step, tensors in zip(steps, found, strict=True)])
    for ours, theirs in zip(found, expected, strict=True):
        assert_identical(ours, theirs)
    assert all(block.shape[-1] == 32 * groups for block in watched.blocks)
    longest = max(shape[-1] if len(shape) > 1 else 1 for shape in MIXED_SHAPES)
    assert max(watched.elements) <= max(most_elements, 1100, longest) + 32 * groups
    assert sum(watched.elements) >= sum(tensors[0].numel() for tensors in found)


def test_gradients_may_change_their_dtype():
    """Kernels for different dtypes may take pieces of different widths, so packs are remade."""

    def run(optimizer: FlashOptimizer, params: list[Parameter]) -> list[dict[str, Tensor]]:
        for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)):
            give_gradients(params, number)
            for p in params:
                assert p.grad is not None
                p.grad.data = p.grad.to(dtype)
            optimizer.step()
        return of_each(optimizer, params)

    shapes = [(33, 32), (7, 64), (300, 250), (48,)]
    optimizers = [FlashAdamW(parameters(shapes), eager=eager) for eager in (True, False)]
    eager, compiled = (run(each, each.param_groups[0]["params"]) for each in optimizers)
    assert_same_each(compiled, eager)


def test_a_kernel_may_be_wider_for_some_gradients_than_for_others(small_limits: None):
    def of_three_groups_but_for_fp16(step: Step, grad_dtype: torch.dtype, *_: Any) -> Any:
        return eager_of_width(1 if grad_dtype == torch.float16 else 3)(step, grad_dtype, *_)

    def run(kernels: Kernels) -> list[Tensor]:
        shapes = [(33, 32), (7, 160), (40, 75)]
        steps = [step_of(shape) for shape in shapes]
        all_tensors = [tensors_of(step, shape, 0) for step, shape in zip(steps, shapes, strict=True)]
        for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.bfloat16), start=2):
            t = torch.tensor(float(number))
            items = [
                item_of(step, [head, grad.to(dtype) * number, *rest], t, HYPER)
                for step, (head, grad, *rest) in zip(steps, all_tensors, strict=True)
            ]
            carry_out(kernels, items)
        return [tensor for tensors in all_tensors for tensor in tensors]

    assert_identical(run(of_three_groups_but_for_fp16), run(eager_of_width()))


def test_parameters_that_differ_in_lr_or_in_their_count_share_no_block():
    shape, step = (32, 64), step_of((32, 64))
    numbers = [as_numbers({"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}) for lr in (1, 2, 3)]
    ways = [(each, torch.tensor(count)) for each in numbers for count in (1.0, 2.0)]
    items = [item_of(step, tensors_of(step, shape, seed), t, each) for seed, (each, t) in enumerate(ways * 2)]
    watched = Watched(eager_of_width())
    carry_out(watched, items)
    assert watched.elements == [2 * 32 * 64] * 6
    assert list(zip(map(id, watched.numbers), watched.counts, strict=True)) == [
        (id(each), t.item()) for each, t in ways
    ]


def test_packs_have_a_bounded_size(small_limits: None):
    shapes = [(32, 32)] * 3 + [(8, 32), (48,), (48,), (640,), (64, 50)]
    steps = [step_of(shape) for shape in shapes]
    items = [
        item_of(s, tensors_of(s, shape, 0), torch.tensor(2.0), HYPER) for s, shape in zip(steps, shapes, strict=True)
    ]
    watched = Watched(eager_of_width())
    made = carry_out(watched, items)
    packs = [elements for elements, block in zip(watched.elements, watched.blocks, strict=True) if block.shape[0] == 1]
    assert max(packs) <= 1024  # the largest small parameter, packed alone
    assert sum(packs) >= sum(item.head.numel() for item in items if item.head.numel() <= 1100)
    assert made.bytes < 40_000


def test_the_memory_of_a_plan_does_not_grow_with_the_parameter():
    kept = []
    for rows in (300, 3000):
        optimizer = train(FlashAdamW(parameters([(rows, 250)]), eager=True), range(1))
        assert optimizer.plan is not None
        kept.append(optimizer.plan.bytes)
    assert 0 < kept[1] <= 2 * kept[0] + (1 << 21)


# Memory that parameters share


def test_shared_memory_is_found_by_its_extent():
    whole = torch.zeros(100, 10)
    tensors = [whole[:50], torch.zeros(5), whole[40:60], whole[60:], torch.zeros(0), whole.t()[:2, 95:]]
    assert shared_memory(tensors) == {0, 2, 3, 5}
    assert shared_memory([whole[:50], whole[50:], torch.zeros(0), torch.zeros(0)]) == set()


def tied(kind: str) -> list[Parameter]:
    """Parameters of which two share memory, with a third in between."""
    large, other = parameters([(600, 128), (40, 64)])
    small = Parameter(parameters([(32, 64)])[0].detach())
    if kind == "small and small":
        return [small, other, Parameter(small.data)]
    if kind == "large and large":
        return [large, other, Parameter(large.data)]
    if kind == "part and whole":
        return [Parameter(large.data[:16]), other, large]
    return [large, other, Parameter(large.data[:16])]


@each_way
@pytest.mark.parametrize("early", [(), (1,), (3,), (0, 3)], ids=str)
@pytest.mark.parametrize("kind", ["small and small", "large and large", "part and whole", "whole and part"])
def test_parameters_that_share_memory_are_stepped_one_after_the_other(kind: str, early: tuple[int, ...], eager: bool):
    """They are stepped in the optimizer's order, as torch.optim steps weights tied by `.data`.

    The `early` ones have already taken a step, so they get another pack. That pack may be started first, by a
    parameter that shares no memory, although it holds the second of the two tied ones.
    """
    ours, theirs = ([*parameters([(32, 32)], seed=1), *tied(kind)] for _ in range(2))
    together, apart = FlashAdamW(ours, lr=0.1, eager=eager), [FlashAdamW([p], lr=0.1, eager=True) for p in theirs]
    for number in range(3):
        for params in (ours, theirs):
            give_gradients(params, number)
            for position, p in enumerate(params):
                if number == 0 and position not in early:
                    p.grad = None
        together.step()
        for each in apart:
            each.step()
    assert_same_each(of_each(together, ours), [of_each(each, [p])[0] for each, p in zip(apart, theirs, strict=True)])


def test_warmup_compiles_what_the_step_needs_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())
    optimizer = FlashLion(params := parameters([(32, 64), (48,)]), rounding="nearest")
    before = [p.detach().clone() for p in params]
    optimizer.warmup()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("FlashLion: compiled 1 of 2, lion of weights as Split") and "8 bits" in told[0]
    assert "fp32" in told[1] and told[1].endswith(" s")
    assert not optimizer.state
    assert_identical([p.detach() for p in params], before)
    count = len(inductor._kernels)
    train(optimizer, range(1))
    assert len(inductor._kernels) == count == 2
    optimizer.warmup()
    FlashLion(params, eager=True).warmup()
    assert capsys.readouterr().err == ""
