"""What gradient release refuses, in one sentence each, before anything is attached."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.options import one_line

OWNER = "enable_gradient_release"
DDP = (
    "DistributedDataParallel keeps all gradients in its buckets, so that releasing them would free nothing, and "
    "reduces them after parameters would be stepped; shard the model with FSDP2 (torch.distributed.fsdp.fully_shard) "
    "or do without gradient release."
)


def released(
    model: Any, optimizer: Any, pre_step: Any, two_passes: bool, is_taken: Callable[[Tensor], bool]
) -> Sequence[Tensor]:
    """The parameters of the model that the optimizer trains."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OWNER}: model is a {type(model).__name__}; allowed is a torch.nn.Module.")
    if not isinstance(optimizer, FlashOptimizer):
        raise TypeError(f"{OWNER}: optimizer is a {type(optimizer).__name__}; allowed is one of this library.")
    if pre_step is not None and not callable(pre_step):
        raise TypeError(f"{OWNER}: pre_step is {one_line(pre_step)}; allowed is a function (parameter, group).")
    check_wrappers(model)
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    parameters = [each for each in model.parameters() if id(each) in own and each.requires_grad]
    if not parameters:
        raise ValueError(f"{OWNER}: model and optimizer share no parameter that is trained; allowed are those that do.")
    if optimizer.release is not None:
        raise RuntimeError(f"{OWNER}: release is on for this optimizer already; call remove() of its handle first.")
    if any(map(is_taken, parameters)):
        raise RuntimeError(
            f"{OWNER}: parameters of the model are already stepped by the release of another optimizer; call remove() "
            "of that handle first."
        )
    for number, group in enumerate(optimizer.param_groups):
        if group["replayable"]:
            raise ValueError(
                f"{OWNER}: capturable is True in parameter group {number}; allowed is False, as each parameter is "
                "stepped from a hook, which no CUDA graph records."
            )
        if group["skip_nonfinite"] and not two_passes:
            raise ValueError(
                f"{OWNER}: skip_nonfinite is True in parameter group {number}, and when a gradient is seen to be Inf, "
                "others have been stepped already; allowed is False, or clip_mode='exact' or a grad_scaler, which "
                "look at all gradients first."
            )
    return parameters


def check_wrappers(model: nn.Module) -> None:
    """Raise TypeError if part of the model is wrapped by what cannot work with release."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(f"{OWNER}: {DDP}")
        if any(each.__name__ == "FullyShardedDataParallel" for each in type(module).__mro__):
            raise TypeError(
                f"{OWNER}: the model is wrapped in FullyShardedDataParallel (FSDP1), which frees and replaces its "
                "gradients itself; use FSDP2, torch.distributed.fsdp.fully_shard."
            )


def check_replicas(parameters: Sequence[Tensor]) -> None:
    """Raise TypeError if a DistributedDataParallel that was made later, or around part of a model, has a parameter."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    own = set(map(id, parameters))
    for each in gc.get_objects():
        if type(each) is DistributedDataParallel and not own.isdisjoint(map(id, each.parameters())):
            raise TypeError(f"{OWNER}: {DDP}")
