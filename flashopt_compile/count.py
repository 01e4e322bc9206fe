"""How many steps each parameter has taken: a tensor of its own for each, counted up together."""

import ctypes
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def all_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they are the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


class Count:
    """The steps of parameters that step together, which become views of one tensor.

    They are counted up in its memory itself: of what a step does for one parameter, an operation of torch would be one
    of the longest.
    """

    def __init__(self, steps: tuple[Tensor, ...]) -> None:
        self._steps = steps
        self._all = torch.stack([step.to("cpu", torch.float32) for step in steps])
        for step, place in zip(steps, self._all, strict=True):
            step.data = place
        self._pointers = list(map(Tensor.data_ptr, steps))  # to notice if one is moved
        self._memory = (ctypes.c_float * len(steps)).from_address(self._all.data_ptr())

    def is_of(self, steps: tuple[Tensor, ...]) -> bool:
        """Whether these are the steps that it counts."""
        return all_same(self._steps, steps)

    def taken(self) -> list[float]:
        """What each has come to."""
        return self._memory[:]

    def up(self) -> bool:
        """Add one to each; or do nothing, and return false, if any is no longer where it was put."""
        for number, step in enumerate(self._steps):
            if step.data_ptr() != self._pointers[number]:
                return False
        for number in range(len(self._pointers)):
            self._memory[number] += 1
        return True
