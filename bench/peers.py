"""The contenders of `bench.speed`: our optimizers, torch's and other packages', each made ready to step.

All get the same hyper-parameters, the same shapes, and values like a trained network's. Packages are imported by
name, only when their turn comes: none is needed to run the others, or to check the types of this file.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flashopt_compile import FlashAdamW, FlashLion, FlashSGD

Shapes = Sequence[tuple[int, ...]]

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
LION: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.01}
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
RANDOM_VALUES = 2**20  # repeated in larger tensors, which would take longer to fill than to measure


class Stepping(Protocol):
    def step(self) -> Any: ...


Maker = Callable[[list[nn.Parameter]], Stepping]


@dataclass(frozen=True)
class Runner:
    """A contender ready to step. `renew` sets its gradients, which some contenders clear; then `step` is timed."""

    weights: Sequence[Tensor]
    renew: Callable[[], None]
    step: Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """Builds a runner for given shapes. `package` and `module` are set if it may not be installed."""

    name: str
    build: Callable[[Shapes, torch.device], Runner]
    package: str = ""
    module: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.module or importlib.util.find_spec(self.module) is not None


def random_tensors(shapes: Shapes, spread: float, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    values = (spread * torch.randn(RANDOM_VALUES, generator=random)).to(device, dtype)
    sizes = [math.prod(shape) for shape in shapes]
    return [
        values.repeat(-(-size // RANDOM_VALUES))[:size].reshape(shape)
        for size, shape in zip(sizes, shapes, strict=True)
    ]


def weights_and_gradients(
    shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[list[nn.Parameter], list[Tensor]]:
    weights = [nn.Parameter(weight.clone()) for weight in random_tensors(shapes, 0.02, dtype, device)]
    return weights, [gradient.clone() for gradient in random_tensors(shapes, 1e-3, dtype, device)]


def put_in_place(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def alone(make: Maker, shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Runner:
    """The optimizer on parameters of one dtype, with nothing around it."""
    weights, gradients = weights_and_gradients(shapes, dtype, device)
    return Runner(weights, partial(put_in_place, weights, gradients), make(weights).step)


def mixed(make: Maker, shapes: Shapes, device: torch.device) -> Runner:
    """Mixed precision: copy bf16 gradients to fp32, step fp32 masters, copy them to the bf16 weights."""
    weights, gradients = weights_and_gradients(shapes, torch.bfloat16, device)
    heads = [weight.detach() for weight in weights]
    masters = [nn.Parameter(head.float()) for head in heads]
    values = [master.detach() for master in masters]
    master_gradients = [torch.zeros_like(master) for master in masters]
    put_in_place(masters, master_gradients)
    optimizer = make(masters)

    @torch.no_grad()
    def step() -> None:
        foreach_copy_(master_gradients, gradients)
        optimizer.step()
        foreach_copy_(heads, values)

    return Runner(weights, partial(put_in_place, weights, gradients), step)


def lion_by_(w: Tensor, g: Tensor, m: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """A step of Lion in fp32 (algorithm 2 of Chen et al., 2023), in place."""
    b1, b2 = betas
    w.copy_((1 - lr * weight_decay) * w - lr * (b1 * m + (1 - b1) * g).sign())
    m.copy_(b2 * m + (1 - b2) * g)


def lion_(w: Tensor, g: Tensor, m: Tensor) -> None:
    lion_by_(w, g, m, **LION)


def lion_with_copies_(head: Tensor, gradient: Tensor, w: Tensor, m: Tensor) -> None:
    lion_(w, gradient.float(), m)
    head.copy_(w)


class CompiledLion:
    """Lion in plain PyTorch, compiled by torch.compile with sizes and hyper-parameters as constants."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.momenta = [torch.zeros_like(weight) for weight in params]
        self.update = torch.compile(lion_, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self) -> None:
        for weight, momentum in zip(self.params, self.momenta, strict=True):
            assert weight.grad is not None
            self.update(weight.detach(), weight.grad, momentum)


def lion_in_one(shapes: Shapes, device: torch.device) -> Runner:
    """`mixed` with its copies inside the compiled kernel: the least memory traffic possible with fp32 masters."""
    weights, gradients = weights_and_gradients(shapes, torch.bfloat16, device)
    masters = [weight.detach().float() for weight in weights]
    momenta = [torch.zeros_like(master) for master in masters]
    update = torch.compile(lion_with_copies_, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step() -> None:
        for each in zip(weights, gradients, masters, momenta, strict=True):
            update(*each)

    return Runner([weight.detach() for weight in weights], lambda: None, step)


def torchao_adamw(params: list[nn.Parameter], **numbers: Any) -> Stepping:
    return importlib.import_module("torchao.optim").AdamW8bit(params, **ADAMW | numbers)


def bitsandbytes_adamw(params: list[nn.Parameter], **numbers: Any) -> Stepping:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, **ADAMW | numbers)


def heavyball_adamw(params: list[nn.Parameter]) -> Stepping:
    return importlib.import_module("heavyball").AdamW(params, ecc="bf16+8", param_ecc="bf16+8", **ADAMW)


def optimi_adamw(params: list[nn.Parameter]) -> Stepping:
    return importlib.import_module("optimi").AdamW(params, kahan_sum=True, **ADAMW)


def flashoptim_adamw(params: list[nn.Parameter]) -> Stepping:
    return importlib.import_module("flashoptim").FlashAdamW(params, **ADAMW)


OUR_ADAMW = Contender("FlashAdamW", partial(alone, lambda params: FlashAdamW(params, **ADAMW)))
OUR_SGD = Contender("FlashSGD", partial(alone, lambda params: FlashSGD(params, **SGD)))
OUR_LION = Contender("FlashLion", partial(alone, lambda params: FlashLion(params, **LION)))

MIXED_ADAMW = Contender(
    "torch AdamW, fused, mixed", partial(mixed, lambda params: torch.optim.AdamW(params, fused=True, **ADAMW))
)
FP32_ADAMW = Contender(
    "torch AdamW, fused, all fp32",
    partial(alone, lambda params: torch.optim.AdamW(params, fused=True, **ADAMW), dtype=torch.float32),
)
FOREACH_ADAMW = Contender(
    "torch AdamW, foreach, mixed", partial(mixed, lambda params: torch.optim.AdamW(params, foreach=True, **ADAMW))
)
MIXED_SGD = Contender(
    "torch SGD, fused, mixed", partial(mixed, lambda params: torch.optim.SGD(params, fused=True, **SGD))
)
MIXED_LION = Contender("compiled Lion, mixed", partial(mixed, CompiledLion))
MIXED_LION_IN_ONE = Contender("compiled Lion and copies, mixed", lion_in_one)

TORCHAO = Contender("torchao AdamW8bit", partial(alone, torchao_adamw), "torchao", "torchao")
BITSANDBYTES = Contender("bitsandbytes AdamW8bit", partial(alone, bitsandbytes_adamw), "bitsandbytes", "bitsandbytes")
HEAVYBALL = Contender("heavyball AdamW, ecc bf16+8", partial(alone, heavyball_adamw), "heavyball", "heavyball")
OPTIMI = Contender("optimi AdamW, bf16 with Kahan", partial(alone, optimi_adamw), "torch-optimi", "optimi")
FLASHOPTIM = Contender("published FlashOptim AdamW", partial(alone, flashoptim_adamw), "flashoptim", "flashoptim")
PEERS = (TORCHAO, BITSANDBYTES, HEAVYBALL, OPTIMI, FLASHOPTIM)


def resnet_shapes(convolutions: int) -> Shapes:
    """A ResNet for small images. Each stage has `convolutions` 3×3 ones with norms; 33 make 300 tensors."""
    shapes: list[tuple[int, ...]] = []
    inputs = 3
    for width in (16, 32, 64):
        for _ in range(convolutions):
            shapes += [(width, inputs, 3, 3), (width,), (width,)]
            inputs = width
    return [*shapes, (16,), (100, 64), (100,)]  # the first convolution's bias, and the classifier
