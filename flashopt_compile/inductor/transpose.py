"""Copies between memory orders (transposed, channels_last) by Inductor's vectorized transposition, called directly.

torch's own copy takes the elements one by one: up to five times as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Operation
from flashopt_compile.inductor import bind, probes

TARGET, SOURCE = 0, 1  # arguments of the C++ function that are no sizes
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

    def view_target(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self[:3], (self.target_batch, self.target_row, 1))

    def view_source(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self[:3], (self.source_batch, 1, self.source_column))


@lru_cache(256)
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
    form = Form(batch, rows, columns, target_batch, target_row, source_batch, source_column)
    return _in_blocks(form) if batch == 1 else form


def _in_blocks(form: Form) -> Form:
    """Cut a single matrix into blocks, for threads to share: only batches are shared among them."""
    columns = next((n for n in range(MOST_COLUMNS, TILE - 1, -1) if form.columns % n == 0), form.columns)
    if form.columns > WIDE and columns < form.columns:
        batches = {"target_batch": columns, "source_batch": columns * form.source_column}
        return form._replace(batch=form.columns // columns, columns=columns, **batches)
    if form.rows % TILE == 0:
        return form._replace(batch=form.rows // TILE, rows=TILE, target_batch=TILE * form.target_row, source_batch=TILE)
    return form


@dataclass(frozen=True)
class Transposition:
    """The C++ function of a copy; each of its arguments is TARGET, SOURCE or the name of one of a form's fields."""

    function: Callable[..., None]
    arguments: tuple[int | str, ...]

    def operation(self, form: Form, target: Tensor, source: Tensor) -> Operation:
        tensors = target, source
        given = [tensors[each] if isinstance(each, int) else getattr(form, each) for each in self.arguments]
        return partial(self.function, *given)


def copy(target: Tensor, source: Tensor) -> None:
    """What is compiled."""
    target.copy_(source)


def find(compiled: Callable[..., None], noting: bind.Noting, dtype: torch.dtype) -> Transposition:
    """Find the C++ function of a compiled `copy`; Unbound if it cannot be, or copies wrongly."""
    batch, rows, columns = EXAMPLE
    form = Form(batch, rows, columns, rows * (columns + 11) + 13, columns + 11, columns * (rows + 17) + 19, rows + 17)
    target, source = _example(form, dtype)
    for tensor in (target, source):
        for dim in range(tensor.dim()):
            probes.mark_dynamic(tensor, dim)
    function, arguments = bind.only_call(noting, lambda: compiled(target, source))
    names = {id(target): TARGET, id(source): SOURCE}
    sizes = {value: name for name, value in form._asdict().items()}
    found = Transposition(function, tuple(_name(each, names, sizes) for each in arguments))
    for each in (form, form._replace(batch=1, target_batch=0, source_batch=0), form._replace(columns=9)):
        _check(found, each, dtype)
    return found


def _name(argument: Any, names: dict[int, int], sizes: dict[int, str]) -> int | str:
    if id(argument) in names:
        return names[id(argument)]
    if isinstance(argument, int) and argument in sizes:
        return sizes[argument]
    raise bind.Unbound(f"its C++ function takes {type(argument).__name__} that is none of its inputs")


def _example(form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A target of zeros and a source of random numbers."""
    lengths = (
        form.batch * max(form.target_batch, form.rows * form.target_row),
        form.batch * max(form.source_batch, form.columns * form.source_column),
    )
    target, source = (torch.zeros(length, dtype=dtype, device="cpu") for length in lengths)
    random = torch.Generator("cpu").manual_seed(0)
    source.copy_(torch.randn(source.shape, generator=random, dtype=torch.float32, device="cpu"))
    return form.view_target(target), form.view_source(source)


def _check(found: Transposition, form: Form, dtype: torch.dtype) -> None:
    """Raise Unbound unless the function copies each element to its place, and writes nowhere else."""
    target, source = _example(form, dtype)
    found.operation(form, target, source)()
    expected = torch.zeros(target.untyped_storage().nbytes() // target.itemsize, dtype=dtype, device="cpu")
    form.view_target(expected).copy_(source)
    written = torch.empty(0, dtype=dtype, device="cpu").set_(target.untyped_storage())
    if not torch.equal(written, expected):
        raise bind.Unbound("its C++ function, called directly, copies elements to other places")
