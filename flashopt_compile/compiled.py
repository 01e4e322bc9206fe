"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.batch import CHUNK_ELEMENTS
from flashopt_compile.pieces import FLAT_COLUMNS, lane_phases, no_phase, row_phases
from flashopt_compile.step import Numbers, Place, Step

Kernel = Callable[[Tensor, Sequence[Tensor], Tensor, Place, Numbers], None]

_number = count()
_kernels: dict[tuple[int, torch.dtype, torch.device], Kernel] = {}  # by the id of a `Step.of`
# Whatever is not shared by a whole group is computed anew where it is needed: what Inductor would store between
# loops instead, up to four bytes an element each, costs more to write and read back. See docs/performance.md.
OPTIONS: dict[str, Any] = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 1000,
    # What we have made ourselves needs no checks by Inductor, and a frozen `Step` none by Dynamo beside its tensors'.
    "size_asserts": False,
    "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
}


def run(step: Step, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
    """Step a contiguous block of at least two rows in place, by a kernel compiled on first use."""
    head, grad = tensors[:2]
    kernel = kernel_of(step, grad.dtype, head.device, hyper)
    # The kernel does not write the head in place: a masked store to where the next load begins stalls it.
    spare = spare_memory(head.shape[1], head.dtype, head.device, threading.get_ident())
    new_head = spare[: len(head)] if len(head) <= len(spare) else torch.empty_like(head)
    kernel(new_head, tensors, t, place, hyper)
    head.copy_(new_head)


def kernel_of(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """The kernel for blocks of any number of rows, compiled on the first call."""
    key = id(step), grad_dtype, device
    if key not in _kernels:
        _keep_freed_memory()
        kernel = _kernel(step)
        kernel(*_example(step, grad_dtype, device), hyper)
        _kernels[key] = kernel
    return _kernels[key]


def is_compiled(step: Step, grad_dtype: torch.dtype, device: torch.device) -> bool:
    return (id(step), grad_dtype, device) in _kernels


def _kernel(step: Step) -> Kernel:
    def kernel(new_head: Tensor, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        parts, _ = step.compute(tensors, t, place, hyper)
        for old, new in zip((new_head, *tensors[2:]), parts, strict=True):
            old.copy_(new)

    # Dynamo counts graphs, and gives up at eight, per code object: each kernel gets one of its own.
    kernel.__code__ = kernel.__code__.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, options=OPTIONS)


def _example(step: Step, grad_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor, Place]:
    """A block of zeros of the usual size, by which Inductor decides on threads; its rows not to be baked in."""
    size = step.storage.grouped.group_size if step.storage.grouped else FLAT_COLUMNS
    shape = CHUNK_ELEMENTS // size, size
    head = torch.zeros(shape, dtype=step.storage.weight.parts(shape)[step.storage.weight.names[0]].dtype, device=device)
    tensors = [head, torch.zeros(shape, dtype=grad_dtype, device=device)]
    for part in step.storage.parts(shape).values():
        tensors.append(torch.zeros(part.shape, dtype=part.dtype, device=device))
    place = Place(no_phase(device), row_phases(shape[0], size, size, device).clone(), lane_phases(size, device))
    new_head = torch.zeros_like(head)
    for tensor in (new_head, *tensors, place.rows):
        torch._dynamo.mark_dynamic(tensor, 0)
    return new_head, tensors, torch.ones(()), place


@cache
def spare_memory(columns: int, dtype: torch.dtype, device: torch.device, thread: int) -> Tensor:
    """A block for a thread to write new heads to, kept: one allocated for each call would wander through the heap."""
    return torch.empty(CHUNK_ELEMENTS // columns, columns, dtype=dtype, device=device)


def _keep_freed_memory() -> None:
    """Have the C library keep what a call frees for the next one.

    It returns blocks to the system by what has been freed before; freeing one of just under 32 MiB, which takes no
    memory as long as nobody writes to it, raises the limit. Each call would else wait for hundreds of new pages.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")
