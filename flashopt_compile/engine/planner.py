"""Parameters → the calls of a step: large ones in place, small ones and the short ends of rows in packs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from flashopt_compile.engine.calls import Call, InPlace, Staged, Whole
from flashopt_compile.engine.kernel import Kernel, Kernels
from flashopt_compile.engine.layout import Layout, Part, Tables, in_place
from flashopt_compile.engine.pack import PACK_ELEMENTS, Member, Pack, Scratch
from flashopt_compile.engine.step import Numbers, Step
from quant.rows import Span

# Parameters with fewer elements are packed: a call costs more than the copies.
SMALL_ELEMENTS = 1 << 16
# Elements of a non-contiguous parameter that are copied at a time.
STAGED_ELEMENTS = 1 << 20


class Item(NamedTuple):
    """One parameter to be stepped: what this process has of it, and how."""

    step: Step
    layout: Layout
    head: Tensor
    grad: Tensor
    parts: Sequence[Part]
    t: Tensor
    taken: float  # the step count, for parameters of one pack share it
    numbers: Numbers


class Stage(NamedTuple):
    """Calls that are carried out together, and the parameters that have then been stepped."""

    calls: Sequence[Call]
    done: Sequence[int]


class Workspace:
    """Memory that the calls of a plan share, or those of several plans that step one after the other."""

    def __init__(self) -> None:
        self.scratch, self.tables = Scratch(), Tables()

    @property
    def bytes(self) -> int:
        return self.scratch.bytes + self.tables.bytes


@dataclass
class _Waiting:
    """Members for the next pack of a kind."""

    kernel: Kernel
    item: Item
    is_resident: bool
    members: list[Member] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(member.groups for member in self.members) * self.item.layout.group_size


class Planner:
    """Works out the calls of a step. What they keep between steps is counted in `bytes`."""

    def __init__(self, kernels: Kernels, items: Sequence[Item], workspace: Workspace | None = None) -> None:
        self._kernels, self._items = kernels, items
        self._own, workspace = workspace is None, workspace or Workspace()
        self._workspace, self._scratch, self._tables = workspace, workspace.scratch, workspace.tables
        self._shared = shared_memory([item.head for item in items])
        self._known: dict[tuple[Any, ...], Kernel] = {}
        self._waiting: dict[tuple[Any, ...], _Waiting] = {}
        self._calls: list[tuple[Call, set[int]]] = []
        self._breaks: list[int] = []  # before which calls a new stage begins
        self._phases_bytes = 0
        self.in_place: set[int] = set()  # parameters whose memory kernels write to directly, unseen by autograd

    def stages(self) -> list[Stage]:
        for index, item in enumerate(self._items):
            if item.layout.elements:
                self._add(index, item)
        self._flush()
        bounds = [0, *sorted(set(self._breaks)), len(self._calls)]
        groups = [self._calls[first:last] for first, last in pairwise(bounds) if first < last]
        last_stage = {index: number for number, group in enumerate(groups) for _, indices in group for index in indices}
        stages = [
            Stage([call for call, _ in group], [index for index, last in last_stage.items() if last == number])
            for number, group in enumerate(groups)
        ]
        empty = [index for index, item in enumerate(self._items) if not item.layout.elements]
        return [*stages, Stage([], empty)] if empty else stages

    @property
    def bytes(self) -> int:
        return self._phases_bytes + (self._workspace.bytes if self._own else 0)

    def _add(self, index: int, item: Item) -> None:
        kernel = self._kernel(item)
        if index in self._shared:
            self._separate(kernel)
        if item.layout.elements <= SMALL_ELEMENTS:
            span = Span(item.layout.rows, item.layout.columns, 0, item.layout.columns)
            self._wait(kernel, item, Member(index, item.layout, span, item.parts, shape=item.head.shape))
        elif item.head.is_contiguous() and item.grad.is_contiguous():
            self._cut(kernel, item, item.layout, item.parts, index)
        else:
            for call in self._staged(kernel, item, index):
                self._call(kernel, call, {index})
        if index in self._shared:
            self._separate(kernel)

    def _separate(self, kernel: Kernel) -> None:
        """Step and store everything added so far before what comes next."""
        self._flush()
        if not kernel.is_deferred:
            self._breaks.append(len(self._calls))

    def _kernel(self, item: Item) -> Kernel:
        kind = item.step, item.grad.dtype, item.head.device
        if kind not in self._known:
            self._known[kind] = self._kernels(*kind, item.numbers)
        return self._known[kind]

    def _call(self, kernel: Kernel, call: Call, indices: set[int]) -> None:
        if kernel.whole is not None:
            self._breaks.append(len(self._calls))  # it works at once: what it has stepped is counted at once
        self._calls.append((call, indices))

    def _cut(self, kernel: Kernel, item: Item, layout: Layout, parts: Sequence[Part], index: int) -> None:
        """Add the calls for a contiguous parameter, or for contiguous copies of part of one."""
        whole = kernel.whole
        if whole is not None and layout.row_starts is None:
            rest = [part.tensor for part in parts]

            def step(head: Tensor, grad: Tensor) -> None:
                whole([head, grad, *rest], layout.start, item.t, item.numbers)

            self._call(kernel, Whole(step, index), {index})
            return
        if whole is not None:
            span = Span(layout.rows, layout.columns, 0, layout.columns)
            self._wait_in_parts(kernel, item, Member(index, layout, span, parts))
            return
        for first, elements in cuts(layout, kernel.most_elements, kernel.width):
            own = layout.cut(first, elements)
            own_parts = [part.cut(first, elements, layout.group_size, layout.columns) for part in parts]
            for span in own.spans(kernel.width):
                if (span.last - span.first) % kernel.width:
                    self._wait_in_parts(kernel, item, Member(index, own, span, own_parts, first))
                else:
                    block = in_place(own, own_parts, span, kernel.width, self._tables, item.head.device)
                    self._phases_bytes += own.rows * 4
                    call = InPlace(kernel.bind(block, item.t, item.numbers), index, first)
                    self._call(kernel, call, {index})
                    if kernel.is_deferred:
                        self.in_place.add(index)

    def _staged(self, kernel: Kernel, item: Item, index: int) -> Iterator[Call]:
        """The calls for a parameter whose head or gradient is not contiguous."""
        shape, layout = item.head.shape, item.layout
        each = layout.elements // shape[0]
        length = max(1, STAGED_ELEMENTS // each)
        for first in range(0, shape[0], length):
            slices = slice(first, min(first + length, shape[0]))
            elements = (slices.stop - first) * each
            head, grad = (
                None
                if tensor.is_contiguous()
                else self._scratch.take(f"staged {what}", elements, tensor.dtype, tensor.device).view(-1, *shape[1:])
                for what, tensor in (("head", item.head), ("gradient", item.grad))
            )
            inner = Planner(self._kernels, [item], self._workspace)
            parts = [part.cut(first * each, elements, layout.group_size, layout.columns) for part in item.parts]
            inner._cut(kernel, item, layout.cut(first * each, elements), parts, 0)
            inner._flush()
            self._phases_bytes += inner._phases_bytes
            yield Staged([call for call, _ in inner._calls], index, slices, (head, grad), kernel)

    def _wait_in_parts(self, kernel: Kernel, item: Item, member: Member) -> None:
        """Pack a member, few enough rows at a time to keep packs small."""
        layout, span = member.layout, member.span
        rows = max(1, PACK_ELEMENTS // (member.groups_per_row * layout.group_size))
        for row in range(0, span.rows, rows):
            count = min(rows, span.rows - row)
            first, elements = row * layout.columns, count * layout.columns
            parts = [part.cut(first, elements, layout.group_size, layout.columns) for part in member.parts]
            part_of_it = span._replace(rows=count)
            self._wait(
                kernel,
                item,
                Member(member.index, layout.cut(first, elements), part_of_it, parts, member.offset + first),
            )

    def _wait(self, kernel: Kernel, item: Item, member: Member) -> None:
        is_resident = member.shape is not None and member.layout.is_flat
        key = id(kernel), id(item.numbers), item.taken, item.grad.dtype, item.head.device, is_resident
        waiting = self._waiting.setdefault(key, _Waiting(kernel, item, is_resident))
        is_full = waiting.elements + member.groups * member.layout.group_size > PACK_ELEMENTS
        if waiting.members and is_full:
            self._pack(waiting)
        waiting.members.append(member)

    def _flush(self) -> None:
        for waiting in self._waiting.values():
            if waiting.members:
                self._pack(waiting)
        self._waiting.clear()

    def _pack(self, waiting: _Waiting) -> None:
        kernel, item, members = waiting.kernel, waiting.item, waiting.members
        waiting.members = []
        dtypes = item.head.dtype, item.grad.dtype
        pack = Pack(kernel, members, item.t, item.numbers, dtypes, item.head.device, self._scratch, waiting.is_resident)
        self._phases_bytes += sum(member.groups for member in members) * 4
        self._call(kernel, pack, {member.index for member in members})


def cuts(layout: Layout, elements: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut a layout into parts of at most `elements` elements: first element and count of each."""
    unit = width if layout.is_flat and layout.row_starts is None else layout.columns
    each = max(1, elements // unit) * unit
    for first in range(0, layout.elements, each):
        yield first, min(each, layout.elements - first)


def shared_memory(tensors: Sequence[Tensor]) -> set[int]:
    """The indices of tensors that share memory with another, as weights tied by `.data` do."""
    ranges = sorted((*_extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
    shared: set[int] = set()
    for number, (_, end, index) in enumerate(ranges):
        for begin, _, other in ranges[number + 1 :]:
            if begin >= end:
                break
            shared |= {index, other}
    return shared


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
