"""What gradient release refuses: one sentence, and nothing is half attached."""

import math
import socket
from typing import Any

import pytest
import torch
from released import assert_same, batches, loss_of, made, ordinary, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flashopt_compile import FlashAdamW, enable_gradient_release

enable: Any = enable_gradient_release

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no common parameter": (
        lambda model, optimizer: enable(nn.Linear(2, 2), optimizer),
        ValueError,
        "share no parameter",
    ),
    "no module": (
        lambda model, optimizer: enable([model], optimizer),
        TypeError,
        "model is a list; allowed is a torch.nn.Module",
    ),
    "another optimizer": (
        lambda model, optimizer: enable(model, torch.optim.SGD(model.parameters())),
        TypeError,
        "optimizer is a SGD; allowed",
    ),
    "pre_step": (
        lambda model, optimizer: enable(model, optimizer, pre_step=1),
        TypeError,
        "pre_step is 1; allowed is a function",
    ),
    "grad_scaler": (
        lambda model, optimizer: enable(model, optimizer, grad_scaler=2.0),
        TypeError,
        r"grad_scaler is 2\.0; allowed is a torch\.amp\.GradScaler",
    ),
    **{
        f"{name} {value}": (
            lambda model, optimizer, given={name: value}: enable(model, optimizer, **given),
            ValueError,
            rf"{name} is .*; allowed is a number above 0, or None",
        )
        for name, value in (("clip_norm", 0), ("clip_norm", math.nan), ("clip_value", -1.0), ("clip_param_norm", "1"))
    },
    "clip_mode": (
        lambda model, optimizer: enable(model, optimizer, clip_norm=1.0, clip_mode="last"),
        ValueError,
        "clip_mode is 'last'; allowed is 'previous' or 'exact'",
    ),
    "exact without a norm": (
        lambda model, optimizer: enable(model, optimizer, clip_mode="exact"),
        ValueError,
        "clip_norm is None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused(name: str):
    act, error, sentence = REFUSED[name]
    model, optimizer = made()
    with pytest.raises(error, match=sentence):
        act(model, optimizer)
    assert optimizer.release is None
    train(model, optimizer)
    assert_same((model, optimizer), ordinary())


def test_release_is_not_enabled_twice():
    model, optimizer = made()
    handle = enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeError, match="on for this optimizer already; call remove"):
        enable_gradient_release(model, optimizer)
    other = FlashAdamW(model.parameters(), eager=True)
    with pytest.raises(RuntimeError, match="already stepped by the release of another optimizer"):
        enable_gradient_release(model, other)
    handle.remove()
    enable_gradient_release(model, other).remove()


@pytest.mark.parametrize("option", ["skip_nonfinite", "capturable"])
def test_options_that_release_cannot_keep_are_refused(option: str):
    options: dict[str, Any] = {option: True}
    model, optimizer = made(**options)
    with pytest.raises(ValueError, match=f"{option} is True in parameter group 0"):
        enable_gradient_release(model, optimizer)


def test_two_passes_are_not_mistaken_for_one():
    model, optimizer = made()
    before = [each.detach().clone() for each in model.parameters()]
    enable_gradient_release(model, optimizer, clip_norm=1.0, clip_mode="exact")
    with pytest.raises(RuntimeError, match=r"call handle\.backward\(loss\) in place of loss\.backward\(\)"):
        loss_of(model, next(batches(1))).backward()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_scaler_is_asked_once_for_each_update():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    handle = enable_gradient_release(model, optimizer, grad_scaler=scaler)
    x = next(batches(1))
    handle.backward(scaler.scale(loss_of(model, x)))
    after = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(RuntimeError, match="unscale_"):
        handle.backward(scaler.scale(loss_of(model, x)))
    assert all(map(torch.equal, after, model.parameters()))


def test_fsdp1_is_refused():
    class FullyShardedDataParallel(nn.Module):
        """What is looked for is the name: importing the real one takes a second."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model, optimizer = made()
    with pytest.raises(TypeError, match=r"FSDP1.*FSDP2"):
        enable_gradient_release(FullyShardedDataParallel(model), optimizer)


def test_ddp_is_refused_whenever_it_is_made():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        model, optimizer = made()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        with pytest.raises(TypeError, match=r"DistributedDataParallel .* FSDP2"):
            enable_gradient_release(wrapped, optimizer)
        enable_gradient_release(model, optimizer)
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(TypeError, match=r"DistributedDataParallel .* FSDP2"):
            loss_of(wrapped, next(batches(1))).backward()
        assert all(map(torch.equal, before, model.parameters()))
    finally:
        torch.distributed.destroy_process_group()
