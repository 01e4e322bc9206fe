"""Packs: small parameters and the short ends of rows, copied into one block."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Kernel, Operation, copies, run_at_once
from flashopt_compile.engine.layout import Block, Layout, Part, place_of
from flashopt_compile.engine.step import Numbers
from quant.dither import phases_of
from quant.rows import Span

# The most elements of a pack: few enough for the copies to stay in the cache.
PACK_ELEMENTS = 1 << 19


class Member(NamedTuple):
    """The packed part of a parameter: a span of some rows, starting at element `offset`."""

    index: int  # among the heads and gradients of the step
    layout: Layout
    span: Span
    parts: Sequence[Part]
    offset: int = 0
    shape: torch.Size | None = None  # if it is a whole parameter, whose memory may have any order

    @property
    def groups_per_row(self) -> int:
        return -(-(self.span.last - self.span.first) // self.layout.group_size)

    @property
    def groups(self) -> int:
        return self.span.rows * self.groups_per_row

    @property
    def is_padded(self) -> bool:
        """Whether a group is short, so that its padding in the block must be zero."""
        return (self.span.last - self.span.first) % self.layout.group_size != 0

    def own(self, tensor: Tensor) -> Tensor:
        """The member's part of its parameter's head or gradient."""
        if self.shape is not None:
            return tensor
        taken = tensor.view(-1)[self.offset : self.offset + self.layout.elements]
        return taken.view(self.span.rows, self.span.columns)[:, self.span.first : self.span.last]

    def own_part(self, part: Part) -> Tensor:
        """The member's part of a stored tensor."""
        return part.tensor if self.shape is not None else part.columns(self.span, self.layout.group_size)

    def place(self, groups: Tensor, shape: torch.Size | None = None) -> Tensor:
        """View the member's groups of a block, (groups, group size or 1), in the shape of its elements or scales."""
        rows = groups.view(self.span.rows, -1)
        if groups.shape[-1] > 1:
            rows = rows[:, : self.span.last - self.span.first]
        return rows if shape is None else rows.view(shape)


class Scratch:
    """Temporary memory that the packs of a plan share, or those of several plans that step one after the other.

    What has been given stays with the pack that it was given to, so the memory at least doubles when it grows.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.bytes = 0

    def take(self, what: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `elements` elements of the memory kept for `what`."""
        key = what, dtype, device
        known = len(self._memory[key]) if key in self._memory else 0
        if known < elements:
            self._memory[key] = torch.zeros(max(elements, 2 * known), dtype=dtype, device=device)
            self.bytes += self._memory[key].nbytes
        return self._memory[key][:elements]


class Pack:
    """Members that are stepped as one block.

    Heads and gradients belong to the model: they are copied to scratch memory, and heads back. What else is stored is
    either resident (moved, once, into memory of the pack: the tensors of the state stay what they are, and lie beside
    each other), or copied to and fro as well.
    """

    def __init__(
        self,
        kernel: Kernel,
        members: Sequence[Member],
        t: Tensor,
        numbers: Numbers,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        scratch: Scratch,
        is_resident: bool,
    ) -> None:
        self._members = members
        self._is_deferred = kernel.is_deferred
        size = members[0].layout.group_size
        each = kernel.width // size
        counts = [member.groups for member in members]
        self._groups = max(2, -(-sum(counts) // each)) * each  # compilers tell sizes of 1 apart
        self._counts = counts

        self._head, self._grad = (
            scratch.take(what, self._groups * size, dtype, device).view(-1, size)
            for what, dtype in zip(("head", "gradient"), dtypes, strict=True)
        )
        shapes = [member.shape for member in members]
        self._head_places, self._grad_places = (self._places(whole, shapes) for whole in (self._head, self._grad))
        rest: list[Tensor] = []
        self._guests: list[Tensor] = []
        self._guest_places: list[Tensor] = []
        for number, part in enumerate(members[0].parts):
            columns, dtype = (1 if part.is_scale else size), part.tensor.dtype
            if is_resident:
                whole = torch.zeros(self._groups, columns, dtype=dtype, device=device)
            else:
                whole = scratch.take(f"part {number}", self._groups * columns, dtype, device).view(-1, columns)
            own = [member.own_part(member.parts[number]) for member in members]
            places = self._places(whole, [each.shape for each in own])
            if is_resident:
                settle(own, places)
            else:
                self._guests += own
                self._guest_places += places
            rest.append(whole)
        # The padding of short groups must be zero, or it would enter their scales. What is resident stays zero there.
        shared = [self._head, self._grad, *([] if is_resident else rest)]
        self._to_clear = shared if any(member.is_padded for member in members) else []

        phases = torch.zeros(self._groups, dtype=torch.int32, device=device)
        starts = [member.layout.group_starts(member.span, device) for member in members]
        phases[: sum(counts)] = phases_of(torch.cat(starts))
        shape = 1, self._groups // each, kernel.width
        block = Block(
            [whole.view(1, -1, each if whole.shape[-1] == 1 else kernel.width) for whole in rest],
            place_of(torch.zeros(1, dtype=torch.int32, device=device), phases, size, each),
            shape,
            self._groups * size,
            self._groups,
        )
        self._run = kernel.bind(block, t, numbers)

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        """Operations that step the members, given all heads and gradients of the step."""
        own = [member.own(heads[member.index]) for member in self._members]
        own_grads = [member.own(grads[member.index]) for member in self._members]
        before = [
            *clears(self._to_clear),
            *copies(self._head_places, own),
            *copies(self._grad_places, own_grads),
            *copies(self._guest_places, self._guests),
        ]
        if not self._is_deferred:
            run_at_once(before)
            before = []
        return [
            *before,
            *self._run(self._head, self._grad),
            *copies(own, self._head_places),
            *copies(self._guests, self._guest_places),
        ]

    def _places(self, whole: Tensor, shapes: Sequence[torch.Size | None]) -> list[Tensor]:
        """Each member's place in a block."""
        parts = whole[: sum(self._counts)].split(self._counts)
        return [member.place(part, shape) for member, part, shape in zip(self._members, parts, shapes, strict=True)]


def clears(tensors: list[Tensor]) -> list[Operation]:
    return [Operation(torch._foreach_zero_, tensors)] if tensors else []  # pyright: ignore[reportPrivateImportUsage]


def settle(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Move tensors, with their values, into the memory of their places.

    Each gets a storage of its own, a part of the pack's memory, so that it is saved, pickled and copied without the
    rest of the pack.
    """
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)
        first = place.storage_offset() * place.itemsize
        storage = place.untyped_storage()[first : first + place.nbytes]
        tensor.data = torch.empty(0, dtype=place.dtype, device=place.device).set_(
            storage, 0, tensor.shape, tensor.stride()
        )
