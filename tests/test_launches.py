"""Launches of GPU kernels that are bound once: those of the plain path, step by step. Nothing here needs a GPU."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from training import give_gradients, parameters, params_of

from flashopt_compile import FlashLion, FlashOptimizer
from flashopt_compile.inductor import launch, probes

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
from bench import pretended

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


def drive(shapes: list[tuple[int, ...]], is_plain: bool, is_capturable: bool) -> list[Launches]:
    """The launches of eight steps that all differ."""

    def way() -> AbstractContextManager[Any]:
        return mock.patch.object(launch, "is_launched", lambda device: False) if is_plain else nullcontext()

    log, found = Log(), []
    device = pretended.Device(log.runner, is_capturable=is_capturable)
    with pretended.device(device):
        optimizer = FlashLion(parameters(shapes), lr=1e-2, capturable=is_capturable)
        weights, (group,) = params_of(optimizer), optimizer.param_groups

        def step() -> None:
            log.launches.clear()
            with way():
                optimizer.step()
            assert all(bound.is_deferred != is_plain for bound in bound_of(optimizer))
            # The first step of a plan tunes and checks: its own launches come last.
            last = log.launches[-sum(1 for _ in bound_of(optimizer)) :]
            log.launches = last
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
