"""Example blocks: to compile a step for, and to check a bound kernel with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Kernel, run_at_once
from flashopt_compile.engine.layout import Block, Layout, Tables
from flashopt_compile.engine.numbers import flat
from flashopt_compile.engine.step import Numbers, Place, Step
from flashopt_compile.inductor import probes
from flashopt_compile.inductor.bind import Found, Unbound

# Rows, and pieces in each. Inductor decides by the number of elements whether to use threads; tiles always do.
SMALL, LARGE = (6, 37), (64, 2053)
# Of the rows by which kernels are compared: as many groups as pieces of any width may consist of, 37 times.
ROWS, GROUPS = 3, 37 * 16
# Elements before an example, at most.
MOST_OFFSET = 1 << 16


@dataclass(frozen=True)
class Example:
    """The arguments of a step of one block, whose sizes all differ; rows have more elements than the block."""

    tensors: Sequence[Tensor]
    t: Tensor
    place: Place
    numbers: Numbers
    sizes: Mapping[str, int]


def of(
    step: Step,
    grad_dtype: torch.dtype,
    device: torch.device,
    numbers: Numbers,
    width: int,
    shape: tuple[int, int],
    fill: Callable[[Tensor], Any] = lambda tensor: None,
) -> Example:
    """An example for a kernel that takes pieces of `width`; zeros, unless `fill` writes something else."""
    (rows, pieces), size = shape, step.storage.group_size
    groups = width // size
    stride, scale_stride = pieces * width + size + 8, pieces * groups + 5
    parts = step.storage.step_parts((rows, pieces * width), grad_dtype)
    tensors = []
    for part, is_scale in zip(parts, (False, *step.storage.scales), strict=True):
        whole = torch.zeros(rows, scale_stride if is_scale else stride, dtype=part.dtype, device=device)
        fill(whole)
        each = groups if is_scale else width
        view = whole[:, : pieces * each].unflatten(1, (pieces, each))
        tensors.append(view.view(torch.int16) if step.for_gcc and view.dtype == torch.float16 else view)
    layout = Layout(rows, stride, size)
    place = Tables().place(layout.starts(device), pieces, size, groups)
    # Copies, as of one tensor that is two numbers at once Dynamo would make one input.
    own = {
        name: tuple(map(torch.clone, number)) if isinstance(number, tuple) else number.clone()
        for name, number in numbers.items()
    }
    t = torch.ones((), dtype=torch.float32, device="cpu")
    assert place.table is not None
    for tensor in (*tensors, place.table.rows):
        for dim in (0, 1) if tensor.dim() == 3 else (0,):
            probes.mark_dynamic(tensor, dim)
    probes.mark_dynamic(place.table.groups, 0)
    sizes = {"rows": rows, "count": pieces, "stride": stride, "scale_stride": scale_stride}
    return Example(tensors, t, place, own, sizes)


def check(
    compiled: Callable[..., None],
    found: Found,
    step: Step,
    grad_dtype: torch.dtype,
    device: torch.device,
    numbers: Numbers,
    width: int,
) -> None:
    """Raise Unbound unless a bound kernel gives the bits of the compiled step, for rows apart and for one long row."""
    samples = sample_numbers(numbers)

    def sample() -> Example:
        random = torch.Generator("cpu").manual_seed(0)
        return of(step, grad_dtype, device, samples, width, SMALL, lambda tensor: _fill(tensor, random))

    expected, apart, together = sample(), sample(), sample()
    compiled(expected.tensors, expected.t, expected.place, expected.numbers)
    rows, pieces = SMALL
    block = Block(
        apart.tensors[2:], apart.place, (rows, pieces, width), apart.sizes["stride"], apart.sizes["scale_stride"]
    )
    run_at_once(found.bind(block, apart.t, apart.numbers).run(*apart.tensors[:2]))

    tensors = [tensor.reshape(1, rows * pieces, -1) for tensor in together.tensors]
    table = together.place.table
    assert table is not None
    groups = (table.rows + table.groups).reshape(rows * pieces, -1)
    place = Place(together.place.start, table._replace(rows=torch.zeros_like(table.rows[:1]), groups=groups))
    block = Block(tensors[2:], place, (1, rows * pieces, width), 0, 0)
    run_at_once(found.bind(block, together.t, together.numbers).run(*tensors[:2]))

    for number, want in enumerate(expected.tensors):
        for what, got in (("rows apart", apart.tensors[number]), ("one row", tensors[number].view_as(want))):
            if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
                raise Unbound(f"its C++ function, called directly, gives other bits of tensor {number} for {what}")


def agree(
    one: Kernel, other: Kernel, step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers
) -> bool:
    """Whether two kernels of a step, which may take pieces of other widths, make the same bits of the same numbers."""
    results = (_result(kernel, step, grad_dtype, device, numbers) for kernel in (one, other))
    return all(map(torch.equal, *results))


def _result(
    kernel: Kernel, step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers
) -> list[Tensor]:
    """The bytes of all that a kernel has made of random rows.

    Numbers beside head and gradient are positive: the bits of NaN, as of roots, may differ from compiler to compiler.
    """
    random, lowest = torch.Generator("cpu").manual_seed(1), chain([-2.0, -2.0], repeat(0.01))
    shape = ROWS, GROUPS * step.storage.group_size // kernel.width
    given = of(
        *(step, grad_dtype, device, sample_numbers(numbers), kernel.width, shape),
        lambda tensor: _fill(tensor, random, next(lowest)),
    )
    block = Block(
        given.tensors[2:], given.place, (*shape, kernel.width), given.sizes["stride"], given.sizes["scale_stride"]
    )
    head, grad = given.tensors[:2]
    run_at_once(kernel.bind(block, given.t, given.numbers, (head, grad)).run(head, grad))
    return [tensor.contiguous().view(torch.uint8).flatten() for tensor in given.tensors]


def _fill(tensor: Tensor, random: torch.Generator, lowest: float = -0.1) -> None:
    """Write numbers as they occur: floats from `lowest` on, any codes."""
    shape = tensor.shape
    if tensor.is_floating_point():
        tensor.copy_(torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").abs_().add_(lowest))
    else:
        info = torch.iinfo(tensor.dtype)
        low = max(info.min + 1, 1 - info.max)
        tensor.copy_(torch.randint(low, info.max, shape, generator=random, dtype=torch.int64, device="cpu"))


def like(tensor: Tensor, random: torch.Generator) -> Tensor:
    """A tensor of the same form and alignment, with numbers as they occur."""
    found = copy_of(tensor)
    _fill(found, random)
    return found


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which begins where the tensor does in its memory, or at a like place.

    Compilers tell offsets of 0 and 1 apart from others, and write kernels for those that are multiples of 16 bytes.
    """
    offset = tensor.storage_offset()
    if offset > MOST_OFFSET:
        offset = MOST_OFFSET + offset % 16
    memory = torch.empty(offset + _extent(tensor), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)


def aligned(tensor: Tensor, offset: int) -> Tensor:
    """Memory of the same form that begins at a multiple of 16 bytes, behind others if `offset` says so."""
    first = 16 if offset else 0
    return torch.empty(first + _extent(tensor), dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, tensor.stride(), first
    )


def _extent(tensor: Tensor) -> int:
    """The elements from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def apart(numbers: Numbers) -> Numbers:
    """The same numbers, one element behind the beginning of memory of their own."""

    def moved(number: Any) -> Any:
        return tuple(map(moved, number)) if isinstance(number, tuple) else number.repeat(2)[1]

    return {name: moved(number) for name, number in numbers.items()}


def mark_rows(tensor: Tensor) -> None:
    """Tell Dynamo that the numbers of rows and groups change, and only a group's length is fixed."""
    for dim in range(max(1, tensor.dim() - 1)):
        probes.mark_dynamic(tensor, dim)


def sample_numbers(numbers: Numbers, most: float = 0.9) -> Numbers:
    """Different numbers, all within (0, 1), in place of each."""
    values = iter([most / (number + 1) for number in range(len(flat(numbers)))])

    def sample(number: Any) -> Any:
        return tuple(map(sample, number)) if isinstance(number, tuple) else torch.full_like(number, next(values))

    return {name: sample(number) for name, number in numbers.items()}
