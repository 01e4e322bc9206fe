"""Pieces → blocks, a call each: large parameters are cut up, small and uneven ones put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from flashopt_compile.pieces import Piece, lane_phases, no_phase, row_phases
from flashopt_compile.step import Numbers, Place, Step
from quant.dither import phases_of

# Elements worked on at once: enough to hide the cost of a call, few enough for the second pass to find them in cache.
CHUNK_ELEMENTS = 1 << 20
# Parameters with fewer are copied together: a call costs more than the copies.
SMALL_ELEMENTS = 1 << 16


def works_in_cache(device: torch.device) -> bool:
    """Whether to work in chunks: a CPU finds the last one in its cache; a GPU takes a whole parameter in one kernel."""
    return device.type == "cpu"


Run = Callable[[Step, Sequence[Tensor], Tensor, Place, Numbers], None]


class Pack:
    """Small pieces that become one block, and the memory they share from step to step.

    Head and gradient belong to the model and are copied each time. The rest moves into a block of its own on first
    use: the tensors of the optimizer's state stay what they are, and become views of it. Only guests are copied to and
    fro: rows that end in short groups, which a block pads, strided parameters, and parts of large ones.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.group_size, self.scales = pieces[0].group_size, pieces[0].scales
        device = pieces[0].stored[0].device
        phases = torch.cat([piece.phases() for piece in pieces])
        self.place = Place(no_phase(device), (phases, lane_phases(self.group_size, device)))
        # How a part's flat block is cut: the lengths of its pieces and their padding, and which of them are pieces.
        self._lengths: dict[bool, list[int]] = {False: [], True: [piece.rows for piece in pieces]}
        self._slots: dict[bool, list[int]] = {False: [], True: list(range(len(pieces)))}
        for piece in pieces:
            self._slots[False].append(len(self._lengths[False]))
            if piece.is_plain:
                self._lengths[False] += [piece.elements, piece.padding] if piece.padding else [piece.elements]
            else:
                self._lengths[False].append(piece.rows * self.group_size)
        self._guests = [number for number, piece in enumerate(pieces) if not (piece.is_plain and piece.is_whole)]
        heads = [piece.stored[0] for piece in pieces]
        self._heads = [head.view(-1) if piece.is_plain else head for piece, head in zip(pieces, heads, strict=True)]
        self._rest: list[Tensor] = []
        self._places: list[list[Tensor]] = []

    def block(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Copies of head and gradient, and the rest."""
        if any(piece.home is not self for piece in self.pieces):
            self._take_in()
        else:
            self._copy_guests(back=False)
        head, grad = (torch.cat(self._flat(tensors, False)) for tensors in (self._heads, grads))
        return [head.view(-1, self.group_size), grad.view(-1, self.group_size), *self._rest]

    def write_back(self, block: Sequence[Tensor]) -> None:
        """Copy the head, and what else is not of this memory, to where it came from."""
        sources = self._cut(block[0], False)
        for number in self._guests:
            sources[number] = self.pieces[number].unstaged(sources[number], self._heads[number])
        torch._foreach_copy_(self._heads, sources)  # pyright: ignore[reportPrivateImportUsage]
        self._copy_guests(back=True)

    def _take_in(self) -> None:
        self._rest, self._places = [], []
        for number, is_scale in enumerate(self.scales[1:], start=1):
            tensors = [piece.stored[number] for piece in self.pieces]
            whole = torch.cat(self._flat(tensors, is_scale)).view(-1, 1 if is_scale else self.group_size)
            places = self._cut(whole, is_scale)
            for piece, tensor, place in zip(self.pieces, tensors, places, strict=True):
                if piece.is_plain and piece.is_whole:
                    tensor.data = place.view(tensor.shape)
            self._rest.append(whole)
            self._places.append(places)
        for piece in self.pieces:
            piece.home = self

    def _copy_guests(self, back: bool) -> None:
        for number in self._guests:
            piece = self.pieces[number]
            for tensor, is_scale, places in zip(piece.stored[1:], self.scales[1:], self._places, strict=True):
                place = places[number]
                if not back:
                    place.copy_(piece.staged(tensor, is_scale))
                else:
                    tensor.copy_(piece.unstaged(place, tensor, is_scale))

    def _cut(self, whole: Tensor, is_scale: bool) -> list[Tensor]:
        """The parts of a block that belong to each piece, flat."""
        parts = whole.view(-1).split(self._lengths[is_scale])
        return [parts[slot] for slot in self._slots[is_scale]]

    def _flat(self, tensors: Sequence[Tensor], is_scale: bool) -> list[Tensor]:
        """One tensor of each piece, and their padding, to be joined."""
        flat: list[Tensor] = []
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            flat.append(piece.staged(tensor, is_scale))
            if piece.padding and piece.is_plain and not is_scale:
                flat.append(no_elements(piece.padding, tensor.dtype, tensor.device))
        return flat


@cache
def no_elements(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The zeros that a block is padded with."""
    return torch.zeros(count, dtype=dtype, device=device)


@dataclass
class Waiting:
    """Small pieces and their gradients, to be stepped in one call."""

    step: Step
    t: Tensor
    hyper: Numbers
    pieces: list[Piece] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    rows: int = 0


class Batch:
    """Steps parameters through `run`, the small ones of like kind as one block.

    `packs` is for the caller to keep from step to step, while the pieces last: how those blocks are put together.
    """

    def __init__(self, run: Run, packs: dict[tuple[int, ...], Pack]) -> None:
        self._run = run
        self._packs = packs
        self._waiting: dict[tuple[int, int, float, torch.dtype], Waiting] = {}

    def add(self, step: Step, piece: Piece, grad: Tensor, t: Tensor, hyper: Numbers) -> None:
        """Step a whole parameter now or, at the latest, on `flush`."""
        if not piece.elements:
            return
        key = id(step), id(hyper), t.item(), grad.dtype
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = Waiting(step, t, hyper)
        if piece.elements <= SMALL_ELEMENTS:
            self._wait(waiting, piece, grad)
        elif not (piece.stored[0].is_contiguous() and grad.is_contiguous()):
            self._wait_in_slabs(waiting, piece, grad)
        elif not works_in_cache(grad.device):
            self._step_whole(waiting, piece, grad)
        elif not piece.padding:
            self._step_in_place(waiting, piece, grad)
        elif piece.columns > max(SMALL_ELEMENTS, piece.group_size):
            for place, part in piece.ends():
                step_part = self._wait if part.padding else self._step_in_place
                step_part(waiting, part, grad.view(-1)[place])
        else:
            self._wait_in_slabs(waiting, piece, grad)

    def flush(self) -> None:
        """Step what waits."""
        for waiting in self._waiting.values():
            self._step_together(waiting)

    def _wait(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        if waiting.rows + piece.rows > CHUNK_ELEMENTS // piece.group_size:
            self._step_together(waiting)
        waiting.pieces.append(piece)
        waiting.grads.append(grad)
        waiting.rows += piece.rows

    def _wait_in_slabs(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        for place, slab in piece.slabs(CHUNK_ELEMENTS):
            self._wait(waiting, slab, grad[place])

    def _step_whole(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        head, *rest = piece.stored
        for start, block in waiting.step.storage.blocks(tuple(head.shape), [head, grad, *rest]):
            self._run(waiting.step, block, waiting.t, Place.at(start), waiting.hyper)

    def _step_in_place(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        head, *rest = (
            tensor.view(-1, 1 if is_scale else piece.group_size)
            for tensor, is_scale in zip(piece.stored, piece.scales, strict=True)
        )
        tensors = head, grad.view_as(head), *rest
        size, length = piece.group_size, CHUNK_ELEMENTS // piece.group_size
        lanes, rows = lane_phases(size, head.device), row_phases(length, size, size, head.device)
        for number, block in enumerate(zip(*(tensor.split(length) for tensor in tensors), strict=True)):
            start = piece.start + number * length * size
            if len(block[0]) == 1:  # Dynamo tells sizes of 1 apart
                own = Piece([block[0], *block[2:]], piece.scales, start, size, size)
                self._wait(waiting, own, block[1])
            else:
                place = Place(phases_of(torch.tensor(start, device=head.device)), (rows[: len(block[0])], lanes))
                self._run(waiting.step, list(block), waiting.t, place, waiting.hyper)

    def _step_together(self, waiting: Waiting) -> None:
        pieces, grads = waiting.pieces, waiting.grads
        waiting.pieces, waiting.grads, waiting.rows = [], [], 0
        if not pieces:
            return
        if len(pieces) == 1 and pieces[0].rows == 1:
            pieces, grads = pieces * 2, grads * 2  # Dynamo tells sizes of 1 apart: a single row goes twice
        key = tuple(map(id, pieces))
        pack = self._packs.get(key)
        if pack is None:
            pack = Pack(pieces)
            if all(piece.is_whole for piece in pieces):  # the others are new each time
                self._packs[key] = pack
        block = pack.block(grads)
        self._run(waiting.step, block, waiting.t, pack.place, waiting.hyper)
        pack.write_back(block)
