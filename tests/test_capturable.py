"""Capturable groups: numbers and counts that graphs read and write, so that a replayed step is right for later ones."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import assert_identical, give_gradients, parameters, params_of, stored

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, stepping
from flashopt_compile.engine import numbers
from flashopt_compile.options import check_capturable

SHAPES = [(40, 64), (48,), (33, 50)]
TRACED_SHAPES = [(40, 64), (48,)]  # each operation of each is compiled anew
KINDS: list[tuple[type[FlashOptimizer], dict[str, Any]]] = [
    (FlashAdamW, {}),
    (FlashAdam, {"weight_decay": 0.1}),
    (FlashLion, {"decouple_lr": True}),
    (FlashSGD, {"momentum": 0.9, "weight_decay": 0.1}),
]
READS = {"item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__", "__index__"}


class Tape(TorchDispatchMode):
    """What a CUDA graph does, as far as a CPU can: it records operations with their memory, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and not old.is_set_to(new):
                    old.copy_(new)


class Reads(TorchFunctionMode):
    """Notes where the host asks for a tensor's value, which a capture forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.names += [name] if name in READS else []
        return func(*args, **(kwargs or {}))


class Recording:
    """A backend that keeps its graphs, compiled, with the tensors they were last called with."""

    def __init__(self, name: str) -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.graphs: list[torch.fx.GraphModule] = []
        self.last: Callable[[], Any] = lambda: None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Any:
        self.graphs.append(graph)
        compiled = self._compile(graph, inputs)

        def run(*given: Any) -> Any:
            self.last = lambda: compiled(*given)
            return compiled(*given)

        return run


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether a CUDA graph is being captured, as torch would on a device."""

    def say(yes: bool) -> None:
        for module in (stepping, numbers):
            monkeypatch.setattr(module, "is_capturing", lambda: yes)

    return say


def pair(
    make: type[FlashOptimizer] = FlashAdamW, shapes: list[tuple[int, ...]] = SHAPES, **options: Any
) -> tuple[FlashOptimizer, FlashOptimizer]:
    """A capturable optimizer and an ordinary one."""
    return make(parameters(shapes), capturable=True, **options), make(parameters(shapes), **options)


def give_in_place(optimizer: FlashOptimizer, number: int) -> None:
    """Write new gradients where a graph finds them."""
    parameters = params_of(optimizer)
    held = [parameter.grad for parameter in parameters]
    give_gradients(parameters, number)
    for parameter, old in zip(parameters, held, strict=True):
        if old is not None and parameter.grad is not None:
            parameter.grad = old.copy_(parameter.grad)


def give_both(one: FlashOptimizer, other: FlashOptimizer, number: int) -> None:
    give_in_place(one, number)
    give_in_place(other, number)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("make", "options"), KINDS)
def test_capturable_steps_have_the_bits_of_ordinary_ones(
    make: type[FlashOptimizer], options: dict[str, Any], eager: bool
):
    """With numbers of Python's and with tensors, under a schedule."""
    for lr in (1e-2, torch.tensor(1e-2)):
        captured, ordinary = pair(make, lr=copy.deepcopy(lr), eager=eager, **options)
        schedules = [
            lr_scheduler.OneCycleLR(each, 1e-2, total_steps=20, cycle_momentum=False) for each in (captured, ordinary)
        ]
        for number in range(5):
            give_both(captured, ordinary, number)
            captured.step()
            ordinary.step()
            for schedule in schedules:
                schedule.step()
        assert_identical(stored(captured), stored(ordinary))


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_a_replayed_step_is_right_for_the_learning_rate_and_count_of_that_time(
    make: type[FlashOptimizer], options: dict[str, Any], capturing: Callable[[bool], None]
):
    captured, ordinary = pair(make, lr=torch.tensor(1e-2), eager=True, **options)
    for number in range(2):
        give_both(captured, ordinary, number)
        ordinary.step()
        if number == 0:
            captured.step()
    capturing(True)
    with Tape() as tape, Reads() as reads:
        captured.step()
    capturing(False)
    assert not reads.names
    assert_identical(stored(captured), stored(ordinary))
    for number, lr in ((2, 3e-2), (3, 1e-3), (4, 0.0)):
        for optimizer in (captured, ordinary):
            optimizer.param_groups[0]["lr"].fill_(lr)
        give_both(captured, ordinary, number)
        with torch.no_grad():
            tape.replay()
        ordinary.step()
        assert_identical(stored(captured), stored(ordinary))
    assert captured.state[params_of(captured)[0]]["step"] == 5
    give_both(captured, ordinary, 5)
    captured.step()  # after replays, an ordinary call goes on
    ordinary.step()
    assert_identical(stored(captured), stored(ordinary))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (FlashAdamW, {"betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8}),
        (FlashSGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0}),
    ],
)
def test_a_traced_graph_can_be_replayed_with_other_numbers(make: type[FlashOptimizer], options: dict[str, Any]):
    """With all numbers in tensors, the graph looks nothing up on the host: it can be captured as a whole."""
    in_tensors: dict[str, Any] = {
        name: tuple(map(torch.tensor, value)) if isinstance(value, tuple) else torch.tensor(value)
        for name, value in options.items()
    }
    captured = make(parameters(TRACED_SHAPES), capturable=True, lr=torch.tensor(1e-2), **in_tensors)
    ordinary = make(parameters(TRACED_SHAPES), lr=1e-2, eager=True, **options)
    backend = Recording("inductor")  # whose roots are those of our kernels
    step = torch.compile(captured.step, fullgraph=True, backend=backend)
    give_both(captured, ordinary, 0)
    step()
    ordinary.step()
    assert_identical(stored(captured), stored(ordinary))
    assert "flashopt_compile" not in str(backend.graphs[-1].code)  # none of our operators
    for number, lr in ((1, 3e-2), (2, 1e-3)):
        captured.param_groups[0]["lr"].fill_(lr)
        ordinary.param_groups[0]["lr"] = lr
        give_both(captured, ordinary, number)
        backend.last()
        ordinary.step()
        assert_identical(stored(captured), stored(ordinary))
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("lr", [1e-2, "tensor"])
def test_a_schedule_compiles_no_more_than_two_graphs(lr: Any):
    captured, ordinary = pair(shapes=TRACED_SHAPES, lr=torch.tensor(1e-2) if lr == "tensor" else lr)
    if lr == "tensor":
        ordinary.param_groups[0]["lr"] = torch.tensor(1e-2)
    backend = Recording("inductor")
    step = torch.compile(captured.step, fullgraph=True, backend=backend)
    schedules = [lr_scheduler.OneCycleLR(each, 1e-2, total_steps=20) for each in (captured, ordinary)]
    for number in range(5):
        give_both(captured, ordinary, number)
        step()
        ordinary.step()
        for schedule in schedules:
            schedule.step()
        assert_identical(stored(captured), stored(ordinary))
    assert len(backend.graphs) <= 2


def test_capturable_is_an_option_of_a_group():
    first, second = parameters([(40, 64)]), parameters([(33, 50)], seed=1)
    one, other = parameters([(40, 64)]), parameters([(33, 50)], seed=1)
    mixed = FlashAdamW([{"params": first, "capturable": True, "lr": torch.tensor(1e-2)}, {"params": second}])
    ordinary = FlashAdamW([{"params": one, "lr": 1e-2}, {"params": other}])
    for number in range(3):
        give_both(mixed, ordinary, number)
        mixed.step()
        ordinary.step()
    assert_identical(stored(mixed), stored(ordinary))
    assert [group["capturable"] for group in mixed.param_groups] == [True, False]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_alike(duplicate: Callable[[FlashOptimizer], FlashOptimizer]):
    captured, ordinary = pair(lr=torch.tensor(1e-2))
    give_both(captured, ordinary, 0)
    captured.step()
    ordinary.step()
    captured = duplicate(captured)
    assert captured.param_groups[0]["capturable"] is True
    give_both(captured, ordinary, 1)
    captured.step()
    ordinary.step()
    assert_identical(stored(captured), stored(ordinary))


def test_state_dicts_are_those_of_ordinary_groups():
    """What is loaded says nothing of how to step: each optimizer stays as it was made."""
    captured, ordinary = pair()
    for number in range(2):
        give_both(captured, ordinary, number)
        captured.step()
        ordinary.step()
    saved = copy.deepcopy(captured.state_dict()), copy.deepcopy(ordinary.state_dict())
    captured.load_state_dict(saved[1])
    ordinary.load_state_dict(saved[0])
    assert captured.param_groups[0]["capturable"] is True
    assert ordinary.param_groups[0]["capturable"] is False
    give_both(captured, ordinary, 2)
    captured.step()
    ordinary.step()
    assert_identical(stored(captured), stored(ordinary))


def test_counts_that_a_user_writes_are_taken():
    captured, ordinary = pair()
    for number in range(3):
        give_both(captured, ordinary, number)
        if number == 2:
            for optimizer in (captured, ordinary):
                optimizer.state[params_of(optimizer)[0]]["step"].fill_(10.0)
        captured.step()
        ordinary.step()
    assert captured.state[params_of(captured)[0]]["step"] == 11
    assert_identical(stored(captured), stored(ordinary))


def test_a_captured_step_that_a_graph_could_not_repeat_is_refused(capturing: Callable[[bool], None]):
    captured, ordinary = pair()
    capturing(True)
    give_both(captured, ordinary, 0)
    before = stored(captured)
    with pytest.raises(RuntimeError, match="not like the last one"):
        captured.step()
    with pytest.raises(RuntimeError, match="capturable is False in parameter group 0"):
        ordinary.step()
    assert_identical(stored(captured), before)
    capturing(False)
    captured.step()
    capturing(True)
    captured.param_groups[0]["lr"] = 0.5
    before = stored(captured)
    with pytest.raises(RuntimeError, match="Python number of a parameter group"):
        captured.step()
    assert_identical(stored(captured), before)


@pytest.mark.parametrize("option", ["check_numerics", "skip_nonfinite"])
def test_what_the_host_would_have_to_look_at_is_refused(option: str):
    with pytest.raises(ValueError, match=f"capturable is True with {option} True; allowed is False"):
        FlashAdamW(parameters(), capturable=True, **{option: True})


def test_numbers_on_another_device_are_refused():
    group: dict[str, Any] = {"params": [nn.Parameter(torch.zeros(2, device="meta"))], "lr": torch.tensor(0.1)}
    with pytest.raises(
        ValueError, match="lr is a tensor on cpu in a group with capturable=True; allowed are tensors on meta"
    ):
        check_capturable("FlashAdamW", group, {"lr": 1e-3})
    group["params"].append(nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="has parameters on meta, cpu; allowed is one device"):
        check_capturable("FlashAdamW", group, {"lr": 1e-3})
