"""Worse ways to store AdamW's states and weights. Each differs from ours in one thing alone.

A study that cannot tell these from the exact optimizer would prove nothing about ours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashopt_compile import FlashOptimizer, rule
from flashopt_compile.rules.adamw import adamw
from quant import ROOT8, SIGNED8
from quant.compand import LINEAR
from quant.format import Format, Part
from quant.grouped import Grouped
from quant.ulp import largest, whole


@dataclass(frozen=True)
class Nearest(Grouped):
    """Codes rounded to the nearest, never dithered."""

    def encode(
        self, x: Tensor, noise: Tensor | None = None, groups: int = 1, for_gcc: bool = False
    ) -> tuple[Tensor, Tensor]:
        return super().encode(x, None, groups, for_gcc)


@dataclass(frozen=True)
class HalfScales(Grouped):
    """Scales in fp16, which knows nothing between 0 and 6e-8. Groups below that decode to zeros."""

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        parts = super().parts(shape)
        return parts | {"scales": Part(parts["scales"].shape, torch.float16)}

    def encode(
        self, x: Tensor, noise: Tensor | None = None, groups: int = 1, for_gcc: bool = False
    ) -> tuple[Tensor, Tensor]:
        scale = largest(x, groups, for_gcc).to(torch.float16)
        divisor = torch.where(scale > 0, scale.to(torch.float32), 1.0)
        codes = whole(self._compress(x, divisor), -self.levels, self.levels, noise, for_gcc=for_gcc)
        return codes.to(self.dtype), scale


def adamw_storing(m: Format, v: Format) -> type[FlashOptimizer]:
    """FlashAdamW, but for the formats of its moments."""

    class Storing(FlashOptimizer, rule=rule(m=m, v=v)(adamw.function)):
        """A control."""

    return Storing


LINEAR_CODES = adamw_storing(Grouped(LINEAR), Grouped(LINEAR, signed=False))
NEAREST_CODES = adamw_storing(Nearest(SIGNED8.compander), Nearest(ROOT8.compander, signed=False))
HALF_SCALES = adamw_storing(HalfScales(SIGNED8.compander), HalfScales(ROOT8.compander, signed=False))
