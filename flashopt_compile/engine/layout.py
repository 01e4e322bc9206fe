"""The partitioner: how what a process has of a parameter is cut into the blocks that a kernel takes.

A parameter is `rows` × `columns`, and groups run along rows. A kernel takes blocks of (rows, n, width) elements, where
`width` is one group or a few. Every row is cut into whole pieces of `width` and a rest. The pieces of all rows are
stepped in place, as one block; the rests are copied together into another (`pack`). A small parameter is all rest.

    ┌───────────┬──┐
    │ n × width │  │  rows
    └───────────┴──┘
      in place    rest
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashopt_compile.engine.step import Place, Table
from flashopt_compile.engine.storage import Storage
from quant.dither import phase_of, phases_of
from quant.rows import Span, spans


@dataclass(frozen=True, eq=False)
class Layout:
    """A parameter, or what a process has of one, as rows of groups; and where it lies in the whole parameter.

    `start` is the position of its first element there. If its rows do not follow each other there, `row_starts` has the
    position of each.
    """

    rows: int
    columns: int
    group_size: int
    start: int = 0
    row_starts: Tensor | None = None

    @classmethod
    def of(cls, storage: Storage, shape: Sequence[int], start: int = 0, row_starts: Tensor | None = None) -> "Layout":
        elements = math.prod(shape)
        if row_starts is not None:
            rows, columns = len(row_starts), elements // max(1, len(row_starts))
        elif storage.grouped is None:
            rows, columns = 1, elements
        else:
            rows, columns = storage.grouped.rows(tuple(shape)).grid
        return cls(rows, columns, storage.group_size, start, row_starts)

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_flat(self) -> bool:
        """Whether it is a single row, which has padding only at its end."""
        return self.rows == 1

    def cut(self, first: int, elements: int) -> "Layout":
        """The part of `elements` from the element `first` on: whole rows, or whole groups of the only row."""
        if self.row_starts is not None or not self.is_flat:
            begin, end = first // self.columns, (first + elements) // self.columns
            starts = None if self.row_starts is None else self.row_starts[begin:end]
            return replace(self, rows=end - begin, start=self.start + first, row_starts=starts)
        return replace(self, columns=elements, start=self.start + first)

    def spans(self, width: int) -> list[Span]:
        return spans(self.rows, self.columns, width)

    def starts(self, device: torch.device) -> Tensor:
        """The position of the first element of each row."""
        if self.row_starts is not None:
            return self.row_starts
        return torch.arange(self.rows, dtype=torch.int64, device=device) * self.columns + self.start

    def group_starts(self, span: Span, device: torch.device) -> Tensor:
        """The position of the first element of each group of a span, row by row."""
        groups = torch.arange(span.first, span.last, self.group_size, dtype=torch.int64, device=device)
        return (self.starts(device).unsqueeze(-1) + groups).flatten()


class Part(NamedTuple):
    """A stored tensor of a parameter, with one number per element or per group."""

    tensor: Tensor
    is_scale: bool

    def of_span(self, span: Span, group_size: int, width: int) -> Tensor:
        """Its view (rows, n, ·) of a span that is cut into pieces of `width`."""
        if self.is_scale:
            return span.of_scales(self.tensor, group_size, width // group_size)
        return span.of_elements(self.tensor, width)

    def columns(self, span: Span, group_size: int) -> Tensor:
        """Its view (rows, ·) of a span of any length."""
        first, last, columns = span.first, span.last, span.columns
        if self.is_scale:
            first, last, columns = first // group_size, -(-last // group_size), -(-columns // group_size)
        return self.tensor.view(span.rows, columns)[:, first:last]

    def cut(self, first: int, elements: int, group_size: int, columns: int) -> "Part":
        """The part that belongs to `elements` elements from `first` on, of rows of `columns`."""
        if self.is_scale:
            per_row = -(-columns // group_size)
            first, elements = (n // columns * per_row + -(-(n % columns) // group_size) for n in (first, elements))
        return Part(self.tensor.view(-1)[first : first + elements], self.is_scale)


@dataclass(frozen=True, eq=False)
class Block:
    """What one call of a kernel steps: (rows, n, width) elements, of which row follows row at `stride`.

    `rest` has views of all that is stored but the head. Head and gradient are given to each call anew.
    """

    rest: Sequence[Tensor]
    place: Place
    shape: tuple[int, int, int]
    stride: int
    scale_stride: int

    def view(self, tensor: Tensor) -> Tensor:
        """The block's elements of a head or gradient, given a tensor that begins where the block does."""
        return tensor.as_strided(self.shape, (self.stride, self.shape[-1], 1))


class Tables:
    """Tables of group phases, shared by the blocks of a plan."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, torch.device], Tensor] = {}

    def place(self, starts: Tensor, count: int, group_size: int, groups: int) -> Place:
        """The place of a block whose rows begin at `starts` and have `count` times `groups` groups."""
        key = group_size, starts.device
        known = self._groups.get(key)
        if known is None or len(known) < count * groups:
            positions = torch.arange(count * groups, dtype=torch.int64, device=starts.device) * group_size
            known = self._groups[key] = phases_of(positions)
        return place_of(phases_of(starts), known[: count * groups], group_size, groups)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self._groups.values())


def place_of(rows: Tensor, group_phases: Tensor, group_size: int, groups: int) -> Place:
    """The place of a block by the phases of its rows and of the groups in each, of which a kernel takes so many."""
    lanes = phases_of(torch.arange(group_size, dtype=torch.int64, device=rows.device)).repeat(groups)
    return Place(phase_of(0), Table(rows.view(-1, 1, 1), group_phases.view(-1, groups), lanes))


def in_place(
    layout: Layout, parts: Sequence[Part], span: Span, width: int, tables: Tables, device: torch.device
) -> Block:
    """The block of a span of whole pieces of `width`, which begins with the first element of the first row."""
    size, count = layout.group_size, (span.last - span.first) // width
    place = tables.place(layout.starts(device), count, size, width // size)
    rest = [part.of_span(span, size, width) for part in parts]
    return Block(rest, place, (span.rows, count, width), span.columns, -(-span.columns // size))
