"""Copies between contiguous and channels_last filters, as interleaving by factors.

A filter of 3×3 has nine planes, one element of each channel in every plane, and channels_last memory has them one after
the other. A contiguous filter has the nine elements of a channel beside each other: its planes, interleaved. gcc
vectorizes interleaving of two, three or four planes, but not of nine. So it is done twice, three by three, in tiles
that stay in the nearest cache. With `planes` = outer × inner:

    middle[j, c, i] = planes[i, j, c]     i < outer, j < inner
    contiguous[c, i, j] = middle[j, c, i]

and the way back is the same from the end. Elements are copied as integers of their size.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.inductor import copies, gcc, probes, transpose
from quant.ulp import once

# Channels that are interleaved at a time: as many as divide a filter's. Longer stretches of memory are read sooner.
CHANNELS = (128, 64)
# How the planes of a filter are factored: of 2×2, 3×3 and 4×4.
FACTORS = {4: (2, 2), 9: (3, 3), 16: (4, 4)}
INTEGERS = {2: torch.int16, 4: torch.int32}
# Sizes to compile for, which all differ: filters, pieces, and the elements between filters and planes.
EXAMPLE = (5, 7, 16001, 16103, 979)


class Way(NamedTuple):
    """Interleaves planes, or takes elements apart to planes."""

    apart: bool
    outer: int
    inner: int
    channels: int

    @property
    def path(self) -> probes.FastPath:
        return probes.INTERLEAVING

    @property
    def dynamic_dims(self) -> Sequence[int]:
        return 0, 1

    @property
    def examples(self) -> Sequence["Form"]:
        form = Form(*EXAMPLE, self)
        return (
            form,
            form._replace(filters=1, target_filter=0, source_filter=0),
            form._replace(pieces=1),
            form._replace(pieces=2),
        )

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        return INTEGERS.get(dtype.itemsize, dtype)

    def options(self) -> Mapping[str, Any] | None:
        return gcc.loops_for_gcc() or None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy (filters, pieces, channels, outer, inner).

        The last dims of a target are the innermost loops, which are short: gcc unrolls them.
        """
        middle = once(source.permute(0, 1, 4, 2, 3).clone(memory_format=torch.contiguous_format))
        target.copy_(middle.permute(0, 1, 3, 4, 2))


class Form(NamedTuple):
    """A copy of some filters, whose channels are cut into pieces."""

    filters: int
    pieces: int
    target_filter: int  # strides
    source_filter: int
    plane: int
    way: Way

    def view_target(self, tensor: Tensor) -> Tensor:
        return self._view(tensor, self.target_filter, self.way.apart)

    def view_source(self, tensor: Tensor) -> Tensor:
        return self._view(tensor, self.source_filter, not self.way.apart)

    def _view(self, tensor: Tensor, each: int, in_planes: bool) -> Tensor:
        _, outer, inner, channels = self.way
        channel, plane = (1, self.plane) if in_planes else (outer * inner, 1)
        shape = self.filters, self.pieces, channels, outer, inner
        return tensor.as_strided(shape, (each, channels * channel, channel, inner * plane, plane))


def forms_of(
    shape: Sequence[int], target_strides: Sequence[int], source_strides: Sequence[int]
) -> tuple[copies.Form, ...]:
    """The forms of a copy between two tensors of one shape, the quickest first; none if it is no transposition."""
    matrices = transpose.form_of(shape, target_strides, source_strides)
    if matrices is None:
        return ()
    filters = form_of(matrices)
    return (transpose.in_blocks(matrices),) if filters is None else (filters, transpose.in_blocks(matrices))


def form_of(matrices: transpose.Form) -> Form | None:
    """The form of a copy whose matrices are the planes of filters; None if they are not, or of a size not factored."""
    batch, rows, columns, target_batch, target_row, source_batch, source_column = matrices
    if columns in FACTORS and target_row == columns:
        apart, planes, all_channels, plane = False, columns, rows, source_column
    elif rows in FACTORS and source_column == rows:
        apart, planes, all_channels, plane = True, rows, columns, target_row
    else:
        return None
    channels = next((each for each in CHANNELS if all_channels % each == 0), None)
    if channels is None:
        return None
    way = Way(apart, *FACTORS[planes], channels)
    return Form(batch, all_channels // channels, target_batch, source_batch, plane, way)
