"""Bad input is refused before anything changes, in one sentence with the argument, its value and what is allowed."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from training import ALIGNED, assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from flashopt_compile.options import check_gradient

Kind = type[FlashOptimizer]
EVERY = [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW]


def assert_one_sentence(error: BaseException, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert text.count(". ") == 0
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


# Parameters

ALLOWED = "torch.bfloat16, torch.float16, torch.float32"


def trainable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


@pytest.mark.parametrize(
    ("parameter", "parts"),
    [
        (trainable(torch.zeros(4, 4).to_sparse()), ["torch.sparse_coo", "torch.strided"]),
        (trainable(torch.zeros(4, 4, dtype=torch.complex64)), ["torch.complex64", ALLOWED]),
        (trainable(torch.zeros(4, 4, dtype=torch.float64)), ["torch.float64", ALLOWED]),
        (trainable(torch.zeros(4, 4, dtype=torch.float8_e4m3fn)), ["torch.float8_e4m3fn", ALLOWED]),
        ([1.0, 2.0], ["list", "tensors"]),
        ("weight", ["str", "tensors"]),
    ],
    ids=["sparse", "complex", "float64", "float8", "list", "str"],
)
@pytest.mark.parametrize("kind", EVERY)
def test_parameters_we_cannot_store_are_refused(kind: Kind, parameter: Any, parts: list[str]):
    for params in ([*parameters([ALIGNED]), parameter], [{"params": [*parameters([ALIGNED]), parameter]}]):
        with pytest.raises(TypeError) as caught:
            kind(params)
        assert_one_sentence(caught.value, kind.__name__, "parameter 0.1", *parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_frozen_parameters_of_any_dtype_are_left_alone(dtype: torch.dtype):
    frozen = Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    (p,) = parameters([ALIGNED])
    optimizer = train(FlashAdamW([frozen, p], eager=True), range(0))
    give_gradients([p], 0)
    optimizer.step()
    assert torch.equal(frozen.view(torch.uint8), torch.ones(4, 4).to(dtype).view(torch.uint8))
    assert not optimizer.state.get(frozen) and optimizer.state[p]["step"] == 1
    assert optimizer.memory()["parts"].keys() == {"weight", "gradient", *optimizer.state[p]}


def test_a_frozen_parameter_we_cannot_store_is_refused_once_unfrozen():
    frozen = Parameter(torch.ones(4, 4, dtype=torch.float64), requires_grad=False)
    optimizer = train(FlashAdamW([*parameters([ALIGNED]), frozen], eager=True), range(0))
    before = stored(optimizer)
    frozen.requires_grad_()
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    assert_one_sentence(caught.value, "FlashAdamW: parameter 0.1 has dtype torch.float64", ALLOWED)
    assert_identical([p.detach() for p in optimizer.param_groups[0]["params"]], before)


def test_a_bad_parameter_is_named():
    odd = trainable(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError) as caught:
        FlashAdamW([("layer.weight", parameters([ALIGNED])[0]), ("layer.odd", odd)])
    assert_one_sentence(caught.value, "parameter layer.odd has dtype torch.float64")


def test_a_bad_group_is_not_added():
    (p,) = parameters([ALIGNED])
    optimizer = train(FlashAdamW([p], eager=True), range(1))
    groups, before = copy.deepcopy(optimizer.state_dict()["param_groups"]), stored(optimizer)
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"params": [trainable(torch.zeros(3, dtype=torch.float64))]}, TypeError),
        ({"params": [p]}, ValueError),
        ({"params": parameters([ALIGNED]), "lr": -1.0}, ValueError),
        ({"params": parameters([ALIGNED]), "master_weight_bits": 16}, ValueError),
        ({"params": parameters([ALIGNED]), "amsgrad": True}, ValueError),
        ({"params": set(parameters([ALIGNED]))}, TypeError),
    ]
    for group, kind in bad:
        with pytest.raises(kind) as caught:
            optimizer.add_param_group(group)
        assert_one_sentence(caught.value, "FlashAdamW: ")
        assert optimizer.state_dict()["param_groups"] == groups
        assert_identical(stored(optimizer), before)


def test_a_parameter_given_twice_is_refused():
    p, q = parameters([ALIGNED] * 2)
    for params in ([p, q, p], [{"params": [p]}, {"params": [q, p]}]):
        with pytest.raises(ValueError, match="is given twice") as caught:
            FlashAdamW(params)
        assert_one_sentence(caught.value, "FlashAdamW: parameter ", str(ALIGNED))


def test_torchs_own_checks_still_apply():
    with pytest.raises(ValueError, match="empty parameter list"):
        FlashAdamW([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        FlashAdamW(parameters([ALIGNED])[0])
    with pytest.raises(ValueError, match="non-leaf"):
        FlashAdamW([parameters([ALIGNED])[0] * 2])


# Options

NUMBERS = [
    *[("lr", value) for value in (-1e-3, float("nan"), float("inf"), "fast", None, True, torch.tensor(-1.0))],
    *[("lr", value) for value in (torch.tensor(float("nan")), torch.tensor([0.1, 0.2]))],
    *[("weight_decay", value) for value in (-0.1, float("nan"), None)],
    *[("master_weight_bits", value) for value in (16, 0, "24", 8)],
    *[("rounding", value) for value in ("up", None, True)],
    *[
        (name, value)
        for name in ("quantize", "maximize", "decouple_lr", "check_numerics", "skip_nonfinite")
        for value in (1, None, "yes")
    ],
]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=str)
@pytest.mark.parametrize("kind", EVERY)
def test_options_out_of_range_are_refused(kind: Kind, name: str, value: Any):
    refused(kind, name, value)


def refused(kind: Kind, name: str, value: Any) -> None:
    for make in (
        lambda: kind(parameters([ALIGNED]), **{name: value}),
        lambda: kind([{"params": parameters([ALIGNED]), name: value}]),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert_one_sentence(caught.value, f"{kind.__name__}: {name} is {value!r}", "allowed")


@pytest.mark.parametrize("kind", [FlashAdam, FlashAdamW, FlashLion])
@pytest.mark.parametrize(
    "betas",
    [
        (1.0, 0.9),
        (0.9, 1.0),
        (-0.1, 0.9),
        (0.9, 1.5),
        (0.9,),
        (0.9, 0.9, 0.9),
        0.9,
        "ab",
        None,
        (),
        ("a", "b"),
        (0.9, float("nan")),
    ],
    ids=str,
)
def test_betas_outside_their_range_are_refused(kind: Kind, betas: Any):
    refused(kind, "betas", betas)


@pytest.mark.parametrize("kind", [FlashAdam, FlashAdamW])
@pytest.mark.parametrize("eps", [-1e-8, float("inf"), None])
def test_eps_below_zero_is_refused(kind: Kind, eps: Any):
    refused(kind, "eps", eps)


@pytest.mark.parametrize("kind", [FlashSGD, FlashSGDW])
@pytest.mark.parametrize(
    ("name", "value"), [("momentum", -0.9), ("momentum", None), ("dampening", "much"), ("nesterov", 1)]
)
def test_options_of_momentum_out_of_range_are_refused(kind: Kind, name: str, value: Any):
    refused(kind, name, value)


@pytest.mark.parametrize("kind", [FlashSGD, FlashSGDW])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}], ids=str)
def test_nesterov_needs_momentum_without_dampening(kind: Kind, options: dict[str, Any]):
    for make in (
        lambda: kind(parameters([ALIGNED]), nesterov=True, **options),
        lambda: kind([{"params": parameters([ALIGNED]), "nesterov": True}], **options),
    ):
        with pytest.raises(ValueError) as caught:
            make()
        assert_one_sentence(caught.value, "nesterov is True", "momentum above 0 and no dampening")


@pytest.mark.parametrize("kind", EVERY)
def test_unknown_options_are_refused_and_known_ones_listed(kind: Kind):
    with pytest.raises(TypeError) as caught:
        kind(parameters([ALIGNED]), learning_rate=0.1)
    assert_one_sentence(caught.value, f"{kind.__name__}: unknown option 'learning_rate'", "lr", "master_weight_bits")


@pytest.mark.parametrize(
    "key, meant",
    [
        *(("weigth_decay", "weight_decay"), ("master_bytewith", "master_bytewidth")),
        *(("Betas", "betas"), ("quantise", "quantize"), ("LR", "lr")),
        *(("master_weights_bits", "master_weight_bits"), ("maximise", "maximize"), ("epss", "eps")),
    ],
)
def test_a_misspelt_key_of_a_group_is_refused_with_what_is_meant(key: str, meant: str):
    optimizer = FlashAdamW(parameters([ALIGNED]), eager=True)
    group = {"params": parameters([ALIGNED], seed=1), key: 1}
    with pytest.raises(TypeError) as caught:
        optimizer.add_param_group(group)
    assert str(caught.value) == f"FlashAdamW: unknown option {key!r} in a parameter group; did you mean {meant!r}?"
    assert len(optimizer.param_groups) == 1


def test_keys_of_the_users_own_and_of_schedulers_are_kept():
    own = {
        "name": "head",
        "lr_scale": 0.5,
        "layer": 3,
        "max_lr": 1.0,
        "max_momentum": 0.9,
        "swa_lr": 0.1,
        "initial_lr": 1,
    }
    optimizer = FlashSGD([{"params": parameters([ALIGNED]), **own}], momentum=0.9, eager=True)
    assert optimizer.param_groups[0].items() >= own.items()


@pytest.mark.parametrize("width, bits", [(0, None), (3, 24), (4, 32)])
def test_the_published_key_of_a_group_is_translated(width: int, bits: int | None):
    groups = [{"params": parameters([ALIGNED]), "master_bytewidth": width}, {"params": parameters([ALIGNED], seed=1)}]
    optimizer = train(FlashAdamW(groups, eager=True), range(1))
    assert [group["master_weight_bits"] for group in optimizer.param_groups] == [bits, 24]
    assert all("master_bytewidth" not in group for group in optimizer.param_groups)
    for change, sentence in (({"master_bytewidth": 2}, "allowed are 0, 3 and 4"), ({"master_weight_bits": 24}, "both")):
        with pytest.raises(ValueError, match=f"FlashAdamW: master_bytewidth .*{sentence}"):
            FlashAdamW([{"params": parameters([ALIGNED]), "master_bytewidth": width, **change}])


def test_options_of_another_optimizer_are_unknown():
    cases: list[tuple[Kind, dict[str, Any]]] = [
        (FlashAdamW, {"momentum": 0.9}),
        (FlashSGD, {"betas": (0.9, 0.99)}),
        (FlashLion, {"eps": 1e-8}),
    ]
    for kind, option in cases:
        with pytest.raises(TypeError, match=f"unknown option '{next(iter(option))}'"):
            kind(parameters([ALIGNED]), **option)


def test_duplicate_or_too_many_arguments_are_refused():
    with pytest.raises(TypeError) as caught:
        FlashAdamW(parameters([ALIGNED]), 0.1, lr=0.2)
    assert_one_sentence(caught.value, "FlashAdamW: lr is given twice")
    with pytest.raises(TypeError) as caught:
        FlashLion(parameters([ALIGNED]), 0.1, (0.9, 0.99), 0.1, True)
    assert_one_sentence(caught.value, "FlashLion takes at most 3 positional arguments")


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
@pytest.mark.parametrize("kind", EVERY)
def test_torch_options_that_we_lack_are_refused(kind: Kind, option: str):
    with pytest.raises(ValueError) as caught:
        kind(parameters([ALIGNED]), **{option: True})
    assert_one_sentence(caught.value, f"{kind.__name__}: {option} is True; supported is False")
    kind(parameters([ALIGNED]), **{option: False})


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, True, False])
def test_foreach_and_fused_are_accepted_and_kept(option: str, value: Any):
    optimizer = FlashAdamW(parameters([ALIGNED]), **{option: value})
    assert optimizer.param_groups[0][option] is value


# Gradients


def test_gradients_that_torch_itself_refuses():
    (p,) = parameters([ALIGNED])
    with pytest.raises(RuntimeError):
        p.grad = torch.zeros(3, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        p.grad = torch.zeros(ALIGNED, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("grad", "kind", "parts"),
    [
        (torch.zeros(3, 3), ValueError, ["shape (3, 3) on cpu", f"{ALIGNED} on cpu"]),
        (torch.zeros(ALIGNED, device="meta"), ValueError, ["on meta", f"{ALIGNED} on cpu"]),
        (torch.zeros(ALIGNED).to_sparse(), TypeError, ["torch.sparse_coo", "torch.strided"]),
        (torch.zeros(ALIGNED, dtype=torch.float64), TypeError, ["torch.float64", "torch.bfloat16"]),
        (torch.zeros(ALIGNED, dtype=torch.complex64), TypeError, ["torch.complex64", "torch.bfloat16"]),
    ],
    ids=["shape", "device", "sparse", "float64", "complex"],
)
def test_gradients_that_do_not_fit_are_refused(grad: torch.Tensor, kind: type[Exception], parts: list[str]):
    class Parameter:
        """A parameter that changed after it took its gradient. torch would refuse to set this gradient."""

        shape, device = torch.Size(ALIGNED), torch.device("cpu")

    Parameter.grad = grad  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(kind) as caught:
        check_gradient("FlashAdamW", "layer.weight", Parameter)  # pyright: ignore[reportArgumentType]
    assert_one_sentence(caught.value, "FlashAdamW: the gradient of layer.weight", *parts)


def test_a_gradient_of_another_shape_stops_the_step_before_it_starts():
    good, bad = parameters([ALIGNED] * 2)
    optimizer = train(FlashAdamW([good, bad], eager=True), range(1))
    give_gradients([good, bad], 1)
    bad.data = torch.zeros(8, 8, dtype=torch.bfloat16)  # torch does not check the gradient again
    before = stored(optimizer)
    with pytest.raises(ValueError, match=r"gradient of 0\.1 has shape \(40, 64\)"):
        optimizer.step()
    assert_identical(stored(optimizer), before)


def test_a_sparse_gradient_stops_the_step_before_it_starts():
    embedding = torch.nn.Embedding(40, 64, sparse=True)
    (dense,) = parameters([ALIGNED], torch.float32)
    optimizer = FlashAdamW([dense, embedding.weight], eager=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    give_gradients([dense], 0)
    before = dense.detach().clone()
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    assert_one_sentence(
        caught.value, "FlashAdamW: the gradient of 0.1 has layout torch.sparse_coo; allowed is torch.strided"
    )
    assert torch.equal(dense, before)
    assert optimizer.state[dense]["step"] == 0


# Options changed later


@pytest.mark.parametrize(
    ("kind", "start", "change"),
    [
        (FlashSGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (FlashSGD, {"momentum": 0.0}, {"momentum": 0.9}),
        (FlashAdamW, {}, {"quantize": False}),
        (FlashAdamW, {}, {"master_weight_bits": 32}),
        (FlashAdamW, {}, {"master_weight_bits": None}),
    ],
    ids=str,
)
def test_options_that_change_storage_are_refused_after_the_first_step(
    kind: Kind, start: dict[str, Any], change: dict[str, Any]
):
    (p,) = parameters([ALIGNED])
    optimizer = train(kind([p], **start, eager=True), range(1))
    optimizer.param_groups[0].update(change)
    before = stored(optimizer)
    with pytest.raises(ValueError) as caught:
        train(optimizer, range(1, 2))
    assert_one_sentence(caught.value, kind.__name__, "parameter 0.0", "must not change after the first step")
    assert_identical(stored(optimizer), before)


def test_a_parameter_cast_during_a_run_is_refused():
    model = torch.nn.Linear(64, 40).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), eager=True)
    train(optimizer, range(1))
    model.to(torch.float32)
    before = stored(optimizer)
    with pytest.raises(TypeError, match=r"was torch\.bfloat16 when its state was made and is torch\.float32 now"):
        train(optimizer, range(1, 2))
    assert_identical(stored(optimizer), before)


def test_skip_nonfinite_in_a_traced_step_is_refused_with_a_reason():
    optimizer = FlashAdamW(parameters([ALIGNED]), skip_nonfinite=True, eager=True)
    give_gradients(optimizer.param_groups[0]["params"], 0)
    with pytest.raises(Exception, match="skip_nonfinite=True decides on the gradients' values"):
        torch.compile(optimizer.step, fullgraph=True, backend="eager")()


def test_parameters_are_left_alone_by_a_failed_constructor():
    p = Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError):
        FlashAdamW([p], lr=-1.0)
    assert p.requires_grad
    assert torch.equal(p, torch.ones(4, 4))


@pytest.mark.parametrize("kind", [FlashAdam, FlashSGD])
def test_decouple_lr_is_refused_where_weight_decay_is_a_penalty(kind: Kind):
    with pytest.raises(ValueError) as refused:
        kind(parameters([ALIGNED]), decouple_lr=True)
    assert_one_sentence(refused.value, "decouple_lr is True", "allowed is False")
