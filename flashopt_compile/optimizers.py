"""The optimizers that ship with the library: rules with a constructor."""

from typing import Any, ClassVar

import torch

from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.rule import Rule
from flashopt_compile.rules import adam, adamw, lion, sgd

ADAM_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}
SGD_NAMES = {"m": "momentum_buffer"}


def is_used(group: dict[str, Any], name: str) -> bool:
    """Whether a number is not zero, or not known to be: the host does not read tensors of a capturable group."""
    return (group.get("replayable", False) and isinstance(group[name], torch.Tensor)) or bool(group[name])


class FlashAdamW(FlashOptimizer, rule=adamw.adamw):
    """Drop-in for `torch.optim.AdamW`: 5.13 bytes per parameter beside the gradient, for a bf16 model."""

    torch_names: ClassVar[dict[str, str]] = ADAM_NAMES
    namesake: ClassVar[type[Any] | None] = torch.optim.AdamW


class FlashAdam(FlashOptimizer, rule=adam.adam):
    """Drop-in for `torch.optim.Adam`: 5.13 bytes per parameter beside the gradient, for a bf16 model."""

    decays_by_penalty = True
    torch_names: ClassVar[dict[str, str]] = ADAM_NAMES
    namesake: ClassVar[type[Any] | None] = torch.optim.Adam

    @classmethod
    def rule_of(cls, group: dict[str, Any]) -> Rule:
        # Without decay the two are the same; but AdamW's moments, which are gone through twice, need no weights.
        return adam.adam if is_used(group, "weight_decay") else adamw.adamw


class FlashLion(FlashOptimizer, rule=lion.lion):
    """Lion: 4.06 bytes per parameter beside the gradient, for a bf16 model."""

    torch_names: ClassVar[dict[str, str]] = ADAM_NAMES


class FlashSGD(FlashOptimizer, rule=sgd.sgd_momentum, nesterov=False):
    """Drop-in for `torch.optim.SGD`: with momentum 4.06 bytes per parameter beside the gradient, without it 3."""

    decays_by_penalty = True
    torch_names: ClassVar[dict[str, str]] = SGD_NAMES
    namesake: ClassVar[type[Any] | None] = torch.optim.SGD

    @classmethod
    def rule_of(cls, group: dict[str, Any]) -> Rule:
        if not is_used(group, "momentum") or not is_used(group, "weight_decay"):
            return FlashSGDW.rule_of(group)  # the same, but with moments that need no weights, as in FlashAdam
        return sgd.sgd_nesterov if group["nesterov"] else sgd.sgd_momentum


class FlashSGDW(FlashOptimizer, rule=sgd.sgdw_momentum, nesterov=False):
    """SGD with decoupled weight decay: w ← w − lr·(momentum + weight_decay·w)."""

    torch_names: ClassVar[dict[str, str]] = SGD_NAMES

    @classmethod
    def rule_of(cls, group: dict[str, Any]) -> Rule:
        if not is_used(group, "momentum"):
            return sgd.sgd
        return sgd.sgdw_nesterov if group["nesterov"] else sgd.sgdw_momentum
