"""The layout of groups in a tensor: rows of whole groups, each possibly ending in a short one.

Groups run along rows and never cross one, so cutting a tensor between rows never cuts a group. Everything that works
on groups (steps on CPUs and GPUs, traced steps, `quantize`) cuts tensors by `Span`s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """The columns `first` to `last` of every row, of a tensor that is `rows` × `columns`."""

    rows: int
    columns: int
    first: int
    last: int

    @property
    def elements(self) -> int:
        return self.rows * (self.last - self.first)

    def of_elements(self, tensor: Tensor, width: int) -> Tensor:
        """View these elements of a contiguous tensor as (rows, n, width); a span shorter than `width` is one piece."""
        return self._view(tensor, self.columns, self.first, self.last, width)

    def of_scales(self, scales: Tensor, group_size: int, count: int = 1) -> Tensor:
        """View the scales of these elements' groups as (rows, n, count)."""
        first, last = self.first // group_size, -(-self.last // group_size)
        return self._view(scales, -(-self.columns // group_size), first, last, count)

    def _view(self, tensor: Tensor, columns: int, first: int, last: int, width: int) -> Tensor:
        taken = tensor.view(self.rows, columns)[:, first:last]
        return taken.unflatten(1, (-1, min(width, last - first)))


def spans(rows: int, columns: int, width: int) -> list[Span]:
    """Cut every row in two: as many whole pieces of `width` as it has, and the rest; either may be missing."""
    whole = columns - columns % width
    cuts = (Span(rows, columns, 0, whole), Span(rows, columns, whole, columns))
    return [span for span in cuts if span.elements]


@dataclass(frozen=True)
class Rows:
    """A tensor as rows of groups: the trailing dims from `start` on form a row of `columns` elements.

    `start` is the largest index ≥ 1 whose trailing dims hold a whole group, else 1 (0 for a vector).
    """

    shape: tuple[int, ...]
    group_size: int

    @property
    def start(self) -> int:
        start = max(len(self.shape) - 1, 0)
        while start > 1 and math.prod(self.shape[start:]) < self.group_size:
            start -= 1
        return start

    @property
    def count(self) -> int:
        return math.prod(self.shape[: self.start])

    @property
    def columns(self) -> int:
        return math.prod(self.shape[self.start :])

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.start], -(-self.columns // self.group_size))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns. Rows of whole groups form one long row, as their groups are contiguous."""
        if self.columns % self.group_size == 0:
            return 1, self.count * self.columns
        return self.count, self.columns

    @property
    def spans(self) -> list[Span]:
        """The whole groups of all rows, and the short groups at their ends."""
        return spans(*self.grid, self.group_size)

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """Views of a contiguous tensor of `shape`, one for each of `spans`. Their last dim is one group."""
        return [_squeezed(span.of_elements(tensor, self.group_size)) for span in self.spans]

    def scale_blocks(self, scales: Tensor) -> list[Tensor]:
        """The scales of each of `blocks`, with a last dim of 1."""
        return [_squeezed(span.of_scales(scales, self.group_size)) for span in self.spans]

    @property
    def starts(self) -> Sequence[int]:
        """The position in the tensor of the first element of each of `blocks`."""
        return [span.first for span in self.spans]


def _squeezed(block: Tensor) -> Tensor:
    """Drop a first or middle dim of 1, on which compilers would specialize."""
    if block.shape[0] == 1:
        return block.squeeze(0)
    return block.squeeze(1) if block.shape[1] == 1 else block
