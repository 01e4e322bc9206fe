"""Pieces → blocks, a call each: large parameters are cut up, small and uneven ones put together."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from flashopt_compile.pieces import Form, Piece
from flashopt_compile.step import Numbers, Place, Step

# Elements worked on at once: enough to hide the cost of a call, few enough for the second pass to find them in cache.
CHUNK_ELEMENTS = 1 << 22
# Parameters with fewer are copied together: a call costs more than the copies.
SMALL_ELEMENTS = 1 << 16


def works_in_cache(device: torch.device) -> bool:
    """Whether to work in chunks: a CPU finds the last one in its cache; a GPU takes a whole parameter in one kernel."""
    return device.type == "cpu"


BoundKernel = Callable[[Tensor], None]  # steps a block by its gradient, contiguous and in any shape


@dataclass(frozen=True)
class Kernel:
    """What steps blocks in place, given head and rest, step count, place and numbers; and the form that they have."""

    bind: Callable[[Sequence[Tensor], Tensor, Place, Numbers], BoundKernel]
    form: Form


Kernels = Callable[[Step, torch.dtype, torch.device, Numbers], Kernel]


def eager(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """The step itself, uncompiled, to which the form of a block is all the same."""
    return Kernel(partial(bind, step), Form.of(CHUNK_ELEMENTS, step.storage.group_size, 1))


def bind(
    run: Callable[[Sequence[Tensor], Tensor, Place, Numbers], None],
    stored: Sequence[Tensor],
    t: Tensor,
    place: Place,
    hyper: Numbers,
) -> BoundKernel:
    """Of a function that takes the gradient among the tensors of its block, in the shape of the head."""
    head, *rest = stored

    @torch.no_grad()
    def step(grad: Tensor) -> None:
        run([head, grad.view_as(head), *rest], t, place, hyper)

    return step


class Call(NamedTuple):
    """A part of a step, which takes some of all gradients."""

    run: Callable[..., None]
    grads: tuple[int, ...]


class Pack:
    """Small pieces that become one block, and the memory they share from step to step.

    Head and gradient belong to the model and are copied to `scratch` and back each time. The rest moves into a block of
    its own on first use: the tensors of the optimizer's state stay what they are, and become views of it. Only guests
    are copied to and fro: those of rows that end in short groups, which a block pads, and parts of large parameters.
    """

    def __init__(self, pieces: Sequence[Piece], form: Form) -> None:
        self.pieces = pieces
        self._form = form
        head = pieces[0].stored[0]
        rows = sum(piece.rows for piece in pieces)
        self._size, self._rows = pieces[0].group_size, form.padded(rows)
        phases = torch.cat([piece.phases() for piece in pieces])
        self.place = form.place(0, torch.nn.functional.pad(phases, (0, 0, 0, self._rows - rows)), self._size)
        self._views: dict[tuple[str, torch.dtype], tuple[Tensor, list[Tensor]]] = {}
        self._heads = [piece.stored[0] for piece in pieces]
        self._head_block, self._head_places = self._scratch("head", head.dtype, head.device)
        self._rest: list[Tensor] = []
        self._padding: list[Tensor] = []
        self._guests: list[Tensor] = []
        self._guest_places: list[Tensor] = []

    def block(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """Copies of head and gradient, and the rest."""
        if any(piece.home is not self for piece in self.pieces):
            self._take_in()
        else:
            copy_all(self._guest_places, self._guests)
            if self._padding:  # a rule may make something of nothing
                torch._foreach_zero_(self._padding)  # pyright: ignore[reportPrivateImportUsage]
        grad_block, grad_places = self._scratch("gradient", grads[0].dtype, grads[0].device)
        if any(piece.padding for piece in self.pieces):
            self._head_block.zero_()
            grad_block.zero_()
        copy_all(self._head_places, self._heads)
        copy_all(grad_places, grads)
        return list(map(self._form.join, (self._head_block, grad_block, *self._rest)))

    def write_back(self) -> None:
        """Copy the head, and what else is not of this memory, to where it came from."""
        copy_all(self._heads, self._head_places)
        copy_all(self._guests, self._guest_places)

    def _take_in(self) -> None:
        self._rest, self._padding, self._guests, self._guest_places = [], [], [], []
        for number, is_scale in enumerate(self.pieces[0].scales[1:], start=1):
            tensors = [piece.stored[number] for piece in self.pieces]
            whole = tensors[0].new_zeros(self._rows, 1 if is_scale else self._size)
            places = self._places(whole, [tensor.shape for tensor in tensors], is_scale)
            copy_all(places, tensors)
            for piece, tensor, place in zip(self.pieces, tensors, places, strict=True):
                if piece.is_whole and place.is_contiguous():
                    tensor.data = place
                else:
                    self._guests.append(tensor)
                    self._guest_places.append(place)
            self._rest.append(whole)
            if not is_scale:
                self._padding += [
                    piece.beyond(part) for piece, part in zip(self.pieces, self._parts(whole), strict=True)
                ]
        self._padding = [tensor for tensor in self._padding if tensor.numel()]
        for piece in self.pieces:
            piece.home = self

    def _scratch(self, what: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """A block of memory that all packs of a thread use in turn, and the places of the pieces in it."""
        key = what, dtype
        if key not in self._views:
            whole = scratch(what, self._size, dtype, device, threading.get_ident())[: self._rows]
            if len(whole) < self._rows:  # of one large piece with much padding
                whole = torch.zeros(self._rows, self._size, dtype=dtype, device=device)
            self._views[key] = whole, self._places(whole, [piece.stored[0].shape for piece in self.pieces])
        return self._views[key]

    def _places(self, whole: Tensor, shapes: Sequence[torch.Size], is_scale: bool = False) -> list[Tensor]:
        """The parts of a block that belong to each piece, in its shape."""
        return [
            part.view(shape) if is_scale else piece.within(part, shape)
            for piece, part, shape in zip(self.pieces, self._parts(whole), shapes, strict=True)
        ]

    def _parts(self, whole: Tensor) -> Sequence[Tensor]:
        """The rows of a block that belong to each piece."""
        rows = [piece.rows for piece in self.pieces]
        return whole[: sum(rows)].split(rows)


def copy_all(targets: list[Tensor], sources: list[Tensor] | tuple[Tensor, ...]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


@cache
def scratch(what: str, columns: int, dtype: torch.dtype, device: torch.device, thread: int) -> Tensor:
    """Memory for a thread to put small heads or gradients together in, kept from step to step."""
    return torch.zeros(CHUNK_ELEMENTS // columns, columns, dtype=dtype, device=device)


@dataclass
class Waiting:
    """Small pieces and their gradients, to be stepped in one call."""

    kernel: Kernel
    t: Tensor
    hyper: Numbers
    pieces: list[Piece] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the gradients among all of the step
    rows: int = 0


class Batch:
    """Steps parameters by `kernels`, the small ones of like kind as one block.

    `packs` is for the caller to keep from step to step, while the pieces last: how those blocks are put together.
    `calls` is what a step has done, to be done again with other gradients of the same form; None if parts of it have
    to be worked out anew each time, as what they would keep takes memory.
    """

    def __init__(self, kernels: Kernels, packs: dict[tuple[int, ...], Pack]) -> None:
        self.calls: list[Call] | None = []
        self._kernels = kernels
        self._packs = packs
        self._added = 0
        self._waiting: dict[tuple[int, int, float, torch.dtype], Waiting] = {}

    def add(self, step: Step, piece: Piece, grad: Tensor, t: Tensor, taken: float, hyper: Numbers) -> None:
        """Step a whole parameter now or, at the latest, on `flush`; `taken` is what `t` holds."""
        self._added += 1
        if not piece.elements:
            return
        key = id(step), id(hyper), taken, grad.dtype
        waiting = self._waiting.get(key)
        if waiting is None:
            kernel = self._kernels(step, grad.dtype, grad.device, hyper)
            waiting = self._waiting[key] = Waiting(kernel, t, hyper)
        if piece.elements <= SMALL_ELEMENTS:
            self._wait(waiting, piece, grad)
        elif not (piece.stored[0].is_contiguous() and grad.is_contiguous()):
            self._wait_in_slabs(waiting, piece, grad)
        elif piece.row_starts is not None and (piece.padding or not works_in_cache(grad.device)):
            self._wait_in_slabs(waiting, piece, grad)
        elif not works_in_cache(grad.device):
            self._call(partial(self._step_whole, waiting, step, piece), [grad], [self._added - 1])
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

    def _call(self, run: Callable[..., None], grads: Sequence[Tensor], numbers: Sequence[int]) -> None:
        run(*grads)
        if self.calls is not None:
            self.calls.append(Call(run, tuple(numbers)))

    def _wait(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        if (waiting.rows + piece.rows) * piece.group_size > CHUNK_ELEMENTS:
            self._step_together(waiting)
        waiting.pieces.append(piece)
        waiting.grads.append(grad)
        waiting.numbers.append(self._added - 1)
        waiting.rows += piece.rows

    def _wait_in_slabs(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        for place, slab in piece.slabs(CHUNK_ELEMENTS):
            self._wait(waiting, slab, grad[place])

    @staticmethod
    def _step_whole(waiting: Waiting, step: Step, piece: Piece, grad: Tensor) -> None:
        head, *rest = piece.stored
        for start, (block, grads, *others) in step.storage.blocks(tuple(head.shape), [head, grad, *rest]):
            waiting.kernel.bind([block, *others], waiting.t, Place.at(piece.start + start), waiting.hyper)(grads)

    def _step_in_place(self, waiting: Waiting, piece: Piece, grad: Tensor) -> None:
        form = waiting.kernel.form
        bound = [
            waiting.kernel.bind(chunk, waiting.t, place, waiting.hyper)
            for chunk, place in zip(piece.chunks(form), piece.places(form), strict=True)
        ]
        left_over = list(piece.left_over(form))

        def run(grad: Tensor) -> None:
            for step, part in zip(bound, piece.cut(grad, False, form), strict=True):
                step(part)

        is_one_call = len(bound) == 1 and not left_over  # which does not mind the gradient's shape
        self._call(bound[0] if is_one_call else run, [grad], [self._added - 1])
        for place, group in left_over:
            self._wait(waiting, group, grad.view(-1)[place])

    def _step_together(self, waiting: Waiting) -> None:
        pieces, grads, numbers = waiting.pieces, waiting.grads, waiting.numbers
        waiting.pieces, waiting.grads, waiting.numbers, waiting.rows = [], [], [], 0
        if not pieces:
            return
        form = waiting.kernel.form
        is_kept = all(piece.is_whole for piece in pieces)  # the others are new each time

        def run(*grads: Tensor) -> None:
            key = threading.get_ident(), form.groups, *map(id, pieces)
            pack = self._packs.get(key) or Pack(pieces, form)
            if is_kept:
                self._packs[key] = pack
            head, grad, *rest = pack.block(grads)
            waiting.kernel.bind([head, *rest], waiting.t, pack.place, waiting.hyper)(grad)
            pack.write_back()

        self._call(run, grads, numbers)
        if not is_kept:
            self.calls = None
