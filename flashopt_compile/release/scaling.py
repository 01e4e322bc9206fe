"""A GradScaler's part in gradient release: gradients unscaled one by one, and what was found told to the scaler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.distributed import shards
from flashopt_compile.options import one_line


class Scaling:
    """The scaler whose scale is in the gradients of an optimizer, if there is one and it is enabled."""

    def __init__(self, owner: str, optimizer: Any, scaler: Any) -> None:
        if scaler is not None and not all(hasattr(scaler, name) for name in ("is_enabled", "get_scale", "unscale_")):
            raise TypeError(f"{owner}: grad_scaler is {one_line(scaler)}; allowed is a torch.amp.GradScaler.")
        self._optimizer = optimizer
        self._scaler: Any = scaler

    @property
    def is_on(self) -> bool:
        return self._scaler is not None and self._scaler.is_enabled()

    def unscale(self, parameters: Sequence[Tensor]) -> None:
        """Divide gradients by the scale; those in fp16 become fp32, as some of the results are too small for it."""
        inverse = 1.0 / self._scaler.get_scale()
        for each in parameters:
            grad: Any = each.grad
            if grad.dtype == torch.float16:
                grad.data = grad.to(torch.float32)
            shards.local(grad).mul_(inverse)

    def record(self, found: bool, device: torch.device) -> None:
        """Tell the scaler whether a gradient is Inf or NaN: `scaler.step()` and `scaler.update()` go by it.

        The scaler looks at gradients for itself, and has none to look at. For this one call the optimizer has a
        single parameter, with a gradient that shows what was found.
        """
        shown = torch.zeros((), device=device, requires_grad=True)
        shown.grad = torch.full((), torch.inf if found else 0.0, device=device)
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{"params": [shown]}]
        try:
            self._scaler.unscale_(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
