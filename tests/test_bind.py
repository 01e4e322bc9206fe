"""Kernels bound to their C++ functions, and every fallback: training goes on with the eager bits."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashSGD
from flashopt_compile.engine.kernel import ComputedKernel
from flashopt_compile.inductor import bind, probes
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor.compile import BoundKernel

# Small parameters; large ones of one to four dims, with one row and with many, with and without short groups.
SHAPES = [(40, 64), (48,), (33, 50), (300, 256), (300, 250), (1, 70001), (70000,), (32, 16, 12, 12), (40, 50, 33)]
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget this process's compiled kernels and past warnings."""
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())
    monkeypatch.setattr(probes, "_told", set())


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def trained(eager: bool) -> list[Tensor]:
    return stored(train(FlashSGD(parameters(SHAPES), lr=0.05, eager=eager), range(3)))


def train_and_listen() -> tuple[list[Tensor], list[str]]:
    """The weights and states after compiled steps, and their warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(eager=False)
    return found, [str(each.message) for each in caught if "flashopt_compile" in str(each.message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_are_bound_without_warnings(dtype: torch.dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ours = train(FlashAdamW(parameters(SHAPES, dtype), lr=0.05), range(3))
    assert [type(each) for each in inductor._kernels.values()] == [BoundKernel] * 2
    assert_identical(stored(ours), stored(train(FlashAdamW(parameters(SHAPES, dtype), lr=0.05, eager=True), range(3))))


@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_kernels_are_bound_for_every_rounding(momentum: float, rounding: str):
    FlashSGD(parameters([(64, 64), (48,)]), momentum=momentum, rounding=rounding).warmup(verbose=False)
    assert {type(each) for each in inductor._kernels.values()} == {BoundKernel}


def change_graphs(change: Callable[[list[Any]], Any]) -> Patch:
    """Patch the backend to change the graphs that it records."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = bind.Noting.__call__

        def compiled(self: bind.Noting, *args: Any, **kwargs: Any) -> Any:
            result = real(self, *args, **kwargs)
            change(self.graphs)
            return result

        monkeypatch.setattr(bind.Noting, "__call__", compiled)

    return patch


def change_calls(change: Callable[[list[tuple[Any, tuple[Any, ...]]]], Any]) -> Patch:
    """Patch the recording of C++ calls to change the recorded calls."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = bind._run_noting

        def run(compiled: Any, calls: list[tuple[Any, tuple[Any, ...]]], inputs: Any) -> Any:
            result = real(compiled, calls, inputs)
            change(calls)
            return result

        monkeypatch.setattr(bind, "_run_noting", run)

    return patch


def call_twice(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    calls += calls


def call_python(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    ((function, arguments),) = calls
    calls[:] = [(lambda *given: function(*given), arguments)]


def call_with(argument: Any) -> Callable[[list[tuple[Any, tuple[Any, ...]]]], None]:
    def change(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
        ((function, arguments),) = calls
        calls[:] = [(function, (*arguments, argument))]

    return change


def call_without_gradient(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    ((function, arguments),) = calls
    calls[:] = [(function, arguments[:1])]


def give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the C++ function that is found so that it spoils one weight."""
    real = bind.find

    def find(*args: Any) -> bind.Found:
        found = real(*args)
        head = [argument == 0 for argument in found.arguments].index(True)

        def spoil(*arguments: Any) -> None:
            found.function(*arguments)
            arguments[head][0, 0, :1].fill_(77)

        return replace(found, function=spoil)

    monkeypatch.setattr(bind, "find", find)


def raise_error(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler was found.\nA long explanation follows.")


def raise_in_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind.Noting, "__call__", raise_error)


WAYS: dict[str, tuple[Patch, str]] = {
    "two graphs": (change_graphs(lambda graphs: graphs.append(graphs[0])), "torch.compile made 2 graphs of it"),
    "two C++ functions": (change_calls(call_twice), "it consists of 2 C++ functions"),
    "no C++ function": (change_calls(list.clear), "it consists of 0 C++ functions"),
    "a function of Python's": (change_calls(call_python), "its C++ function is a function"),
    "an unknown tensor": (change_calls(call_with(torch.zeros(3))), "takes Tensor that is none of its inputs"),
    "an unknown number": (change_calls(call_with(2.5)), "takes float that is none of its inputs"),
    "no gradient": (change_calls(call_without_gradient), "does not take head and gradient once"),
    "other bits": (give_other_bits, "gives other bits of tensor 0"),
    "an error": (raise_in_the_backend, "RuntimeError: no compiler was found"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_cannot_be_bound_is_called_through_dynamo(way: str, monkeypatch: pytest.MonkeyPatch):
    patch, why = WAYS[way]
    patch(monkeypatch)
    before = graphs()
    found, (told,) = train_and_listen()
    assert why in told and "called through Dynamo" in told and "\n" not in told
    (kernel,) = inductor._kernels.values()
    assert isinstance(kernel, ComputedKernel)
    # Two graphs that could not be bound; then one each for consecutive rows, rows apart, and a single piece.
    assert graphs() - before <= 5
    assert_identical(found, trained(eager=True))
    again, told_again = train_and_listen()
    assert not told_again
    assert_identical(again, found)


def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind.Noting, "__call__", raise_error)
    monkeypatch.setattr(inductor, "_computing", raise_error)


def without_the_second_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    change_calls(call_twice)(monkeypatch)
    monkeypatch.setattr(inductor, "_computing", raise_error)


UNCOMPILED: dict[str, tuple[Patch, Sequence[str]]] = {
    "no graph": (change_graphs(list.clear), ["torch.compile did not compile"]),
    "an error": (without_a_compiler, ["RuntimeError", "no compiler was found"]),
    "an error of the second way": (without_the_second_compile, ["RuntimeError", "no compiler was found"]),
}


@pytest.mark.parametrize("way", UNCOMPILED)
def test_steps_run_eagerly_if_nothing_can_be_compiled(way: str, monkeypatch: pytest.MonkeyPatch):
    patch, why = UNCOMPILED[way]
    patch(monkeypatch)
    found, (told,) = train_and_listen()
    assert all(part in told for part in why) and "steps run eagerly" in told
    assert "\n" not in told and "long explanation" not in told
    assert_identical(found, trained(eager=True))
    _, told_again = train_and_listen()
    assert not told_again


def test_each_reason_is_warned_of_once_for_all_kernels(monkeypatch: pytest.MonkeyPatch):
    without_a_compiler(monkeypatch)
    with pytest.warns(RuntimeWarning) as caught:
        train(FlashAdamW(parameters(SHAPES)), range(2))
        train(FlashSGD(parameters(SHAPES), momentum=0.9), range(1))
    assert len(caught) == 1


def test_graphs_compiled_by_others_are_not_noted():
    """Each kernel has its own backend, which does not see graphs that others compile meanwhile."""
    seen: list[bind.Noting] = []

    class Noting(bind.Noting):
        def __init__(self, options: Any) -> None:
            super().__init__(options)
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "Noting", Noting)
        FlashSGD(parameters([(64, 64)])).warmup(verbose=False)
        torch.compile(lambda x: x * 2 + 1)(torch.ones(5))
        FlashSGD(parameters([(64, 64)], torch.float32)).warmup(verbose=False)
    assert [len(each.graphs) for each in seen] == [1, 1]
