"""Gradients of micro-batches, summed in 24 bits: a bf16 head and an 8-bit tail for each element.

A sum is stored as a weight is, and a gradient is added by a step of the engine whose rule is w + g.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.distributed import shards
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.rule import Moved, rule
from quant.split import Split

STORED = Split(torch.bfloat16, torch.int8)


@rule()
def plus(w, g, t, *, lr=1.0):
    return (Moved(w, lr * g),)


class _Adder(FlashOptimizer, rule=plus):
    """Adds gradients to sums."""


class Sums:
    """The sums of some parameters' gradients, of what this process has of them."""

    def __init__(self, parameters: Iterable[Tensor], eager: bool) -> None:
        self._parameters = {id(each): each for each in parameters}
        self._eager = eager
        self._heads: dict[int, Tensor] = {}
        self._adder: Any = None
        self._begun: dict[int, Tensor] = {}  # the parameters whose sums are not zero

    @property
    def begun(self) -> list[Tensor]:
        """The parameters that have something summed up."""
        return list(self._begun.values())

    def has(self, parameter: Tensor) -> bool:
        return id(parameter) in self._begun

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of some parameters to their sums."""
        if not self._heads:
            self._make()
        heads = [self._heads[id(each)] for each in parameters]
        for head, parameter in zip(heads, parameters, strict=True):
            head.grad = head.detach()  # replaced at once, as torch allows other dtypes only so
            head.grad.data = shards.part_of(parameter.grad, parameter)
        try:
            self._adder.selections.step(heads)
        finally:
            for head in heads:
                head.grad = None
        self._begun |= {id(each): each for each in parameters}

    @torch.no_grad()
    def total(self, parameter: Tensor) -> Tensor:
        """A copy of a parameter's sum, sharded as it is, in the dtype of its gradients."""
        head = self._heads[id(parameter)]
        if parameter.dtype == torch.bfloat16:  # a head is its sum, rounded
            summed = head.detach().clone()
        else:
            summed = STORED.decode(head.detach(), self._adder.state[head]["tail"]).to(parameter.dtype)
        return shards.as_sharded(summed, parameter)

    @torch.no_grad()
    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Set sums to zero."""
        for each in parameters:
            if self._begun.pop(id(each), None) is not None:
                head = self._heads[id(each)]
                head.detach().zero_()
                self._adder.state[head]["tail"].zero_()

    @property
    def bytes(self) -> int:
        """What they take, whether begun or not."""
        return 0 if self._adder is None else self._adder.memory()["total"] + self._adder.memory()["plan"]

    def _make(self) -> None:
        with torch.inference_mode(False):
            for key, each in self._parameters.items():
                own = shards.local(each).detach()
                self._heads[key] = torch.zeros(own.shape, dtype=torch.bfloat16, device=own.device, requires_grad=True)
            heads = list(self._heads.values())
            self._adder = _Adder(heads, rounding="nearest", eager=self._eager)
