"""Loops in tiles: a CPU kernel runs all its loops over a few rows before it goes on to the next ones.

Inductor writes a loop over all elements for each pass of a step: the largest of each group must be known before its
codes. What one pass leaves for the next goes through memory, which for a state takes longer than computing it again.
Here the loops are put into one, over tiles that stay in the nearest cache, and what they leave each other is a small
array of each thread:

    for each tile of rows, by threads:
        for each row: decode and update the states, the largest of each group
        for each group: scales and factors
        for each row: new weights and codes

This module imports Inductor, which takes a second: compiling does so anyway, and it is for that to import.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen import common, cpp
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import sympy_index_symbol
from torch._inductor.virtualized import V

# Two states take 8 KiB of these, which stay in the nearest cache beside all that is read and written.
TILE_ELEMENTS = 1024

Loop = Any  # a `SchedulerNode` or `FusedSchedulerNode`: what Inductor writes a nest of loops for
Size = Any  # of sympy: a number, or a multiple of a symbol

_FIRST_ROW = sympy_index_symbol("tile")  # what the generated code calls the first row of a tile
# How Inductor makes the array of a thread, and finds where it is.
_ON_THE_HEAP = re.compile(r"std::unique_ptr<(\S+) \[\]> (\w+) = std::make_unique<\S+ \[\]>\((\d+)L\);")
_BY_POINTER = re.compile(r"= (\w+)\.get\(\);")


@contextmanager
def tiled() -> Iterator[None]:
    """Within it, Inductor writes the loops of CPU kernels in tiles."""
    common.init_backend_registration()
    in_tiles = dataclasses.replace(common.device_codegens["cpu"], scheduling=TiledScheduling)
    tag = f"{torch.compiler.config.cache_key_tag} tiles {_version()}".lstrip()  # Inductor's caches cannot know of them
    with mock.patch.dict(common.device_codegens, cpu=in_tiles), torch.compiler.config.patch(cache_key_tag=tag):  # pyright: ignore[reportAttributeAccessIssue]
        yield


@cache
def _version() -> str:
    """Of this module: another for each that may write another kernel."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


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
        rows = _common_rows(loops)
        in_tiles = loops if rows is not None and len(loops) > 1 else []
        for node in waiting:
            if node not in in_tiles:
                super().codegen_node(node)
        if in_tiles:
            self._write_in_tiles(in_tiles, rows)
        super().flush()

    def _write_in_tiles(self, loops: Sequence[Loop], rows: Size) -> None:
        over_tiles = _OverTiles(self.kernel_group)
        over_tiles.set_ranges((rows,), ())
        (last,) = over_tiles.ranges  # the number of rows as the generated code calls it
        columns = max(_per_row(sympy.prod(chain(*_ranges(loop))), rows) for loop in loops)
        tile = max(2, TILE_ELEMENTS // int(columns))
        with _TileBuffers(self.kernel_group.args) as buffers:
            for loop in loops:
                buffers.keep_what_leaves(loop, loops, rows, tile)
            nests = []
            for loop in loops:
                proxy: Any = self.kernel_proxy_cls(self.kernel_group)
                proxy.codegen_nodes(loop.get_nodes())
                level, each = proxy.loop_nest.loops[0], _per_row(_ranges(loop)[0][0], rows)
                level.offset, level.size = each * _FIRST_ROW, each * sympy.Min(_FIRST_ROW + tile, last)
                nests.append(proxy.loop_nest)
            inner = cpp.OuterLoopFusedKernel(self.kernel_group)
            inner.inner = nests
            level = cpp.LoopLevel(_FIRST_ROW, last, steps=sympy.Integer(tile))
            over_tiles.loop_nest = cpp.LoopNest([level], inner)
            self.kernel_group.finalize_kernel(over_tiles, [node for loop in loops for node in loop.get_nodes()])


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

    def __init__(self, kernel_args: Any) -> None:
        super().__init__(kernel_args)
        self._begins: dict[str, Size] = {}  # where the tile begins in each buffer

    def keep_what_leaves(self, loop: Loop, loops: Sequence[Loop], rows: Size, tile: int) -> None:
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
                self._keep(whole, wholes[whole], rows, tile)

    def _keep(self, whole: Any, parts: Sequence[Any], rows: Size, tile: int) -> None:
        layout = whole.node.get_layout()
        row_size = _per_row(sympy.prod(layout.size), rows)
        layout = ir.FixedLayout(layout.device, layout.dtype, [row_size * tile], [sympy.S.One])
        buffers = list({each.get_name(): each.node for each in (whole, *parts)}.values())
        for node in buffers:
            offset = node.get_layout().view.get_layout().offset if _is_part(node) else 0
            self._begins[node.get_name()] = row_size * _FIRST_ROW - offset
        self.add_local_buffer(ir.Buffer(name=f"tile_{whole.get_name()}", layout=layout), buffers)

    def localize_function(self, fn: Any, rewrite_index: Any = None) -> Any:
        def within_tile(_: Any, index: Size, name: str) -> Size:
            return index - self._begins[name]

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


def _per_row(size: Size, rows: Size) -> Size:
    return sympy.simplify(size / rows)


def _common_rows(loops: Sequence[Loop]) -> Size | None:
    """How many rows the outermost loop of all of them runs over, if each row minds itself alone."""
    symbols = {symbol for loop in loops for size in _ranges(loop)[0][:1] for symbol in size.free_symbols}
    if len(symbols) != 1:
        return None
    (rows,) = symbols
    for loop in loops:
        outermost = _ranges(loop)[0][:1]
        if not outermost or not _per_row(outermost[0], rows).is_Integer:
            return None
        if not all(_is_row_by_row(dep, rows) for dep in loop.read_writes.reads_and_writes()):
            return None
    return rows


def _is_row_by_row(dep: Any, rows: Size) -> bool:
    """Whether a loop reads or writes in each row a row of the tensor's own, or in all rows the same."""
    if not isinstance(dep, MemoryDep) or not any(size.has(rows) for size in dep.size):
        return True  # the former says no more than what comes after what
    row, size = dep.var_names[0], dep.size[0]
    step = sympy.expand(dep.index).coeff(row)
    if sympy.expand(dep.index - step * row).has(row):
        return False
    return step * _per_row(size, rows) in (0, V.graph.get_buffer(dep.name).get_stride()[0])
