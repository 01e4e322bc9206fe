"""Launches of GPU kernels that are bound once: those of the plain path, step by step. Nothing here needs a GPU."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedTritonKernel
from training import assert_identical, give_gradients, parameters, params_of, stored, train

from flashopt_compile import FlashLion, FlashOptimizer
from flashopt_compile.engine.kernel import run_at_once
from flashopt_compile.inductor import launch, probes

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
from bench import host, pretended
from flashopt_compile.kernels.interpret import _interpreter, _launcher

LARGE, LARGER, RAGGED, SMALL, BIAS = (288, 256), (600, 128), (300, 250), (64, 64), (7,)
# 40 tensors: large ones, of which the last has rows that end in short groups, and two kinds of small ones.
MODEL = [LARGE, BIAS, SMALL, LARGER, BIAS] * 7 + [LARGE, SMALL, BIAS, SMALL, RAGGED]
FEW = [LARGE, BIAS, LARGER]
Launches = list[tuple[Any, ...]]


class Log:
    """Records launches, with pointers by what they point to, so that those of two models can be compared."""

    def __init__(self) -> None:
        self.launches: Launches = []

    def runner(self, name: str, text: str) -> Callable[..., Any]:
        """What carries launches out: a function that counts as C's, as `lru_cache` is, which keeps nothing here."""
        return lru_cache(maxsize=0)(partial(self._note, name))

    def _note(self, name: str, *arguments: Any) -> None:
        told = ((each.data_ptr(), each.dtype) if isinstance(each, Tensor) else each for each in arguments)
        self.launches.append((name, *told))

    def take(self, optimizer: FlashOptimizer) -> Launches:
        """The launches since the last call. Memory that is not the model's goes by the order in which it is seen."""
        spans: list[tuple[int, int, str]] = []
        for index, parameter in enumerate(params_of(optimizer)):
            own = {"head": parameter, "gradient": parameter.grad, **optimizer.state[parameter]}
            for what, tensor in own.items():
                if tensor is not None:
                    spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, f"{what} of {index}"))
        others: dict[int, str] = {}

        def named(argument: Any) -> Any:
            if not isinstance(argument, tuple):
                return argument
            pointer, dtype = argument
            for begin, end, name in spans:
                if begin <= pointer < end:
                    return name, pointer - begin, dtype
            return others.setdefault(pointer, f"memory {len(others)}"), dtype

        found, self.launches = self.launches, []
        return [tuple(map(named, each)) for each in found]


def way(is_plain: bool) -> AbstractContextManager[Any]:
    """Within, plans are made of bound launches, or of calls of the compiled step."""
    return mock.patch.object(launch, "is_launched", lambda device: False) if is_plain else nullcontext()


def drive(shapes: list[tuple[int, ...]], is_plain: bool, is_capturable: bool) -> list[Launches]:
    """The launches of eight steps that all differ."""
    log, found = Log(), []
    device = pretended.Device(log.runner, is_capturable=is_capturable)
    with pretended.device(device):
        optimizer = FlashLion(parameters(shapes), lr=1e-2, capturable=is_capturable)
        weights, (group,) = params_of(optimizer), optimizer.param_groups

        def step() -> None:
            log.launches.clear()
            with way(is_plain):
                optimizer.step()
            assert all(bound.is_deferred != is_plain for bound in bound_of(optimizer))
            stepped = [tuple(weight.shape) for weight in weights if weight.grad is not None]
            own = sum({RAGGED: 2, BIAS: 0, SMALL: 0}.get(shape, 1) for shape in stepped) + len(
                {BIAS, SMALL} & {*stepped}
            )
            assert len(log.launches) == own or (len(log.launches) > own and not found and not is_plain)
            log.launches = log.launches[-own:]  # those before, of the first step, have tuned and checked
            found.append(log.take(optimizer))

        give_gradients(weights, 0)
        step()
        group["lr"] = 3e-2
        step()
        give_gradients(weights, 1)  # in other memory
        group["lr"] = 2e-2
        step()
        for weight in weights[:2]:
            grad = torch.zeros(weight.numel() + 1, dtype=weight.dtype)[1:].view(weight.shape)
            weight.grad = grad.copy_(weight.detach())
        assert weights[0].grad is not None and weights[0].grad.data_ptr() % launch.ALIGNMENT
        step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step()
        weights[0].grad = None
        step()
        device.stream = 11
        step()
        group["betas"] = (0.5, 0.75)
        step()
    return found


def bound_of(optimizer: FlashOptimizer) -> Iterator[Any]:
    assert optimizer.plan is not None
    for stage, _ in optimizer.plan._stages:
        for call in stage.calls:
            yield from call.bound


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_told", set())


@pytest.mark.parametrize("is_capturable", [False, True])
def test_bound_launches_are_those_of_the_plain_path(is_capturable: bool):
    """Grid, arguments and pointers, over a schedule, new and misaligned gradients, loaded states, another stream."""
    shapes = FEW if is_capturable else MODEL
    ours, theirs = (drive(shapes, is_plain, is_capturable) for is_plain in (False, True))
    assert len(ours) == len(theirs) == 8
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one == other, f"step {step}"
        assert one and all(arguments[4] == (7 if step < 6 else 11) for arguments in one)
    assert len({repr(each) for each in ours}) == (8 if not is_capturable else 4)


def interpreted(name: str, text: str) -> Callable[..., Any]:
    """What carries launches out in triton's interpreter."""

    def run(grid_0: int, grid_1: int, grid_2: int, stream: int, *arguments: Any) -> None:
        with _interpreter():
            _launcher(name, text)(*(each.detach() if isinstance(each, Tensor) else each for each in arguments))

    return lru_cache(maxsize=0)(run)


def test_bound_launches_give_the_bits_of_the_plain_path():
    """Each launch is carried out by triton's interpreter, those of the examples too."""

    def run(is_plain: bool) -> list[Tensor]:
        with pretended.device(pretended.Device(interpreted)), way(is_plain):
            optimizer = train(FlashLion(parameters(FEW), lr=1e-2), range(3))
            assert all(bound.is_deferred != is_plain for bound in bound_of(optimizer))
            return stored(optimizer)

    ours = run(is_plain=False)
    assert_identical(ours, run(is_plain=True))
    assert not torch.equal(ours[0], parameters(FEW)[0])


def test_a_step_is_one_stage_whose_operations_run_no_python():
    with pretended.device(pretended.Device()):
        optimizer = train(FlashLion(parameters(FEW)), range(1))
        plan = optimizer.plan
        assert plan is not None and len(plan._stages) == 1
        ((stage, count),) = plan._stages
        weights = params_of(optimizer)
        grads = [weight.grad for weight in weights if weight.grad is not None]
        operations = [operation for call in stage.calls for operation in call.operations(weights, grads)]
        assert len(operations) == 3 + 4  # a launch each; the pack is cleared and copied to, to, and from
        assert all(launch._runs_no_python(operation.func) for operation in (*operations, *count))
        versions = [weight._version for weight in weights]
        optimizer.step()
        assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))


@pytest.mark.parametrize("how", ["python", "two launchers", "other launch", "no tap"])
def test_what_is_unknown_about_a_launch_closes_the_path_with_one_warning(how: str, monkeypatch: pytest.MonkeyPatch):
    """A launcher in Python is bound, and steps at once, each parameter counted by itself."""
    log, real = Log(), pretended.tuner

    def tuner(name: str, text: str, device: pretended.Device) -> Any:
        found = real(name, text, device)
        if how == "two launchers":
            found.launchers *= 2
            found.run = lambda *_, **__: None
        return found

    def runner(name: str, text: str) -> Callable[..., Any]:
        return (lambda *arguments: log._note(name, *arguments)) if how == "python" else log.runner(name, text)

    monkeypatch.setattr(pretended, "tuner", tuner)
    if how == "other launch":
        monkeypatch.setattr(launch, "_are_same", lambda one, other: False)
    if how == "no tap":
        monkeypatch.setattr(pretended, "entry", lambda module, device: lambda inputs: None)
    with pretended.device(pretended.Device(runner)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = train(FlashLion(parameters([LARGE, LARGER])), range(2))
        assert all(bound.is_at_once for bound in bound_of(optimizer))
        assert optimizer.plan is not None and [len(stage.calls) for stage, _ in optimizer.plan._stages] == [1, 1]
    sentences = [str(each.message) for each in told if "direct launches" in str(each.message)]
    reasons = {
        "two launchers": "2 launchers",
        "other launch": "not that of the plain call",
        "no tap": "no Triton kernel",
    }
    assert len(sentences) == (how != "python") and all(reasons[how] in each for each in sentences)
    if how == "python":
        assert len(log.take(optimizer)) >= 4


def test_the_c_function_behind_a_method_is_called_directly():
    """That of torch's static launcher, whose method here is torch's, has the arguments of a kernel in a tuple."""
    launched: list[Any] = []

    class Owner:
        run = StaticallyLaunchedTritonKernel.run
        function, num_warps, shared, arg_tys = 99, 4, 0, "OOfi"
        has_global_scratch = has_profile_scratch = False
        device_agnostic = _has_tensordesc = False  # which torch 2.15 asks for
        C_impl = SimpleNamespace(_launch_kernel=lru_cache(maxsize=0)(lambda *given: launched.append(given)))

    runner: dict[str, Any] = {"runner": Owner().run}
    exec("def launcher(a, b, c, d, xnumel, stream):\n    runner(xnumel // 2, 1, 1, stream, a, b, c, d)", runner)
    kernel = SimpleNamespace(launchers=[runner["launcher"]])
    head, grad, number, stream = launch.Slot(), launch.Slot(), launch.Slot(), launch.Slot()
    function, given = launch._innermost(kernel, [head, grad, number, 5, 64], stream)
    assert given == (99, 32, 1, 1, 4, 0, "OOfi", (head, grad, number, 5), stream) and not launched
    common: Any = SimpleNamespace(numbers=[0.25], stream=3, around=None)
    fill = launch._Fill(function, given, common, head, grad, [number], stream)
    tensors = torch.zeros(8), torch.ones(8)
    run_at_once(fill.operations(*tensors))
    assert launched == [(99, 32, 1, 1, 4, 0, "OOfi", (*tensors, 0.25, 5), 3)]
    common.around = [partial(launched.append, "there")], [partial(launched.append, "back")]
    launched.clear()
    run_at_once(fill.operations(*tensors))  # on a device that is not the current one
    assert [launched[0], launched[2], len(launched)] == ["there", "back", 3]


def test_copies_of_small_tensors_count_as_the_launches_that_torch_makes():
    """One launch copies up to 448 dense pairs where torch was built for CUDA 13, and 64 elsewhere."""
    dense, strided = [torch.zeros(64, 64)] * 300, [torch.zeros(16, 40)[:, :30]] * 3
    counts = [host.launches_of_copies(dense, dense, build) for build in ("CUDA 13", "CUDA 12, ROCm")]
    assert counts == [1, 5]
    assert host.launches_of_copies([*dense, *strided], [*dense, *strided], "CUDA 13") == 303
    large = [torch.zeros(65536 * 200)] * 2
    assert host.launches_of_copies(large, large, "CUDA 12, ROCm") == 2
    with pretended.device(pretended.Device()):
        assert host.launches([(64, 64)] * 300) == {"CUDA 13": 4, "CUDA 12, ROCm": 16}
