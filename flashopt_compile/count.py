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
    of the longest. `taken` is what they have come to.
    """

    def __init__(self, steps: tuple[Tensor, ...]) -> None:
        self._steps = steps
        self._all = torch.stack([step.to("cpu", torch.float32) for step in steps])
        for step, place in zip(steps, self._all, strict=True):
            step.data = place
        self._pointers = list(map(Tensor.data_ptr, steps))  # to notice if one is moved
        self._memory = (ctypes.c_float * len(steps)).from_address(self._all.data_ptr())
        self.taken: list[float] = []

    def is_of(self, steps: tuple[Tensor, ...]) -> bool:
        return all_same(self._steps, steps) and list(map(Tensor.data_ptr, steps)) == self._pointers

    def up(self) -> None:
        """Add one to each."""
        self._memory[:] = [step + 1 for step in self._memory]
        self.taken = self._memory[:]

    def up_if_untouched(self) -> bool:
        """Add one to each; or do nothing if anyone has moved or set one since the last time."""
        memory, taken = self._memory, self.taken
        for number, (step, pointer) in enumerate(zip(self._steps, self._pointers, strict=True)):
            if step.data_ptr() != pointer or memory[number] != taken[number]:
                return False
        for number, step in enumerate(taken):
            memory[number] = taken[number] = step + 1
        return True
