"""How many steps each parameter has taken: a tensor of its own for each, counted up together."""

import operator
from typing import NamedTuple

import torch
from torch import Tensor


def all_same(tensors: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether they are the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


class Count(NamedTuple):
    """The steps of parameters that step together, which are views of one tensor: one addition does for all."""

    steps: tuple[Tensor, ...]
    all: Tensor
    pointers: list[int]  # of each, to notice if one is moved

    @classmethod
    def of(cls, steps: tuple[Tensor, ...]) -> "Count":
        """Move the steps to memory that they share."""
        together = torch.stack(steps)
        for step, place in zip(steps, together, strict=True):
            step.data = place
        return cls(steps, together, list(map(Tensor.data_ptr, steps)))

    def is_of(self, steps: tuple[Tensor, ...]) -> bool:
        return all_same(self.steps, steps) and list(map(Tensor.data_ptr, steps)) == self.pointers

    @classmethod
    def up(cls, count: "Count | None", steps: tuple[Tensor, ...]) -> "Count":
        """Add one to each of `steps`, of which `count` was given the last time; what to give the next time."""
        if count is None or not count.is_of(steps):
            count = cls.of(steps)
        count.all.add_(1)
        return count
