"""Loops in tiles: a CPU kernel runs all its loops over a few pieces of a row before it goes on to the next ones.

Inductor writes a loop over all elements for each pass of a step: the largest of each group must be known before its
codes. What one pass leaves for the next goes through memory, which for a state takes longer than computing it again.
Here the loops are put into one, over tiles that stay in the nearest cache, and what they leave each other is a small
array of each thread. Of a block (rows, n, width):

    for each row, and each tile of its n pieces, by threads:
        for each piece: decode and update the states, the largest of each group
        for each group: scales and factors
        for each piece: new weights and codes

This module imports Inductor, which takes a second: compiling does so anyway, and it is for that to import.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import sympy
from torch._inductor import ir
from torch._inductor.codegen import cpp
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import sympy_index_symbol
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import Identity

# Two states take 8 KiB of these, which stay in the nearest cache beside all that is read and written.
TILE_ELEMENTS = 1024

Loop = Any  # a `SchedulerNode` or `FusedSchedulerNode`: what Inductor writes a nest of loops for
Size = Any  # a sympy expression: a number, a symbol, or a multiple of one

# What the generated code calls the row, and the first piece, of a tile.
_ROW, _FIRST = sympy_index_symbol("row"), sympy_index_symbol("tile")
# How Inductor makes the array of a thread, and finds where it is.
_ON_THE_HEAP = re.compile(r"std::unique_ptr<(\S+) \[\]> (\w+) = std::make_unique<\S+ \[\]>\((\d+)L\);")
_BY_POINTER = re.compile(r"= (\w+)\.get\(\);")
# Strides of no tensor, by which Inductor is told that neighbouring loops are not one.
_APART = (15485863, 1299709, 1)
# Loops over fewer elements are over the groups of a piece: they and the loop over pieces are one, long enough for gcc.
_LEAST_ELEMENTS = 8
# What Inductor is told them in: a tuple until torch 2.14.
_CONSTRAINTS: Any = getattr(ir, "ExtraIndexingConstraints", lambda *constraints: constraints)


class InTiles(CustomSchedulerPass):
    """Has one compilation write its loops in tiles. As an option of Inductor's it concerns no other."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        for node in nodes:
            _keep_loops_apart(node)
        if nodes:
            scheduler = nodes[0].scheduler
            devices = {device for node in nodes if (device := node.get_device()) is not None and device.type == "cpu"}
            for device in devices:
                scheduler.backends[device] = TiledScheduling(scheduler)
        return nodes

    def uuid(self) -> Any:
        """What tells Inductor's caches which tiles a kernel was written with."""
        return _version()


@cache
def _version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _keep_loops_apart(node: Any) -> None:
    """Have loops over rows, pieces and elements stay three, though some tensors would allow for fewer.

    Only loops of one kind become one. Those over pieces and their groups are one in any case.
    """
    find = getattr(node.node, "get_default_sizes_body", None)
    if find is None:
        return
    _, body, (variables, _) = find()
    if 2 <= len(variables) <= len(_APART):
        strides: list[int] = list(_APART[: len(variables)])
        last = body.var_ranges[variables[-1]]
        if len(variables) == len(_APART) and last.is_Integer and last < _LEAST_ELEMENTS:
            strides[1] = int(last)
        terms = (variable * stride for variable, stride in zip(variables, strides, strict=True))
        node.recompute_size_and_body(_CONSTRAINTS(body.var_ranges, [sum(terms, sympy.Integer(0))]))


class TiledScheduling(cpp.CppScheduling):
    """Inductor's own, but for which loops become one, and in what order a kernel runs them."""

    scheduler: Any

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._waiting: list[Loop] = []

    def can_fuse_vertical(self, node1: Loop, node2: Loop) -> bool:
        """Into one loop over elements, unless it has to end before node2 can begin."""
        reduced = {name for node in node1.get_nodes() if node.is_reduction() for name in node.get_buffer_names()}
        waits = any(dep.name in reduced for dep in node2.read_writes.reads)
        return not waits and self.can_fuse_horizontal(node1, node2)

    def can_fuse_horizontal(self, node1: Loop, node2: Loop) -> bool:
        """Into one loop; what a reduction needs is apart from what need not come before it."""
        together = self._leads_to_reduction(node1) == self._leads_to_reduction(node2)
        return together and super().can_fuse_horizontal(node1, node2)

    def _leads_to_reduction(self, node: Loop) -> bool:
        names = node.get_operation_names()
        reductions = (each for each in self.scheduler.nodes if each.is_reduction())
        return node.is_reduction() or any(names & each.ancestors for each in reductions)

    def can_fuse_vertical_outer_loop(self, node1: Loop, node2: Loop) -> bool:
        """Never: a loop over rows, each of which waits for the scales of its own groups."""
        return False

    def codegen_node(self, node: Loop) -> None:
        self._waiting.append(node)

    def flush(self) -> None:
        """Write all that waits: numbers, then the loops in tiles; or each by itself, as Inductor does."""
        waiting, self._waiting = self._waiting, []
        loops = [node for node in waiting if any(_ranges(node))]
        outer = _common_loops(loops)
        in_tiles = loops if outer is not None and len(loops) > 1 else []
        for node in waiting:
            if node not in in_tiles:
                super().codegen_node(node)
        if in_tiles and outer is not None:
            self._write_in_tiles(in_tiles, *outer)
        super().flush()

    def _write_in_tiles(self, loops: Sequence[Loop], rows: Size, pieces: Size) -> None:
        over_tiles = _OverTiles(self.kernel_group)
        over_tiles.set_ranges((rows, pieces), ())
        last_row, last = over_tiles.ranges  # as the generated code calls them
        width = max(sympy.prod(chain(*_ranges(loop))) / (rows * pieces) for loop in loops)
        tile = max(2, TILE_ELEMENTS // int(width))
        with _TileBuffers(self.kernel_group.args, rows, pieces, tile) as buffers:
            for loop in loops:
                buffers.keep_what_leaves(loop, loops)
            nests = []
            for loop in loops:
                proxy: Any = self.kernel_proxy_cls(self.kernel_group)
                proxy.codegen_nodes(loop.get_nodes())
                row, piece = proxy.loop_nest.loops[:2]
                each = _per_piece(loop, pieces)
                row.offset, row.size = _ROW, _ROW + 1
                piece.offset, piece.size = each * _FIRST, each * sympy.Min(_FIRST + tile, last)
                nests.append(proxy.loop_nest)
            inner = _InEachTile(self.kernel_group)
            inner.inner = nests
            levels = [cpp.LoopLevel(_ROW, last_row), cpp.LoopLevel(_FIRST, last, steps=sympy.Integer(tile))]
            over_tiles.loop_nest = cpp.LoopNest(levels, inner)
            self.kernel_group.finalize_kernel(over_tiles, [node for loop in loops for node in loop.get_nodes()])


class _InEachTile(cpp.OuterLoopFusedKernel):
    """The loops of a tile."""

    def decide_parallel_depth(self, max_parallel_depth: Any, threads: int) -> Any:
        """Threads share all tiles of all rows, however many there are of each."""
        return dataclasses.replace(max_parallel_depth, parallel_depth=2, start_depth=0)


class _OverTiles(cpp.CppKernelProxy):
    """The loop over tiles. The arrays of a thread are on its stack, and aligned.

    On the heap, where Inductor has them, some ten calls of each thread take as long as stepping 100,000 elements if
    other work has had the caches.
    """

    def codegen_loops(self, code: Any, worksharing: Any) -> None:
        first = len(code._lines)
        super().codegen_loops(code, worksharing)
        on_the_stack: set[str] = set()
        for number, line in enumerate(code._lines[first:], start=first):
            if made := _ON_THE_HEAP.search(str(line)):
                dtype, name, size = made.groups()
                on_the_stack.add(name)
                code._lines[number] = line.replace(made.group(), f"alignas(64) {dtype} {name}[{size}];")
            elif (used := _BY_POINTER.search(str(line))) and used[1] in on_the_stack:
                code._lines[number] = line.replace(".get()", "")


class _TileBuffers(LocalBufferContext):
    """Arrays of a thread, for a tile of what loops leave each other."""

    def __init__(self, kernel_args: Any, rows: Size, pieces: Size, tile: int) -> None:
        super().__init__(kernel_args)
        self._count, self._tile = rows * pieces, tile
        self._first = _ROW * pieces + _FIRST  # the first piece of a tile, among those of all rows
        self._begins: dict[str, Size] = {}  # where the tile begins in each buffer

    def keep_what_leaves(self, loop: Loop, loops: Sequence[Loop]) -> None:
        """Give an array to whatever `loop` computes for other loops of the tile, and for these alone."""
        own = set(loop.get_nodes())
        inside = {node for each in loops for node in each.get_nodes()}
        wholes: dict[Any, list[Any]] = {}
        for buffer in loop.get_outputs():
            wholes.setdefault(_whole(buffer), []).append(buffer)
        users = {whole: {user.node for user in whole.users} - {whole.defining_op} for whole in wholes}
        local = [whole for whole in wholes if users[whole] <= inside and _is_made_of(whole, wholes[whole])]
        leaving = {whole.defining_op for whole in local if not users[whole] <= own}
        for whole in local:
            # What is used within its loop alone is none of Inductor's buffers, but where it does not see the user's.
            if not users[whole] <= own or users[whole] & leaving:
                self._keep(whole, wholes[whole])

    def _keep(self, whole: Any, parts: Sequence[Any]) -> None:
        layout = whole.node.get_layout()
        per_piece = sympy.simplify(_simplified(sympy.prod(layout.size)) / self._count)
        layout = ir.FixedLayout(layout.device, layout.dtype, [per_piece * self._tile], [sympy.S.One])
        buffers = list({each.get_name(): each.node for each in (whole, *parts)}.values())
        for node in buffers:
            offset = node.get_layout().view.get_layout().offset if _is_part(node) else 0
            self._begins[node.get_name()] = per_piece * self._first - offset
        self.add_local_buffer(ir.Buffer(name=f"tile_{whole.get_name()}", layout=layout), buffers)

    def localize_function(self, fn: Any, rewrite_index: Any = None) -> Any:
        def within_tile(_: Any, index: Size, name: str) -> Size:
            return index + Identity(-self._begins[name])

        return super().localize_function(fn, within_tile)


def _is_part(node: Any) -> bool:
    """Whether it is what a concatenation is made of."""
    return isinstance(node.get_layout(), ir.NonOwningLayout)


def _whole(buffer: Any) -> Any:
    """The concatenation that a buffer is part of, or itself."""
    if not _is_part(buffer.node):
        return buffer
    return V.graph.scheduler.name_to_buf[buffer.node.get_layout().view.get_name()]


def _is_made_of(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether a buffer is memory of its own, of which all is written to `parts`."""
    if whole.get_mutations() or whole.get_aliases() or not whole.node.get_layout().is_contiguous():
        return False
    return parts == [whole] or len(parts) == len(whole.node.inputs)


def _ranges(node: Loop) -> tuple[Sequence[Size], Sequence[Size]]:
    """How often each of its loops runs: those over what it writes, and those over what it reduces."""
    return node.group[1]


def _per_piece(loop: Loop, pieces: Size) -> Size:
    """How often its second loop runs for each piece: once, or once for each group."""
    return _ranges(loop)[0][1] / pieces


def _simplified(size: Size) -> Size:
    """With one symbol for sizes that Inductor knows to be equal."""
    return V.graph.sizevars.simplify(size)


def _common_loops(loops: Sequence[Loop]) -> tuple[Size, Size] | None:
    """How often the two outermost loops of all of them run, if each piece of each row minds itself alone."""
    outer = {tuple(_ranges(loop)[0][:2]) for loop in loops}
    both = next(
        (each for each in outer if len(each) == 2 and all(isinstance(size, sympy.Symbol) for size in each)), None
    )
    if both is None:
        return None
    rows, pieces = both
    if any(len(each) != 2 or each[0] != rows or not (each[1] / pieces).is_Integer for each in outer):
        return None
    written = {name for loop in loops for name in loop.get_buffer_names()}
    written |= {name for loop in loops for buffer in loop.get_outputs() for name in buffer.get_mutations()}
    deps = (dep for loop in loops for dep in loop.read_writes.reads_and_writes() if dep.name in written)
    return (rows, pieces) if all(_minds_itself(dep, rows, pieces) for dep in deps) else None


def _minds_itself(dep: Any, rows: Size, pieces: Size) -> bool:
    """Whether a loop reads or writes, at each piece of each row, no more than what belongs to that piece."""
    if not isinstance(dep, MemoryDep) or not any(size.has(rows) or size.has(pieces) for size in dep.size):
        return True  # the former says no more than what comes after what
    stride = [_simplified(each) for each in V.graph.get_buffer(dep.name).get_stride()]
    index = sympy.expand(_simplified(dep.index))
    steps = [index.coeff(each) for each in dep.var_names]
    if any(sympy.expand(index - step * each).has(each) for each, step in zip(dep.var_names, steps, strict=True)):
        return False
    if dep.size[0] == rows and len(steps) > 1:  # the rows, then the pieces of a row and all that is in them
        per_piece = sympy.simplify(dep.size[1] / pieces)
        return bool(per_piece.is_Integer and steps[0] == stride[0] and steps[1] * per_piece == stride[1])
    per_piece = sympy.simplify(dep.size[0] / (rows * pieces))
    is_one_row = sympy.simplify(stride[0] - stride[1] * pieces) == 0
    return bool(per_piece.is_Integer and is_one_row and steps[0] * per_piece == stride[1])
