"""Parameters as pieces that fit a block: where their rows and groups lie, and how they are padded to whole groups."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from flashopt_compile.step import Place, Step
from quant.dither import phase_of, phases_of


@dataclass(eq=False)
class Piece:
    """A parameter or part of one, without its gradient: the head, then the rest of what is stored.

    Its elements are rows of `columns` from position `start` of the parameter on, or from each of `row_starts`; a block
    has them in rows of `group_size`.
    """

    stored: Sequence[Tensor]
    scales: Sequence[bool]
    start: int
    columns: int
    group_size: int
    is_whole: bool = False  # so that `stored` are the tensors of the optimizer's state themselves
    home: object = None  # whose memory all but the head lies in
    row_starts: Tensor | None = None
    _chunks: dict["Form", list[list[Tensor]]] = field(default_factory=dict, init=False, repr=False)
    _places: dict["Form", list[Place]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, step: Step, stored: Sequence[Tensor], start: int = 0, row_starts: Tensor | None = None) -> "Piece":
        """A whole parameter, or what a process has of one."""
        head, grouped, size = stored[0], step.storage.grouped, step.storage.group_size
        if row_starts is not None:
            columns = head.numel() // max(1, len(row_starts))
        else:
            columns = head.numel() if grouped is None else grouped.rows(tuple(head.shape)).columns
        return cls(stored, step.storage.scales, start, columns, size, is_whole=True, row_starts=row_starts)

    @cached_property
    def elements(self) -> int:
        return self.stored[0].numel()

    @cached_property
    def padding(self) -> int:
        return -self.columns % self.group_size

    @cached_property
    def rows(self) -> int:
        """Of the block."""
        return self.elements // self.columns * ((self.columns + self.padding) // self.group_size)

    def within(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The view, of `shape`, of those elements of the block's rows that are the piece's, not its padding."""
        return rows.view(-1, self.columns + self.padding)[:, : self.columns].view(shape)

    def beyond(self, rows: Tensor) -> Tensor:
        """The view of the padding in the block's rows."""
        return rows.view(-1, self.columns + self.padding)[:, self.columns :]

    def cut(self, tensor: Tensor, is_scale: bool, form: "Form") -> Sequence[Tensor]:
        """A contiguous tensor of the piece, which has no padding, as blocks; without the rows that are left over."""
        columns, rows = 1 if is_scale else self.group_size, form.whole(self.rows)
        if rows == self.rows <= form.rows:
            return (tensor.view(-1, form.groups * columns),) if rows else ()
        whole = tensor.view(-1)[: rows * columns].view(-1, form.groups * columns)
        return whole.split(form.rows // form.groups) if rows else ()

    def chunks(self, form: "Form") -> list[list[Tensor]]:
        """All parts of a contiguous piece without padding as blocks."""
        if form not in self._chunks:
            parts = (self.cut(*each, form) for each in zip(self.stored, self.scales, strict=True))
            self._chunks[form] = [list(chunk) for chunk in zip(*parts, strict=True)]
        return self._chunks[form]

    def left_over(self, form: "Form") -> Iterator[tuple[slice, "Piece"]]:
        """The groups that `chunks` leaves out, a piece each, and where they lie."""
        for row in range(form.whole(self.rows), self.rows):
            place = slice(row * self.group_size, (row + 1) * self.group_size)
            stored = [
                tensor.view(-1)[row : row + 1] if is_scale else tensor.view(-1)[place]
                for tensor, is_scale in zip(self.stored, self.scales, strict=True)
            ]
            yield place, Piece(stored, self.scales, self.position(row), self.group_size, self.group_size)

    def slabs(self, elements: int) -> Iterator[tuple[slice, "Piece"]]:
        """The piece in parts of about so many elements, cut along the first dim."""
        head = self.stored[0]
        each = head[0].numel()
        length = max(1, elements // each)
        for first in range(0, len(head), length):
            slab = slice(first, first + length)
            stored = [tensor[slab] for tensor in self.stored]
            starts = self.row_starts
            if starts is not None:
                starts = starts.view(len(head), -1)[slab].flatten()
            yield slab, replace(self, stored=stored, start=self.start + first * each, is_whole=False, row_starts=starts)

    def ends(self) -> Iterator[tuple[slice, "Piece"]]:
        """Each row of a contiguous piece in two, its whole groups and the short one at its end; and where they lie."""
        groups = self.columns // self.group_size
        rows = self.elements // self.columns
        for row, tensors in enumerate(zip(*(tensor.view(rows, -1) for tensor in self.stored), strict=True)):
            for first, last in ((0, groups), (groups, groups + 1)):
                begin, end = first * self.group_size, min(last * self.group_size, self.columns)
                cuts = [slice(first, last) if is_scale else slice(begin, end) for is_scale in self.scales]
                stored = [tensor[cut] for tensor, cut in zip(tensors, cuts, strict=True)]
                place = slice(row * self.columns + begin, row * self.columns + end)
                start = self.start + place.start
                yield place, replace(self, stored=stored, start=start, columns=end - begin, is_whole=False)

    def starts(self, first: int, last: int) -> Tensor:
        """The positions of the first elements of some of the block's rows, of a piece that has `row_starts`."""
        assert self.row_starts is not None
        rows = torch.arange(first, last, device=self.row_starts.device)
        each = (self.columns + self.padding) // self.group_size
        return (self.row_starts[rows // each] + rows % each * self.group_size).unsqueeze(-1)

    def position(self, row: int) -> int:
        """Of the first element of one of the block's rows, of a piece without padding."""
        return self.start + row * self.group_size if self.row_starts is None else int(self.starts(row, row + 1))

    def places(self, form: "Form") -> Iterable[Place]:
        """Of each of `chunks`; kept, but for those of a piece with `row_starts`, which take memory."""
        firsts = range(0, form.whole(self.rows), form.rows)
        if self.row_starts is not None:
            return (self._place(first, form) for first in firsts)
        if form not in self._places:
            self._places[form] = [self._place(first, form) for first in firsts]
        return self._places[form]

    def _place(self, first: int, form: "Form") -> Place:
        """Of a block that begins with the row `first`."""
        count, device = min(form.rows, form.whole(self.rows) - first), self.stored[0].device
        if self.row_starts is None:
            start, rows = self.position(first), row_phases(form.rows, self.group_size, self.group_size, device)[:count]
        else:
            start, rows = 0, phases_of(self.starts(first, first + count))
        return form.place(start, rows, self.group_size)

    def phases(self) -> Tensor:
        """Of the first elements of the block's rows."""
        if self.row_starts is not None:
            return phases_of(self.starts(0, self.rows))
        rows = row_phases(self.elements // self.columns, self.columns, self.group_size, self.stored[0].device)
        return rows + phase_of(self.start).to(rows.device) if self.start else rows


@dataclass(frozen=True)
class Form:
    """What blocks a kernel takes: of up to so many rows of one group, several of which it takes as one.

    A block has at least two of those, as Dynamo tells sizes of 1 apart.
    """

    rows: int
    groups: int

    @classmethod
    def of(cls, elements: int, group_size: int, groups: int) -> "Form":
        """For blocks of up to so many elements."""
        rows = elements // group_size
        return cls(rows - rows % groups, groups)

    def whole(self, rows: int) -> int:
        """How many of a piece's rows make blocks."""
        whole = rows - rows % self.groups
        return whole - self.groups if whole % self.rows == self.groups else whole

    def padded(self, rows: int) -> int:
        """How many rows a block has that is to have so many at least."""
        return max(2, -(-rows // self.groups)) * self.groups

    def join(self, rows: Tensor) -> Tensor:
        """Rows of one group as the kernel takes them."""
        return rows.view(-1, self.groups * rows.shape[-1]) if self.groups > 1 else rows

    def place(self, start: int, rows: Tensor, group_size: int) -> Place:
        """Of a block whose first row is at `start`, given the phases of its rows."""
        return Place(phase_of(start), (self.join(rows), lane_phases(group_size, self.groups, rows.device)))


@cache
def row_phases(rows: int, columns: int, group_size: int, device: torch.device) -> Tensor:
    """The phases of the first elements of all groups of `rows` rows."""
    first = torch.arange(rows, device=device)[:, None] * columns
    return phases_of((first + torch.arange(0, columns, group_size, device=device)).reshape(-1, 1))


@cache
def lane_phases(group_size: int, groups: int, device: torch.device) -> Tensor:
    return phases_of(torch.arange(group_size, device=device)).repeat(groups)
