"""Gradient clipping, in the arithmetic of torch.nn.utils: norms of parameters → total norm → factor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.distributed import shards
from flashopt_compile.options import is_positive, one_line

MODES = ("previous", "exact")


@dataclass(frozen=True)
class Clipping:
    """What a gradient is clipped to, in this order: each value, the norm of each parameter, the norm of all."""

    value: float | None = None
    param_norm: float | None = None
    norm: float | None = None
    mode: str = "previous"

    def check(self, owner: str) -> None:
        """Raise ValueError for the first argument that is not allowed."""
        given = {"clip_norm": self.norm, "clip_value": self.value, "clip_param_norm": self.param_norm}
        for name, limit in given.items():
            if limit is not None and not is_positive(limit):
                raise ValueError(f"{owner}: {name} is {one_line(limit)}; allowed is a number above 0, or None.")
        if self.mode not in MODES:
            raise ValueError(f"{owner}: clip_mode is {one_line(self.mode)}; allowed is 'previous' or 'exact'.")
        if self.mode == "exact" and self.norm is None:
            raise ValueError(f"{owner}: clip_mode is 'exact' and clip_norm is None; allowed is a number above 0.")

    @property
    def is_exact(self) -> bool:
        return self.mode == "exact"

    def alone(self, grads: Sequence[Tensor]) -> None:
        """Clip each gradient by what is known of it alone. They are this process's, or sharded."""
        own = list(map(shards.local, grads))
        if self.value is not None:
            torch._foreach_clamp_min_(own, -self.value)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_max_(own, self.value)  # pyright: ignore[reportPrivateImportUsage]
        if self.param_norm is not None:
            for grad, each in zip(grads, own, strict=True):
                scale([each], factor(self.param_norm, total(norms([grad]))))


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, in its dtype, as torch's clipping has it."""
    return list(torch._foreach_norm(list(grads), 2.0))  # pyright: ignore[reportPrivateImportUsage]


def total(each: Sequence[Any]) -> Tensor:
    """The norm of all gradients from the norms of each. If these are sharded, all processes must call."""
    kinds: dict[Any, list[Any]] = {}
    for norm in each:
        kinds.setdefault((norm.device, norm.dtype), []).append(norm)
    ordered = [norm for kind in kinds.values() for norm in kind]
    if shards.any_sharded(ordered) and not all(map(shards.is_sharded, ordered)):
        ordered = list(map(shards.whole, ordered))
    first = ordered[0].device
    return shards.whole(torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in ordered]), 2.0))


def factor(limit: float, norm: Tensor) -> Tensor:
    """What gradients are multiplied by."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def scale(grads: Sequence[Tensor], by: Tensor) -> None:
    """Multiply gradients in place."""
    for device in {grad.device for grad in grads}:
        own = [grad for grad in grads if grad.device == device]
        torch._foreach_mul_(own, by.to(device))  # pyright: ignore[reportPrivateImportUsage]
