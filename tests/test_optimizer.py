"""The optimizers behave like torch.optim's: arguments, parameter groups, schedulers, copies, shapes and layouts."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR
from training import ALIGNED, SHAPES, assert_identical, give_gradients, held, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW, rule
from quant import Raw

EVERY = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
NAMESAKES = [row for row in TABLE if row.namesake]


def made(row: Row, params: Any, **options: Any) -> FlashOptimizer:
    return row.optimizer(params, **{**row.options, **options}, eager=True)


# torch.optim's mathematics


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("row", NAMESAKES, ids=lambda row: row.name)
def test_an_fp32_model_with_exact_states_trains_as_with_the_namesake(row: Row, maximize: bool):
    assert row.namesake is not None
    ours, theirs = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    one = made(row, ours, quantize=False, maximize=maximize)
    other = row.namesake(theirs, **row.options, maximize=maximize)  # pyright: ignore[reportCallIssue]
    for step in range(20):
        for params, optimizer in ((ours, one), (theirs, other)):
            give_gradients(params, step)
            optimizer.step()
    for mine, reference in zip(ours, theirs, strict=True):
        scale = reference.detach().abs().max().item()
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("row", NAMESAKES, ids=lambda row: row.name)
def test_arguments_and_defaults_match_the_namesake(row: Row):
    assert row.namesake is not None
    theirs = inspect.signature(row.namesake).parameters
    ours = inspect.signature(row.optimizer).parameters
    for name in row.optimizer.hyper:
        assert ours[name].default == theirs[name].default, name
    in_order = [
        name for name in theirs if name in ours and theirs[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert [name for name in ours if name in in_order] == in_order
    for name in theirs.keys() - {"params"}:  # each is accepted with its default
        row.optimizer(parameters(), **{name: theirs[name].default})


def test_positional_arguments_are_taken_in_the_namesakes_order():
    adamw = FlashAdamW(parameters(), 1e-2, (0.8, 0.9), 1e-6, 0.3).param_groups[0]
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (1e-2, (0.8, 0.9), 1e-6, 0.3)
    sgd = FlashSGD(parameters(), 0.1, 0.9, 0.0, 1e-4, True).param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["dampening"]) == (0.1, 0.9, 0.0)
    assert (sgd["weight_decay"], sgd["nesterov"]) == (1e-4, True)


def test_maximize_steps_the_other_way():
    up, down = (made(TABLE[0], parameters(), maximize=flag, weight_decay=0.0) for flag in (True, False))
    for optimizer in (up, down):
        train(optimizer, range(1))
    start = parameters()
    for one, other, origin in zip(up.param_groups[0]["params"], down.param_groups[0]["params"], start, strict=True):
        moved = held(up, one)["w"] - origin.double()
        torch.testing.assert_close(moved, origin.double() - held(down, other)["w"], rtol=1e-2, atol=5e-5)


def test_decouple_lr_scales_the_decay_by_the_schedule_alone():
    (p,) = parameters([ALIGNED], torch.float32)
    start = p.detach().clone()
    optimizer = FlashAdamW([p], lr=0.1, weight_decay=0.01, decouple_lr=True, eager=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), start * 0.99)
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()
    torch.testing.assert_close(p.detach(), start * 0.99 * 0.995)


# What a step does and does not do


@EVERY
def test_a_step_with_lr_zero_moves_no_weight(row: Row):
    optimizer = train(made(row, parameters()), range(3))
    before = [held(optimizer, p)["w"] for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, range(3, 6))
    assert_identical([held(optimizer, p)["w"] for p in optimizer.param_groups[0]["params"]], before)


@EVERY
def test_zero_gradients_and_fresh_states_change_nothing(row: Row):
    params = parameters()
    optimizer = made(row, params, weight_decay=0.0)
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, original in zip(params, parameters(), strict=True):
        assert_identical([parameter.detach()], [original.detach()])
        assert all(not value.any() for key, value in optimizer.state[parameter].items() if key != "step")


@EVERY
def test_lr_zero_and_zero_gradients_make_states_and_change_nothing(row: Row):
    """torch.distributed.checkpoint initializes optimizers so, with any weight decay."""
    params = parameters()
    optimizer = made(row, params, lr=0.0)
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert_identical([p.detach() for p in params], [p.detach() for p in parameters()])


def test_state_exists_for_every_trained_parameter_from_the_first_step():
    with_grad, without, frozen = parameters([ALIGNED] * 3)
    frozen.requires_grad_(False)
    optimizer = FlashAdamW([with_grad, without, frozen], eager=True)
    with_grad.grad = torch.ones_like(with_grad)
    optimizer.step()
    assert optimizer.state.keys() == {with_grad, without}
    assert optimizer.state[with_grad].keys() == optimizer.state[without].keys()
    assert optimizer.state[with_grad]["step"] == 1
    assert optimizer.state[without]["step"] == 0
    _, original, cold = parameters([ALIGNED] * 3)
    assert torch.equal(without, original)
    assert torch.equal(frozen, cold)


def test_a_parameter_starts_counting_when_its_first_gradient_comes():
    early, late = parameters([ALIGNED, ALIGNED])
    optimizer = FlashSGD([early, late], lr=0.1, momentum=0.9, dampening=0.9, quantize=False, eager=True)
    give_gradients([early], 0)
    optimizer.step()
    give_gradients([early, late], 1)
    optimizer.step()
    assert late.grad is not None
    torch.testing.assert_close(optimizer.state[late]["m"], late.grad.float())  # undamped, as it is the first


def test_closure_is_evaluated_with_gradients_before_the_step():
    (p,) = parameters([ALIGNED])
    optimizer = FlashAdamW([p], eager=True)
    before = p.detach().clone()

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        assert torch.equal(p, before)
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx((before.float() ** 2).sum().item(), rel=1e-6)
    assert not torch.equal(p, before)


def test_step_without_closure_returns_none_and_keeps_gradients():
    (p,) = parameters([ALIGNED])
    optimizer = FlashAdamW([p], eager=True)
    give_gradients([p], 0)
    assert p.grad is not None
    grad = p.grad.clone()
    assert optimizer.step() is None
    assert torch.equal(p.grad, grad)
    optimizer.zero_grad(set_to_none=False)
    assert not p.grad.any()
    optimizer.zero_grad()
    assert p.grad is None


def test_hooks_run():
    optimizer = FlashAdamW(parameters(), eager=True)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, range(1))
    assert calls == ["before", "after"]


# Parameter groups


def test_options_of_each_group_are_honoured():
    params = parameters([ALIGNED] * 6)
    options: list[dict[str, Any]] = [
        {},
        {"master_weight_bits": 32},
        {"master_weight_bits": None},
        {"quantize": False},
        {"rounding": "nearest"},
        {"lr": 0.5},
    ]
    groups = [{"params": [p], **option} for p, option in zip(params, options, strict=True)]
    together = FlashAdamW(groups, lr=0.01, eager=True)
    train(together, range(3))
    assert [together.state[p]["tail"].dtype if "tail" in together.state[p] else None for p in params] == [
        torch.int8,
        torch.int16,
        None,
        *[torch.int8] * 3,
    ]
    assert "m" in together.state[params[3]]

    for number, option in enumerate(options):
        alone = parameters([ALIGNED] * 6)[number]
        optimizer = FlashAdamW([alone], **{"lr": 0.01, **option}, eager=True)
        for step in range(3):
            others = parameters([ALIGNED] * 6)
            give_gradients(others, step)
            alone.grad = others[number].grad
            optimizer.step()
        assert_identical([alone.detach()], [params[number].detach()])


def test_nesterov_of_each_group_is_honoured():
    plain, nesterov = (parameters([ALIGNED])[0] for _ in range(2))
    groups = [{"params": [plain]}, {"params": [nesterov], "nesterov": True}]
    optimizer = FlashSGD(groups, lr=0.1, momentum=0.9, quantize=False, eager=True)
    plain.grad = nesterov.grad = torch.ones(ALIGNED, dtype=torch.bfloat16)
    start = plain.detach().double()
    optimizer.step()
    torch.testing.assert_close(
        start - held(optimizer, plain)["w"], torch.full(ALIGNED, 0.1).double(), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        start - held(optimizer, nesterov)["w"], torch.full(ALIGNED, 0.19).double(), rtol=1e-3, atol=0
    )


def test_added_group_trains_and_takes_defaults():
    first, second = parameters([ALIGNED, ALIGNED])
    optimizer = FlashAdamW([first], lr=0.1, eager=True)
    train(optimizer, range(2))
    given = {"params": second, "weight_decay": 0.5}
    optimizer.add_param_group(given)
    assert given.keys() == {"params", "weight_decay"}  # the caller's dict is unchanged
    assert optimizer.param_groups[1]["lr"] == 0.1
    assert optimizer.param_groups[1]["rounding"] == "dither"
    train(optimizer, range(2, 3))
    assert optimizer.state[first]["step"] == 3
    assert optimizer.state[second]["step"] == 1


def test_named_parameters_keep_their_names():
    model = nn.Linear(64, 40).to(torch.bfloat16)
    optimizer = FlashAdamW(model.named_parameters(), eager=True)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, range(1))
    assert optimizer.memory()["parameters"].keys() == {"weight", "bias"}


def test_mixed_dtypes_train_side_by_side_as_alone():
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    together = [parameters([ALIGNED], dtype, seed=3)[0] for dtype in dtypes]
    train(FlashAdamW(together, eager=True), range(3))
    for number, dtype in enumerate(dtypes):
        alone = [parameters([ALIGNED], each, seed=3)[0] for each in dtypes]
        optimizer = FlashAdamW([alone[number]], eager=True)
        for step in range(3):
            give_gradients(alone, step)
            optimizer.step()
        assert alone[number].dtype == dtype
        assert torch.equal(alone[number], together[number])


# Schedules


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LinearLR(optimizer, 0.1, total_iters=5),
        lambda optimizer: CosineAnnealingLR(optimizer, 10),
        lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=12, cycle_momentum=True),
    ],
    ids=["linear", "cosine", "lambda", "one cycle"],
)
@pytest.mark.parametrize("row", [TABLE[0], TABLE[4]], ids=lambda row: row.name)
def test_schedulers_work_as_with_the_namesake(row: Row, schedule: Any):
    assert row.namesake is not None
    ours, theirs = parameters([ALIGNED], torch.float32), parameters([ALIGNED], torch.float32)
    one, other = made(row, ours, quantize=False), row.namesake(theirs, **row.options)  # pyright: ignore[reportCallIssue]
    for params, optimizer in ((ours, one), (theirs, other)):
        scheduler = schedule(optimizer)
        for step in range(10):
            give_gradients(params, step)
            optimizer.step()
            scheduler.step()
    numbers = ("lr", "betas", "momentum")
    for name in numbers:
        assert one.param_groups[0].get(name) == other.param_groups[0].get(name)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-6, atol=2e-6)


def test_one_cycle_moves_lions_betas():
    optimizer = FlashLion(parameters([ALIGNED]), eager=True)
    scheduler = OneCycleLR(optimizer, 1e-3, total_steps=10, cycle_momentum=True)
    seen = set()
    for step in range(9):
        train(optimizer, range(step, step + 1))
        scheduler.step()
        seen.add(optimizer.param_groups[0]["betas"])
    assert len(seen) > 4


@EVERY
def test_lr_may_be_a_tensor(row: Row):
    lr = row.options["lr"]
    given = [lr, torch.tensor(lr), torch.tensor([lr]), torch.tensor(lr, dtype=torch.float64)]
    results = [stored(train(made(row, parameters(), lr=each), range(2))) for each in given]
    for other in results[1:]:
        assert_identical(other, results[0])


def test_a_tensor_lr_changed_in_place_is_followed():
    lr = torch.tensor(0.1)
    optimizer = FlashSGD(parameters([ALIGNED], torch.float32), lr=lr, eager=True)
    lr.fill_(0.0)
    train(optimizer, range(1))
    assert torch.equal(optimizer.param_groups[0]["params"][0], parameters([ALIGNED], torch.float32)[0])


# Copies


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"]
)
@EVERY
def test_a_copy_continues_bit_for_bit_and_independently(row: Row, copied: Any):
    params = [p for dtype in (torch.bfloat16, torch.float16, torch.float32) for p in parameters(SHAPES, dtype)]
    optimizer = train(made(row, params), range(3))
    twin = copied(optimizer)
    assert type(twin) is type(optimizer)
    assert twin.eager is True
    before = stored(optimizer)
    train(twin, range(3, 6))
    assert_identical(stored(optimizer), before)
    train(optimizer, range(3, 6))
    assert_identical(stored(optimizer), stored(twin))


def test_a_copied_model_and_optimizer_stay_together():
    model = nn.Linear(64, 40).to(torch.bfloat16)
    optimizer = train(FlashAdamW(model.parameters(), eager=True), range(2))
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    assert optimizer2.param_groups[0]["params"][0] is model2.weight
    assert model2.weight in optimizer2.state


def test_repr_names_class_and_options():
    text = repr(FlashAdamW(parameters(), lr=0.25))
    assert text.startswith("FlashAdamW")
    for line in ("lr: 0.25", "master_weight_bits: 24", "rounding: dither", "quantize: True"):
        assert line in text


# Shapes and layouts


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (0,),
        (1,),
        (5,),
        (0, 32),
        (32, 0),
        (1, 1),
        (1, 2048),
        (1, 2049),
        (2048, 1),
        (3, 700),
        (64, 33),
        (16, 8, 3, 3),
        (2, 3, 5, 7, 11),
    ],
    ids=str,
)
@EVERY
def test_any_shape_trains_near_the_oracle(row: Row, shape: tuple[int, ...]):
    params = parameters([shape], torch.float32)
    exact = params[0].detach().double()
    state = {name: torch.zeros_like(exact) for name in ("m", "v")}
    optimizer = made(row, params)
    for t in range(1, 4):
        give_gradients(params, t)
        optimizer.step()
        assert params[0].grad is not None
        exact = row.oracle(exact, params[0].grad.double(), state, t, **row.hyper())
    assert params[0].shape == shape
    if exact.numel():
        moved, expected = (
            params[0].detach().double() - parameters([shape], torch.float32)[0].double(),
            exact - parameters([shape], torch.float32)[0].double(),
        )
        assert (moved - expected).norm() <= 0.05 * expected.norm()


def layouts() -> dict[str, Any]:
    return {
        "transposed": lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
        "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
        "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    }


@pytest.mark.parametrize("of", ["parameter", "gradient", "both"])
@pytest.mark.parametrize("layout", layouts())
def test_layout_changes_no_bit(layout: str, of: str):
    lay = layouts()[layout]
    shapes = [ALIGNED, (33, 50), (16, 8, 3, 3), (8, 32, 5, 5), (9,)]
    plain = parameters(shapes)
    laid = [Parameter(p.detach().clone() if of == "gradient" else lay(p.detach().clone())) for p in plain]
    strides = [p.stride() for p in laid]
    one, other = FlashAdamW(plain, eager=True), FlashAdamW(laid, eager=True)
    for step in range(3):
        give_gradients(plain, step)
        one.step()
        for mine, theirs in zip(laid, plain, strict=True):
            assert theirs.grad is not None
            mine.grad = lay(theirs.grad) if of != "parameter" else theirs.grad.clone()
        other.step()
    assert [p.stride() for p in laid] == strides
    assert_identical(stored(other), stored(one))


def test_expanded_gradients_are_read_as_they_are():
    (p,), (q,) = parameters([ALIGNED]), parameters([ALIGNED])
    one, other = FlashAdamW([p], eager=True), FlashAdamW([q], eager=True)
    p.grad = torch.ones((), dtype=torch.bfloat16).expand(ALIGNED)
    q.grad = torch.ones(ALIGNED, dtype=torch.bfloat16)
    one.step()
    other.step()
    assert_identical(stored(one), stored(other))
    assert p.grad.stride() == (0, 0)


def test_fp32_gradients_of_16_bit_parameters_keep_their_precision():
    (p,) = parameters([ALIGNED])
    p.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    p.grad = torch.full(ALIGNED, 1 + 2.0**-12)
    optimizer = FlashSGD([p], lr=1.0, momentum=0.9, quantize=False, eager=True)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["m"], p.grad)


# Custom optimizers


def test_a_custom_rule_makes_an_optimizer():
    @rule(m=Raw())
    def signed_momentum(w, g, m, t, *, lr=1e-2, momentum=0.9):
        m = momentum * m + g
        return w - lr * m.sign(), m

    class SignMomentum(FlashOptimizer, rule=signed_momentum):
        pass

    params = parameters(dtype=torch.float32)
    optimizer = train(SignMomentum(params, lr=0.5, eager=True), range(1))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    for parameter, start in zip(params, parameters(dtype=torch.float32), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), start - 0.5 * parameter.grad.sign())


def test_a_subclass_without_a_rule_inherits_its_parents():
    class Mine(FlashAdamW):
        pass

    one, other = (train(kind(parameters(), eager=True), range(2)) for kind in (Mine, FlashAdamW))
    assert_identical(stored(one), stored(other))


@pytest.mark.parametrize("optimizer", [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW])
def test_signature_shows_every_argument(optimizer: type[FlashOptimizer]):
    names = list(inspect.signature(optimizer).parameters)
    assert names[0] == "params"
    assert names[-1] == "eager"
    assert {*optimizer.hyper, "master_weight_bits", "quantize", "rounding", "maximize"} < set(names)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (FlashSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (FlashSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (FlashAdam, torch.optim.Adam, {}),
    ],
)
def test_a_penalty_may_be_switched_on_and_off(ours: Any, theirs: Any, options: dict[str, Any]):
    """Without weight decay, another rule keeps the moments and ignores the weights."""
    start = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    one, other = Parameter(start.clone()), Parameter(start.clone())
    optimizers = ours([one], lr=0.05, quantize=False, eager=True, **options), theirs([other], lr=0.05, **options)
    for step, decay in enumerate([0.0, 0.0, 0.3, 0.3, 0.0]):
        for parameter, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.param_groups[0]["weight_decay"] = decay
            parameter.grad = torch.randn(40, 64, generator=torch.Generator().manual_seed(step + 1))
            optimizer.step()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
