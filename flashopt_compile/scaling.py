"""Between torch.amp.GradScaler and a step: whether it may happen, and by what its gradients are to be multiplied.

Gradients of other dtypes the scaler unscales itself, in place, and skips the step itself. It refuses to do so in fp16,
which would round small gradients to zero: those the step unscales, in fp32, where it reads them anyway.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.distributed import shards
from flashopt_compile.options import check_grad_scale


def needs_unscaling(parameters: Iterable[Tensor]) -> bool:
    """Whether a gradient is in fp16, which GradScaler refuses to unscale."""
    return any(each.grad is not None and each.grad.dtype == torch.float16 for each in parameters)


def is_scaled(optimizer: Any) -> bool:
    """Whether a scaler has left the gradients scaled: it sets two attributes before a step, and deletes them after."""
    return hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")


def take(optimizer: Any, step: Callable[[float | None], None]) -> None:
    """Step with the inverse of the scale, unless a gradient is Inf or NaN on any process."""
    owner, attributes = type(optimizer).__name__, vars(optimizer)
    try:
        scale = attributes.get("grad_scale")
        check_grad_scale(owner, scale, optimizer.param_groups)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not shards.any_process(bool(attributes.get("found_inf", False)), parameters):
            step(None if scale is None else 1.0 / float(scale))
    except BaseException:
        if attributes.pop("found_inf", None) is not None:
            del attributes["grad_scale"]  # by which the scaler would multiply that of the next step
        raise
