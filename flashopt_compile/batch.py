"""Whole parameters → blocks of whole rows for one call each: large ones cut up, small and uneven ones put together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flashopt_compile.step import Numbers, Place, Step
from quant.dither import phases_of

# Elements worked on at once: enough to hide the cost of a call, few enough for the second pass to find them in cache.
CHUNK_ELEMENTS = 1 << 19
# Parameters with fewer are copied together: a call costs more than the copies.
SMALL_ELEMENTS = 1 << 15
# The length of a row where no state is grouped.
FLAT_COLUMNS = 32

Run = Callable[[Step, Sequence[Tensor], Tensor, Place, Numbers], None]


@dataclass(frozen=True)
class Piece:
    """Part of a parameter (head, gradient, then the rest), its rows padded to whole groups on the way to a block."""

    tensors: Sequence[Tensor]
    scales: Sequence[bool]
    start: int
    columns: int
    group_size: int

    @property
    def elements(self) -> int:
        return self.tensors[0].numel()

    @property
    def padding(self) -> int:
        return -self.columns % self.group_size

    @property
    def rows(self) -> int:
        return self.elements // self.columns * ((self.columns + self.padding) // self.group_size)

    def staged(self) -> list[Tensor]:
        """Copies or views of the tensors as a block."""
        return [
            tensor.reshape(-1, 1) if is_scale else self._padded(tensor).reshape(-1, self.group_size)
            for tensor, is_scale in zip(self.tensors, self.scales, strict=True)
        ]

    def _padded(self, tensor: Tensor) -> Tensor:
        return F.pad(tensor.reshape(-1, self.columns), (0, self.padding)) if self.padding else tensor

    def unstaged(self, block: Tensor, like: Tensor, is_scale: bool) -> Tensor:
        """The part of `like` that came out in `block`."""
        if self.padding and not is_scale:
            block = block.view(-1, self.columns + self.padding)[:, : self.columns]
        return block.reshape(like.shape)

    def split_rows(self) -> Iterator["Piece"]:
        """A contiguous piece row by row."""
        rows = self.elements // self.columns
        for row, tensors in enumerate(zip(*(tensor.view(rows, -1) for tensor in self.tensors), strict=True)):
            yield replace(self, tensors=tensors, start=self.start + row * self.columns)

    def whole_groups(self) -> "Piece":
        """A row without the short group that ends it."""
        whole = self.columns - self.columns % self.group_size
        return replace(self, tensors=self._cut(0, whole // self.group_size), columns=whole)

    def short_group(self) -> "Piece":
        whole = self.columns - self.columns % self.group_size
        tensors = self._cut(whole // self.group_size, None)
        return replace(self, tensors=tensors, start=self.start + whole, columns=self.columns - whole)

    def _cut(self, first: int, last: int | None) -> list[Tensor]:
        """The groups of a row from `first` to before `last`."""
        ends = [(end and end * self.group_size, end) for end in (first, last)]
        return [
            tensor[ends[0][is_scale] : ends[1][is_scale]]
            for tensor, is_scale in zip(self.tensors, self.scales, strict=True)
        ]

    def phases(self) -> Tensor:
        rows = row_phases(self.elements // self.columns, self.columns, self.group_size, self.tensors[0].device)
        return rows + phases_of(torch.tensor(self.start, device=rows.device)) if self.start else rows


@cache
def row_phases(rows: int, columns: int, group_size: int, device: torch.device) -> Tensor:
    """The phases of the first elements of all groups of `rows` rows."""
    first = torch.arange(rows, device=device)[:, None] * columns
    return phases_of((first + torch.arange(0, columns, group_size, device=device)).reshape(-1, 1))


@cache
def lane_phases(group_size: int, device: torch.device) -> Tensor:
    return phases_of(torch.arange(group_size, device=device))


@cache
def no_phase(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=device)


@dataclass
class Waiting:
    """Small pieces that are to be stepped in one call."""

    step: Step
    t: Tensor
    hyper: Numbers
    pieces: list[Piece] = field(default_factory=list)
    rows: int = 0


class Batch:
    """Steps parameters through `run`, the small ones of like kind as one block."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: dict[tuple[int, int, float], Waiting] = {}

    def add(self, step: Step, tensors: Sequence[Tensor], t: Tensor, hyper: Numbers) -> None:
        """Step a parameter (head, gradient, then the rest) now or, at the latest, on `flush`."""
        head, grad = tensors[:2]
        if not head.numel():
            return
        key = id(step), id(hyper), t.item()
        waiting = self._waiting.setdefault(key, Waiting(step, t, hyper))
        scales, grouped = step.storage.scales, step.storage.grouped
        if grouped is None:
            size, columns = FLAT_COLUMNS, head.numel()
        else:
            size, columns = grouped.group_size, grouped.rows(tuple(head.shape)).columns
        whole = Piece(tensors, scales, 0, columns, size)
        if whole.elements <= SMALL_ELEMENTS:
            self._wait(waiting, whole)
        elif not (head.is_contiguous() and grad.is_contiguous()):
            self._wait_in_slabs(waiting, whole)
        elif not whole.padding:
            self._step_in_place(waiting, whole)
        elif columns > max(SMALL_ELEMENTS, size):
            for row in whole.split_rows():
                self._step_in_place(waiting, row.whole_groups())
                self._wait(waiting, row.short_group())
        else:
            self._wait_in_slabs(waiting, whole)

    def flush(self) -> None:
        """Step what waits."""
        for waiting in self._waiting.values():
            self._step_together(waiting)

    def _wait(self, waiting: Waiting, piece: Piece) -> None:
        if waiting.rows + piece.rows > CHUNK_ELEMENTS // piece.group_size:
            self._step_together(waiting)
        waiting.pieces.append(piece)
        waiting.rows += piece.rows

    def _wait_in_slabs(self, waiting: Waiting, piece: Piece) -> None:
        head = piece.tensors[0]
        row_elements = head[0].numel()
        length = max(1, CHUNK_ELEMENTS // row_elements)
        for first in range(0, len(head), length):
            slab = [tensor[first : first + length] for tensor in piece.tensors]
            self._wait(waiting, replace(piece, tensors=slab, start=first * row_elements))

    def _step_in_place(self, waiting: Waiting, piece: Piece) -> None:
        device, size = piece.tensors[0].device, piece.group_size
        length = CHUNK_ELEMENTS // size
        lanes, rows = lane_phases(size, device), row_phases(length, size, size, device)
        for number, block in enumerate(zip(*(tensor.split(length) for tensor in piece.staged()), strict=True)):
            if len(block[0]) == 1:  # Dynamo tells sizes of 1 apart
                self._wait(waiting, Piece(block, piece.scales, piece.start + number * length * size, size, size))
                continue
            start = phases_of(torch.tensor(piece.start + number * length * size, device=device))
            place = Place(start, rows[: len(block[0])], lanes)
            self._run(waiting.step, list(block), waiting.t, place, waiting.hyper)

    def _step_together(self, waiting: Waiting) -> None:
        pieces, waiting.pieces, waiting.rows = waiting.pieces, [], 0
        if not pieces:
            return
        device, size = pieces[0].tensors[0].device, pieces[0].group_size
        if len(pieces) == 1 and pieces[0].rows == 1:
            pieces = pieces * 2  # Dynamo tells sizes of 1 apart: a single row goes twice
        block = [torch.cat(parts) for parts in zip(*(piece.staged() for piece in pieces), strict=True)]
        place = Place(no_phase(device), torch.cat([piece.phases() for piece in pieces]), lane_phases(size, device))
        self._run(waiting.step, block, waiting.t, place, waiting.hyper)
        lengths = [piece.rows for piece in pieces]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, (whole, is_scale) in enumerate(zip(block, pieces[0].scales, strict=True)):
            if number != 1:  # the gradient stays as it is
                for piece, part in zip(pieces, whole.split(lengths), strict=True):
                    targets.append(piece.tensors[number])
                    sources.append(piece.unstaged(part, piece.tensors[number], is_scale))
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
