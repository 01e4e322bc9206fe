"""We step whatever torch.optim steps, or refuse it in one sentence before anything changes."""

# pyright: reportPrivateImportUsage=false

import copy
from collections.abc import Callable
from typing import Any

import fresh
import numpy
import pytest
import torch
import torch.distributed as distributed
from test_bad_input import assert_one_sentence
from torch import Tensor, nn
from torch.nn import Parameter
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW

EVERY = [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW]
SMALL, LARGE, RAGGED = (64, 64), (512, 160), (300, 250)
BOTH = pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])


# Weights tied by `.data`


def same_memory(p: Parameter) -> Tensor:
    return p.data


def first_half(p: Parameter) -> Tensor:
    return p.data[: len(p) // 2]


def transposed(p: Parameter) -> Tensor:
    return p.data.t()


@BOTH
@pytest.mark.parametrize("tie", [same_memory, first_half, transposed])
@pytest.mark.parametrize("shape", [SMALL, LARGE, RAGGED], ids=["small", "large", "ragged"])
def test_weights_tied_by_data_get_every_update(shape: tuple[int, ...], tie: Callable[..., Tensor], eager: bool):
    """Tied weights are stepped one after the other, even with another parameter in between."""

    def tied() -> list[Parameter]:
        first, between, last = parameters([shape, SMALL, shape])
        last.data = tie(first)
        return [first, between, last]

    together, apart = tied(), tied()
    one = FlashAdamW(together, lr=1e-2, eager=eager)
    several = [FlashAdamW([p], lr=1e-2, eager=True) for p in apart]
    for number in range(4):
        for params in (together, apart):
            give_gradients(params, number)
        one.step()
        for optimizer in several:
            optimizer.step()
    assert_identical(stored(one), [tensor for optimizer in several for tensor in stored(optimizer)])


def test_tied_weights_learn_as_with_torch():
    """Two layers that share memory have nearly the losses of torch.optim.AdamW."""

    def losses(make: Callable[..., torch.optim.Optimizer]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        first, second = model.parameters()
        second.data = first.data
        x, found = torch.randn(32, 64), []
        optimizer = make(model.parameters(), lr=1e-2)
        for _ in range(8):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours, theirs = losses(FlashAdamW), losses(torch.optim.AdamW)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.01, (ours, theirs)


# Gradients set by hand


@BOTH
@pytest.mark.parametrize("shape", [SMALL, LARGE, RAGGED], ids=["small", "large", "ragged"])
def test_a_parameter_with_a_gradient_is_stepped_even_if_frozen(shape: tuple[int, ...], eager: bool):
    def course(is_required: bool) -> list[Tensor]:
        params = [p.requires_grad_(is_required) for p in parameters([shape, SMALL])]
        return stored(train(FlashAdamW(params, eager=eager), range(3)))

    assert_identical(course(False), course(True))


@BOTH
@pytest.mark.parametrize("shape", [SMALL, LARGE, RAGGED, (300, 300)], ids=str)
@pytest.mark.parametrize("share", [lambda p: p.detach(), lambda p: p.detach().t()], ids=["itself", "transposed"])
def test_a_gradient_in_the_weights_own_memory_works_like_a_copy(
    shape: tuple[int, ...], share: Callable[..., Tensor], eager: bool
):
    def course(copy: bool) -> list[Tensor]:
        (p,) = parameters([shape])
        optimizer = FlashAdamW([p], lr=1e-2, eager=eager)
        for _ in range(3):
            grad = share(p)
            if grad.shape != p.shape:
                pytest.skip("not a square")
            p.grad = grad.clone() if copy else grad
            optimizer.step()
        return stored(optimizer)

    assert_identical(course(False), course(True))


# Dtypes


@pytest.mark.parametrize(
    ("old", "new", "master_weight_bits", "eager"),
    [
        *(("bfloat16", "float16", bits, True) for bits in (24, 32)),
        *(("float16", "bfloat16", bits, True) for bits in (24, 32)),
        ("bfloat16", "float16", 24, False),
    ],
)
def test_a_model_cast_after_its_first_step_is_refused(old: str, new: str, master_weight_bits: int, eager: bool):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(300, 250)).to(getattr(torch, old))
    optimizer = FlashAdamW(model.parameters(), eager=eager, master_weight_bits=master_weight_bits)
    train(optimizer, range(2))
    optimizer.zero_grad()
    model.to(getattr(torch, new))
    give_gradients(list(model.parameters()), 2)
    before = stored(optimizer)
    with pytest.raises((TypeError, ValueError)) as caught:
        optimizer.step()
    assert_one_sentence(caught.value, "FlashAdamW", f"torch.{old}", f"torch.{new}")
    assert_identical(stored(optimizer), before)
    optimizer.zero_grad()
    model.to(getattr(torch, old))
    train(optimizer, range(2, 3))


FROZEN = [torch.uint8, torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("kind", "dtype", "eager"),
    [
        *((FlashAdamW, dtype, eager) for dtype in FROZEN for eager in (True, False)),
        *((kind, torch.uint8, True) for kind in EVERY if kind is not FlashAdamW),
    ],
    ids=str,
)
def test_frozen_parameters_of_any_dtype_are_never_touched(kind: type[FlashOptimizer], dtype: torch.dtype, eager: bool):
    frozen = Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
    (p,) = parameters([SMALL])
    optimizer = kind([frozen, p], eager=eager)
    optimizer.add_param_group({"params": [(other := Parameter(frozen.clone(), requires_grad=False))]})
    for number in range(3):
        give_gradients([p], number)
        optimizer.step()
    assert not optimizer.state.get(frozen) and not optimizer.state.get(other)
    assert torch.equal(frozen.to(torch.complex128), torch.ones(64, 64, dtype=torch.complex128))
    alone = kind(again := parameters([SMALL]), eager=True)
    for number in range(3):
        give_gradients(again, number)
        alone.step()
    assert_identical([p.detach()], [again[0].detach()])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.memory()
    optimizer.health()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_a_frozen_parameter_we_cannot_store_is_refused_once_it_gets_a_gradient(dtype: torch.dtype):
    frozen = Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
    (p,) = parameters([SMALL])
    optimizer = FlashAdamW([p, frozen], eager=True)
    give_gradients([p], 0)
    optimizer.step()
    before = stored(optimizer)
    frozen.requires_grad_()
    frozen.grad = torch.ones_like(frozen)
    give_gradients([p], 1)
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    assert_one_sentence(caught.value, "FlashAdamW", "0.1", str(dtype), "torch.bfloat16")
    assert_identical(stored(optimizer), before)


# Numbers


def with_numpy(make: Callable[[float], Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An option with numpy numbers, and the same option with Python numbers."""
    values = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    value = values[name]
    theirs = tuple(map(make, value)) if isinstance(value, tuple) else make(value)
    plain = tuple(map(float, theirs)) if isinstance(theirs, tuple) else float(theirs)
    return {name: theirs}, {name: plain}


NUMPY = {
    "float16": numpy.float16,
    "float32": numpy.float32,
    "float64": numpy.float64,
    "0-d float32 array": lambda value: numpy.array(value, dtype=numpy.float32),
    "0-d float64 array": lambda value: numpy.array(value),
}


@BOTH
@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
@pytest.mark.parametrize("kind", NUMPY)
def test_numpy_numbers_are_accepted(kind: str, name: str, eager: bool):
    theirs, plain = with_numpy(NUMPY[kind], name)
    shapes = [SMALL, LARGE]
    expected = stored(train(FlashAdamW(parameters(shapes), eager=eager, **plain), range(3)))
    given = FlashAdamW(parameters(shapes), eager=eager, **theirs)
    assert_identical(stored(train(given, range(3))), expected)

    def set_later(option: dict[str, Any]) -> list[Tensor]:
        optimizer = train(FlashAdamW(parameters(shapes), eager=eager), range(2))
        optimizer.param_groups[0].update(option)
        return stored(train(optimizer, range(2, 4)))

    assert_identical(set_later(theirs), set_later(plain))


def test_numpy_integers_are_accepted():
    given = FlashAdamW(parameters([SMALL]), lr=numpy.int64(1), eager=True)
    assert_identical(
        stored(train(given, range(2))), stored(train(FlashAdamW(parameters([SMALL]), lr=1.0, eager=True), range(2)))
    )


@pytest.mark.parametrize(
    "value", [numpy.float64("nan"), numpy.array(-1.0), numpy.ones(2), numpy.array("fast")], ids=repr
)
def test_numpy_numbers_out_of_range_are_refused(value: Any):
    with pytest.raises(ValueError) as caught:
        FlashAdamW(parameters([SMALL]), lr=value)
    assert_one_sentence(caught.value, "FlashAdamW: lr is ")


@BOTH
@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay"])
def test_an_array_changed_in_place_is_noticed(name: str, eager: bool):
    array = numpy.array(0.5)
    (p,) = parameters([LARGE])
    value = (array, 0.9) if name == "betas" else array
    optimizer = train(FlashAdamW([p], lr=0.01, eager=eager), range(1))
    optimizer.param_groups[0][name] = value
    other = train(FlashAdamW(parameters([LARGE]), lr=0.01, eager=eager), range(1))
    for step, number in enumerate((0.5, 0.25, 0.125), start=1):
        array[...] = number
        other.param_groups[0][name] = (number, 0.9) if name == "betas" else number
        train(optimizer, range(step, step + 1))
        train(other, range(step, step + 1))
        assert_identical(stored(optimizer), stored(other))


@pytest.mark.parametrize("value", ["yes", 1, None, 0.0], ids=repr)
def test_eager_must_be_true_or_false(value: Any):
    with pytest.raises(ValueError) as caught:
        FlashAdamW(parameters([SMALL]), eager=value)
    assert_one_sentence(caught.value, f"FlashAdamW: eager is {value!r}", "True or False")


LATER = [("lr", [0.001]), ("lr", "fast"), ("lr", None), ("betas", 0.9), ("betas", (0.9,)), ("weight_decay", [0.1])]


@BOTH
@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize(("name", "value"), LATER, ids=str)
def test_a_later_option_that_is_not_a_number_is_refused(name: str, value: Any, steps: int, eager: bool):
    params = parameters([SMALL, LARGE])
    optimizer = train(FlashAdamW(params, eager=eager), range(steps))
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    give_gradients(params, steps)
    before = [p.detach().clone() for p in params]
    counts = [float(optimizer.state.get(p, {}).get("step", 0.0)) for p in params]
    with pytest.raises((TypeError, ValueError)) as caught:
        optimizer.step()
    assert_one_sentence(caught.value, "FlashAdamW", f"{name} is {value!r}")
    assert_identical([p.detach() for p in params], before)
    assert [float(optimizer.state.get(p, {}).get("step", 0.0)) for p in params] == counts
    optimizer.param_groups[0][name] = good
    optimizer.step()
    expected = stored(train(FlashAdamW(parameters([SMALL, LARGE]), eager=True), range(steps + 1)))
    assert_identical(stored(optimizer), expected)


# FSDP1


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool, tmp_path: Any):
    fresh.run(wrap_in_fsdp1, use_orig_params, str(tmp_path / "store"))


def wrap_in_fsdp1(use_orig_params: bool, store: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        with pytest.raises((TypeError, ValueError)) as caught:
            FlashAdamW(wrapped.parameters(), eager=True)
        assert_one_sentence(caught.value, "FlashAdamW", "FSDP2")
    finally:
        distributed.destroy_process_group()


# Tools that read options of torch.optim, and swap parameters


@pytest.mark.parametrize("kind", [FlashAdam, FlashAdamW, FlashSGD], ids=lambda kind: kind.__name__)
def test_defaults_and_groups_have_the_options_of_the_namesake(kind: type[FlashOptimizer]):
    theirs = kind.namesake(parameters([SMALL])).defaults  # pyright: ignore[reportOptionalCall]
    ours = kind(parameters([SMALL]), fused=True)
    for name in {"foreach", "capturable", "differentiable", "amsgrad"} & set(theirs):
        assert ours.defaults[name] is ours.param_groups[0][name] is theirs[name]
    assert ours.defaults["fused"] is ours.param_groups[0]["fused"] is True


def test_an_optimizer_pickled_without_the_options_of_torch_gets_them():
    optimizer = FlashAdamW(parameters([SMALL]))
    for name in FlashAdamW.implementation:
        del optimizer.param_groups[0][name]
    assert copy.deepcopy(optimizer).param_groups[0].items() >= FlashAdamW.implementation.items()


@BOTH
@pytest.mark.parametrize("shape", [SMALL, LARGE, RAGGED], ids=["small", "large", "ragged"])
def test_a_parameter_may_be_swapped_for_another_tensor(shape: tuple[int, ...], eager: bool):
    """torch.utils.swap_tensors refuses tensors that others hold; the optimizer must not be among these."""

    def course(replace: Callable[[Parameter, Parameter], None]) -> list[Tensor]:
        p, new = parameters([shape, shape])
        optimizer = train(FlashAdamW([p], eager=eager), range(2))
        replace(p, new)
        return stored(train(optimizer, range(2, 4)))

    assert_identical(
        course(torch.utils.swap_tensors), course(lambda p, new: setattr(p, "data", p.data.copy_(new.data)))
    )
