"""Steps by a planner alone, without an optimizer, and kernels that record their arguments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Bound, ComputedKernel, Copying, Kernel, Kernels, run_at_once
from flashopt_compile.engine.layout import Block, Layout, Part
from flashopt_compile.engine.planner import Item, Planner
from flashopt_compile.engine.step import Numbers, Place, Step


def item_of(step: Step, tensors: Sequence[Tensor], t: Tensor, numbers: Numbers, layout: Layout | None = None) -> Item:
    """A parameter to step. `tensors` holds head, gradient and parts in storage order."""
    head, grad, *rest = tensors
    parts = [Part(tensor, is_scale) for tensor, is_scale in zip(rest, step.storage.scales[1:], strict=True)]
    layout = Layout.of(step.storage, head.shape) if layout is None else layout
    return Item(step, layout, head, grad, parts, t, t.item() - 1, numbers)


def carry_out(kernels: Kernels, items: Sequence[Item]) -> Planner:
    """Plan a step of all items and take it."""
    planner = Planner(kernels, items)
    heads, grads = [item.head for item in items], [item.grad for item in items]
    for stage in planner.stages():
        run_at_once([operation for call in stage.calls for operation in call.operations(heads, grads)])
    return planner


def step_by_blocks(step: Step, tensors: Sequence[Tensor], t: Tensor, numbers: Numbers, start: int = 0) -> None:
    """The simplest step: block by block of the storage, without a planner."""
    for first, block in step.storage.blocks(tuple(tensors[0].shape), tensors):
        step(block, t, Place.at(start + first), numbers)


def eager_of_width(groups: int = 1, most_elements: int = 1 << 22) -> Kernels:
    """Uncompiled kernels whose pieces are `groups` groups wide."""

    def kernels(step: Step, *_: Any) -> Kernel:
        return ComputedKernel(
            lambda *given: step.compute(*given)[0], groups * step.storage.group_size, most_elements=most_elements
        )

    return kernels


@dataclass
class Watched:
    """Kernels that record each block they are bound to, its numbers and its step count."""

    kernels: Kernels
    blocks: list[Block] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def __call__(self, *kind: Any) -> Kernel:
        kernel: Any = self.kernels(*kind)
        return _WatchedKernel(kernel, self)

    @property
    def elements(self) -> list[int]:
        return [rows * count * width for rows, count, width in (block.shape for block in self.blocks)]


class _WatchedKernel:
    def __init__(self, kernel: Kernel, seen: Watched) -> None:
        self._kernel, self._seen = kernel, seen
        self.width, self.most_elements = kernel.width, kernel.most_elements
        self.is_deferred, self.whole = kernel.is_deferred, kernel.whole

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound:
        self._seen.blocks.append(block)
        self._seen.numbers.append(numbers)
        self._seen.counts.append(t.item())
        return self._kernel.bind(block, t, numbers)

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        return self._kernel.copying(target, source)


def with_calls_of(kernels: Kernels, most_elements: int) -> Kernels:
    """The same kernels, called with at most `most_elements` elements."""

    def smaller(*kind: Any) -> Kernel:
        kernel: Any = kernels(*kind)
        return replace(kernel, most_elements=most_elements)

    return smaller


def clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [torch.clone(tensor) for tensor in tensors]
