"""Copies between memory orders (transposed, channels_last) by Inductor's vectorized transposition.

torch's own copy takes the elements one by one: up to five times as long.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.inductor import copies, gcc, probes

TILE = 32  # rows that Inductor transposes at once, or a multiple of it
# Each column of the source may lie in a page of its own, of which a processor knows only so many. Matrices with more
# columns than WIDE are cut into blocks of at most MOST_COLUMNS.
WIDE, MOST_COLUMNS = 512, 128
# Sizes to compile for, which all differ, and enough of them for Inductor to use threads.
EXAMPLE = (5, 203, 307)


class Form(NamedTuple):
    """A copy of `batch` matrices whose rows follow each other in the target, and whose columns do in the source."""

    batch: int
    rows: int
    columns: int
    target_batch: int  # strides
    target_row: int
    source_batch: int
    source_column: int

    @property
    def way(self) -> copies.Way:
        return WAY

    def view_target(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self[:3], (self.target_batch, self.target_row, 1))

    def view_source(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self[:3], (self.source_batch, 1, self.source_column))


def form_of(shape: Sequence[int], target_strides: Sequence[int], source_strides: Sequence[int]) -> Form | None:
    """The form of a copy between two tensors of one shape; None if it is no transposition."""
    found: list[tuple[int, int, int]] = []  # size, stride in the target, stride in the source
    dims = sorted(zip(shape, target_strides, source_strides, strict=True), key=lambda dim: -dim[1])
    for size, target, source in dims:
        if size == 1:
            continue
        if found and found[-1][1:] == (size * target, size * source):  # the two dims are one in either memory
            size *= found.pop()[0]
        found.append((size, target, source))
    if len(found) == 2:
        found.insert(0, (1, 0, 0))
    if len(found) != 3:
        return None
    *outer, (columns, target_step, source_column) = found
    (batch, target_batch, source_batch), (rows, target_row, source_step) = sorted(outer, key=lambda dim: dim[2] == 1)
    if target_step != 1 or source_step != 1 or source_column == 1:
        return None
    return Form(batch, rows, columns, target_batch, target_row, source_batch, source_column)


def in_blocks(form: Form) -> Form:
    """Cut a single matrix into blocks, for threads to share: only batches are shared among them."""
    if form.batch > 1:
        return form
    columns = next((n for n in range(MOST_COLUMNS, TILE - 1, -1) if form.columns % n == 0), form.columns)
    if form.columns > WIDE and columns < form.columns:
        batches = {"target_batch": columns, "source_batch": columns * form.source_column}
        return form._replace(batch=form.columns // columns, columns=columns, **batches)
    if form.rows % TILE == 0:
        return form._replace(batch=form.rows // TILE, rows=TILE, target_batch=TILE * form.target_row, source_batch=TILE)
    return form


class Way:
    """Has Inductor write the transposition with its own vectors."""

    path = probes.TRANSPOSITION
    dynamic_dims = range(3)

    @property
    def examples(self) -> Sequence[Form]:
        batch, rows, columns = EXAMPLE
        form = Form(
            batch, rows, columns, rows * (columns + 11) + 13, columns + 11, columns * (rows + 17) + 19, rows + 17
        )
        return form, form._replace(batch=1, target_batch=0, source_batch=0), form._replace(columns=9)

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def options(self) -> Mapping[str, Any]:
        return gcc.wide_vectors()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


WAY = Way()
