"""The engine's view of a kernel: it takes blocks of one width and is bound to a block before it is called."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flashopt_compile.engine.layout import Block
from flashopt_compile.engine.step import Numbers, Step

# A call with all its arguments, to be made when the step is carried out.
Operation = partial[Any]
# Head and gradient, beginning where the block does → what steps the block.
Bound = Callable[[Tensor, Tensor], list[Operation]]
# Target and source → what copies the source to the target.
Copying = Callable[[Tensor, Tensor], list[Operation]]
# The tensors of a parameter (head, gradient, then the rest), the position of its first element, step count, numbers.
WholeStep = Callable[[Sequence[Tensor], int, Tensor, Numbers], None]


class Kernel(Protocol):
    """Steps blocks (rows, n, `width`) of at most `most_elements`.

    If it `is_deferred`, its operations do all of the work, and none of them runs Python. If not, the work is done when
    they are asked for, and they only store the results.
    """

    @property
    def width(self) -> int: ...

    @property
    def most_elements(self) -> int: ...

    @property
    def is_deferred(self) -> bool: ...

    @property
    def whole(self) -> WholeStep | None:
        """How to step a contiguous parameter in one go, where that is better than in blocks of `width`."""
        ...

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound: ...

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        """How large tensors of these shapes, strides and dtypes are copied, whatever their memory order."""
        ...


# Returns the kernel for a step, given the dtype of gradients, the device and sample numbers.
Kernels = Callable[[Step, torch.dtype, torch.device, Numbers], Kernel]


def run_at_once(operations: Sequence[Operation]) -> None:
    """Carry out all of them, or none.

    Python looks for interrupts (Ctrl-C, exceptions of other threads, trace functions) where it runs Python. Here it
    does not: `deque`, `map` and `partial` are written in C, and so are kernels and torch's copies.
    """
    deque(map(partial.__call__, operations), maxlen=0)


def copies(targets: list[Tensor], sources: Sequence[Tensor]) -> list[Operation]:
    """Copy each source to its target, all in one call."""
    return [partial(torch._foreach_copy_, targets, list(sources))] if targets else []  # pyright: ignore[reportPrivateImportUsage]


def copied_by_torch(target: Tensor, source: Tensor) -> list[Operation]:
    return copies([target], [source])


@dataclass(frozen=True)
class ComputedKernel:
    """Computes new parts, by a function like `Step.compute`, and stores them in the end."""

    compute: Callable[..., Sequence[Tensor]]
    width: int
    most_elements: int = 1 << 22
    is_deferred: bool = False
    whole: WholeStep | None = None

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound:
        def run(head: Tensor, grad: Tensor) -> list[Operation]:
            head = block.view(head.detach())  # compilers mind what a tensor is a view of
            parts = self.compute([head, block.view(grad), *block.rest], t, block.place, numbers)
            return copies([head, *block.rest], parts)

        return run

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        return copied_by_torch


def eager(step: Step) -> ComputedKernel:
    """The step itself, uncompiled."""
    return ComputedKernel(lambda *given: step.compute(*given)[0], step.storage.group_size)
