"""torch.compile(opt.step) and compiled training steps have the bits of the uncompiled loop, in one graph."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from training import assert_identical, give_gradients, parameters, stored

from flashopt_compile import FlashAdamW, FlashOptimizer, FlashSGD
from flashopt_compile.inductor import operator

SHAPES = [(40, 64), (48,), (33, 50), (300, 256)]
BACKENDS = ["eager", "aot_eager", "inductor"]
Backend = Callable[..., Any]


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self, name: str = "eager") -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Any:
        self.graphs.append(graph)
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


def pair(make: type[FlashOptimizer] = FlashAdamW, **options: Any) -> tuple[FlashOptimizer, FlashOptimizer]:
    return make(parameters(SHAPES), **options), make(parameters(SHAPES), **options)


def own_parameters(optimizer: FlashOptimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def give_both(one: FlashOptimizer, other: FlashOptimizer, number: int) -> None:
    for optimizer in (one, other):
        give_gradients(own_parameters(optimizer), number)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("is_made_first", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_graph_serves_every_schedule(name: str, is_made_first: bool):
    ours, plain = pair()
    schedules = [SCHEDULERS[name](ours)] if is_made_first else []
    backend = Counting()
    step = torch.compile(ours.step, fullgraph=True, backend=backend)
    schedules = [*(schedules or [SCHEDULERS[name](ours)]), SCHEDULERS[name](plain)]
    for number in range(8):
        give_both(ours, plain, number)
        step()
        plain.step()
        for schedule in schedules:
            schedule.step()
    assert_identical(stored(ours), stored(plain))
    assert len(backend.graphs) == 1


def test_one_graph_serves_every_number_and_state():
    ours, plain = pair()
    backend = Counting("inductor")
    step = torch.compile(ours.step, fullgraph=True, backend=backend)
    changes: list[dict[str, Any]] = [
        {},
        {"betas": (0.5, 0.9)},
        {"weight_decay": 0.5},
        {"eps": 1e-3},
        {"lr": torch.tensor(0.1)},
        {"maximize": True},
    ]
    for number, change in enumerate(changes):
        for optimizer in (ours, plain):
            optimizer.param_groups[0].update(change)
            if number == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if number == 4:
                optimizer.add_param_group({"params": parameters([(64, 32)]), "lr": 0.5})
        give_both(ours, plain, number)
        if number == 5:
            for optimizer in (ours, plain):
                own_parameters(optimizer)[1].grad = None
        step()
        plain.step()
        assert_identical(stored(ours), stored(plain))
    assert len(backend.graphs) == 1


# The backend "eager" takes torch's own roots, which are an ulp off. fp32 states have none.
NO_ROOTS = {"momentum": 0.9, "weight_decay": 0.1, "quantize": False}


@pytest.mark.parametrize(
    ("make", "options", "backend_name"), [(FlashAdamW, {}, "inductor"), (FlashSGD, NO_ROOTS, "eager")]
)
def test_an_eager_optimizer_is_traced_through_in_two_graphs(
    make: type[FlashOptimizer], options: dict[str, Any], backend_name: str
):
    ours, plain = pair(make, eager=True, lr=1e-3, **options)
    backend = Counting(backend_name)
    step = torch.compile(ours.step, fullgraph=True, backend=backend)
    schedules = [lr_scheduler.OneCycleLR(each, 1e-2, total_steps=20) for each in (ours, plain)]
    for number in range(6):
        give_both(ours, plain, number)
        step()
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert_identical(stored(ours), stored(plain))
    assert len(backend.graphs) <= 2
    assert len(list(backend.graphs[-1].graph.nodes)) > 100


def test_an_eager_optimizer_whose_rule_changes_is_not_stepped_by_the_old_one():
    ours, plain = pair(FlashSGD, eager=True, **NO_ROOTS)
    step = torch.compile(ours.step, fullgraph=True, backend="eager")
    give_both(ours, plain, 0)
    step()
    plain.step()
    for optimizer in (ours, plain):
        optimizer.param_groups[0]["weight_decay"] = 0.0
    give_both(ours, plain, 1)
    with pytest.raises(RuntimeError, match="ask for sgdw_momentum now"):
        step()
    assert_identical(stored(ours), stored(plain))
    step()
    plain.step()
    assert_identical(stored(ours), stored(plain))


# Whole training steps


def model() -> nn.Module:
    random = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64))
    made[3].requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return made.to(torch.bfloat16)


def inputs(number: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def train_plainly(net: nn.Module, optimizer: FlashOptimizer, x: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(net(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_with_clipping(net: nn.Module, optimizer: FlashOptimizer, x: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(net(x), x)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def train_with_accumulation(net: nn.Module, optimizer: FlashOptimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    for half in x.chunk(2):
        loss = nn.functional.mse_loss(net(half), half)
        loss.backward()
    optimizer.step()
    return loss.detach()


def train_with_closure(net: nn.Module, optimizer: FlashOptimizer, x: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), x)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


LOOPS = [train_plainly, train_with_clipping, train_with_accumulation, train_with_closure]


def assert_trains_alike(train: Callable[..., Tensor], compiled: Callable[..., Tensor], steps: int = 4) -> None:
    losses, weights = [], []
    for each in (train, compiled):
        net = model()
        optimizer = FlashAdamW(net.parameters(), lr=1e-2)
        schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        losses.append([])
        for number in range(steps):
            losses[-1].append(each(net, optimizer, inputs(number)).item())
            schedule.step()
        weights.append([*stored(optimizer), *net.parameters()])
    assert losses[0] == losses[1] and len(set(losses[0])) > 1
    assert_identical(*weights)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("train", LOOPS)
def test_a_compiled_training_step_has_the_bits_of_the_uncompiled_one(train: Callable[..., Tensor], backend: str):
    """Backends that compute as eager does give the same gradients, and so must the whole step be the same."""
    assert_trains_alike(train, torch.compile(train, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_step_can_be_one_graph(backend: str):
    """Where torch traces `backward`, gradients are the graph's own when the step is reached."""
    try:
        tracing_backward = torch._dynamo.config.patch(trace_autograd_ops=True)
    except AttributeError:
        pytest.skip("this torch does not trace backward")
    counting, graphs = Counting(backend), []
    compiled = torch.compile(train_plainly, backend=counting, fullgraph=True)

    def train(*given: Any) -> Tensor:
        loss = compiled(*given)
        graphs.append(len(counting.graphs))
        return loss

    with tracing_backward:
        assert_trains_alike(train_plainly, train, steps=7)
    assert graphs[2] == graphs[-1]  # once Dynamo has seen the learning rate change, a schedule makes no more


def test_a_compiled_model_is_trained_by_plain_steps():
    def train(net: nn.Module, optimizer: FlashOptimizer, x: Tensor) -> Tensor:
        return train_plainly(torch.compile(net, backend="aot_eager"), optimizer, x)  # pyright: ignore[reportArgumentType]

    assert_trains_alike(train_plainly, train)


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"dynamic": True}])
def test_options_of_the_caller_change_nothing(options: dict[str, Any]):
    ours, plain = pair()
    step = torch.compile(ours.step, fullgraph=True, **options)
    for number in range(3):
        give_both(ours, plain, number)
        step()
        plain.step()
    assert_identical(stored(ours), stored(plain))


def test_two_optimizers_in_one_graph_are_both_stepped():
    first, second = pair()
    third, fourth = pair()
    backend = Counting("aot_eager")

    def both() -> None:
        first.step()
        second.step()

    step = torch.compile(both, fullgraph=True, backend=backend)
    for number in range(3):
        give_both(first, third, number)
        give_both(second, fourth, number + 10)
        step()
        third.step()
        fourth.step()
    assert_identical([*stored(first), *stored(second)], [*stored(third), *stored(fourth)])
    assert len(backend.graphs) == 1


def test_copies_and_successors_are_optimizers_of_their_own():
    """Neither a copy, nor an optimizer made when another is gone, is stepped by the graph of the other."""
    ours, plain = pair()
    step = torch.compile(ours.step, fullgraph=True, backend="eager")
    give_both(ours, plain, 0)
    step()
    plain.step()
    for make in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        copied = make(ours)
        before = [each.clone() for each in stored(ours)]
        give_gradients(own_parameters(copied), 1)
        give_gradients(own_parameters(plain), 1)
        torch.compile(copied.step, fullgraph=True, backend="eager")()
        assert_identical(stored(ours), before)
        assert not torch.equal(stored(copied)[0], before[0])
    gone = weakref.ref(ours)
    del ours, step
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    successor, plain = pair()
    give_both(successor, plain, 2)
    torch.compile(successor.step, fullgraph=True, backend="eager")()
    plain.step()
    assert_identical(stored(successor), stored(plain))


def test_compiled_steps_in_threads_are_each_of_their_own_optimizer():
    pairs = [pair() for _ in range(3)]
    for number, (ours, plain) in enumerate(pairs):
        give_both(ours, plain, number)
    pairs[0][1].step()  # compiles the kernels, for all

    def run(optimizer: FlashOptimizer) -> None:
        step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        for _ in range(4):
            step()

    threads = [threading.Thread(target=run, args=(ours,)) for ours, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (ours, plain) in enumerate(pairs):
        for _ in range(3 if number == 0 else 4):
            plain.step()
        assert_identical(stored(ours), stored(plain))


def test_bad_input_gets_the_sentence_of_a_plain_step():
    for change, sentence in (({"lr": -1.0}, "lr is -1.0"), ({"betas": (2.0, 0.9)}, "betas")):
        ours, plain = pair()
        step = torch.compile(ours.step, fullgraph=True, backend="eager")
        give_both(ours, plain, 0)
        before = [each.clone() for each in own_parameters(ours)]
        for optimizer in (ours, plain):
            optimizer.param_groups[0].update(change)
        with pytest.raises(ValueError, match=sentence) as expected:
            plain.step()
        with pytest.raises(ValueError, match=sentence) as found:
            step()
        assert str(found.value) == str(expected.value)
        assert torch.is_grad_enabled()
        assert_identical(own_parameters(ours), before)


def test_skipped_steps_are_skipped_in_a_callers_compile_too():
    ours, plain = pair(skip_nonfinite=True)
    step = torch.compile(ours.step, fullgraph=True, backend="eager")
    for number in range(3):
        give_both(ours, plain, number)
        if number == 1:
            for optimizer in (ours, plain):
                own_parameters(optimizer)[0].grad[0, 0] = torch.inf  # pyright: ignore[reportOptionalSubscript]
        step()
        plain.step()
    assert_identical(stored(ours), stored(plain))
    assert ours.state[own_parameters(ours)[0]]["step"] == 2


# The operator


def test_a_graph_may_step_copies_of_weights():
    """A compiler may give the operator copies, to be copied back later: until then the weights stay as they are."""
    ours, plain = pair()
    give_both(ours, plain, 0)
    plain.step()
    own = own_parameters(ours)
    before = [each.detach().clone() for each in own]
    grads = [each.grad for each in own]
    copies = [each.detach().clone() for each in own]
    given = [each.clone() for each in grads if each is not None]
    for each in own[:2]:
        each.grad = None
    held = [each.grad for each in own]
    operator.step_given(ours.handle, copies, given, list(range(len(own))), True)
    assert_identical([each.detach() for each in own], before)
    assert_identical(copies, [each.detach() for each in own_parameters(plain)])
    assert all(each.grad is grad for each, grad in zip(own, held, strict=True))


def test_operators_that_read_the_host_are_kept_out_of_cuda_graphs():
    tags = [getattr(torch.ops.flashopt_compile, name).default.tags for name in ("step", "step_given", "numbers")]
    assert all(torch.Tag.cudagraph_unsafe in each for each in tags)


def test_an_optimizer_that_is_gone_is_not_stepped():
    ours, _ = pair()
    handle = ours.handle
    del ours
    gc.collect()
    with pytest.raises(RuntimeError, match="does not exist any more"):
        operator.step(handle)


def test_without_dynamos_frames_a_step_is_one_among_other_operations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operator, "_roots", set())
    ours, plain = pair()
    backend = Counting()
    step = torch.compile(ours.step, fullgraph=True, backend=backend)
    for number in range(2):
        give_both(ours, plain, number)
        step()
        plain.step()
    assert_identical(stored(ours), stored(plain))
    assert "step_given" in str(backend.graphs[0].code)
