"""What is compared: an exact optimizer in fp32, ours, controls that are known to be worse, and other packages."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.peers import bitsandbytes_adamw, lion_by_, torchao_adamw
from bench.quality.controls import HALF_SCALES, LINEAR_CODES, NEAREST_CODES
from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, cast_model

Make = Callable[..., Any]


class Lion(Optimizer):
    """Lion in fp32, as the paper has it; torch.optim has none."""

    def __init__(self, params: Iterable[nn.Parameter], **numbers: Any) -> None:
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            numbers = {name: group[name] for name in ("lr", "betas", "weight_decay")}
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("m", torch.zeros_like(weight))
                lion_by_(weight, weight.grad, momentum, **numbers)


@dataclass(frozen=True)
class Contender:
    """An optimizer, and the dtype of its model. `module` is set if it may not be installed."""

    name: str
    role: str  # "exact", "ours", "control" or "peer"
    make: Make
    dtype: torch.dtype = torch.bfloat16
    module: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.module or importlib.util.find_spec(self.module) is not None

    def begin(self, model: nn.Module, numbers: dict[str, Any]) -> Optimizer:
        """Cast the fp32 model, and make the optimizer of its weights. Ours takes over the exact fp32 weights."""
        exact = {name: value.detach() for name, value in model.state_dict().items()}
        if self.dtype != torch.float32:
            cast_model(model, self.dtype)
        optimizer = self.make([weight for weight in model.parameters() if weight.requires_grad], **numbers)
        if isinstance(optimizer, FlashOptimizer):
            optimizer.set_fp32_model_state_dict(model, exact)
        return optimizer


def stored_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The weights to all their bits, in fp32: tails included, if there are any."""
    if isinstance(optimizer, FlashOptimizer):
        return optimizer.get_fp32_model_state_dict(model)
    return {name: value.detach().float() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class Family:
    """An exact optimizer and ours, with the numbers that both get."""

    name: str
    exact: Contender
    ours: Contender
    numbers: dict[str, Any]


def family(name: str, exact: tuple[str, Make], ours: type[FlashOptimizer], **numbers: Any) -> Family:
    label, make = exact
    theirs = Contender(label, "exact", make, torch.float32)
    return Family(name, theirs, Contender(ours.__name__, "ours", ours), numbers)


ADAMW = family("AdamW", ("torch AdamW, fp32", torch.optim.AdamW), FlashAdamW, betas=(0.9, 0.999), weight_decay=0.01)
LION = family("Lion", ("Lion, fp32", Lion), FlashLion, betas=(0.9, 0.99), weight_decay=0.1)
SGD = family("SGD", ("torch SGD, fp32", torch.optim.SGD), FlashSGD, momentum=0.9, weight_decay=1e-4)

PURE_BF16 = Contender("torch AdamW, pure bf16", "control", torch.optim.AdamW)
LINEAR = Contender("linear 8-bit codes", "control", LINEAR_CODES)
NEAREST = Contender("states rounded to nearest", "control", NEAREST_CODES)
FP16_SCALES = Contender("fp16 scales", "control", HALF_SCALES)
NO_TAIL = Contender("no tail, dithered", "control", partial(FlashAdamW, master_weight_bits=None))
NO_TAIL_NEAREST = Contender(
    "no tail, rounded to nearest", "control", partial(FlashAdamW, master_weight_bits=None, rounding="nearest")
)
CONTROLS = (PURE_BF16, LINEAR, FP16_SCALES, NO_TAIL, NO_TAIL_NEAREST, NEAREST)
PEERS = (
    Contender("torchao AdamW8bit", "peer", partial(torchao_adamw, bf16_stochastic_round=True), module="torchao"),
    Contender("bitsandbytes AdamW8bit", "peer", bitsandbytes_adamw, module="bitsandbytes"),
)
