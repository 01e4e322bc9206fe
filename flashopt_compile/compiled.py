"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

from collections.abc import Callable, Sequence
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile import vectors
from flashopt_compile.batch import CHUNK_ELEMENTS, Batch, Pack, works_in_cache
from flashopt_compile.pieces import Form, Piece, row_phases
from flashopt_compile.step import Numbers, Place, Step

Kernel = Callable[..., None]

_number = count()
_kernels: dict[tuple[Any, ...], Kernel] = {}
OPTIONS: dict[str, Any] = {
    # What we have made ourselves needs no checks by Inductor, and a frozen `Step` none by Dynamo beside its tensors'.
    "size_asserts": False,
    "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
}
# Whatever is not shared by a whole group is computed anew where it is needed: what Inductor would store between
# loops instead, up to four bytes an element each, costs more to write and read back. See docs/performance.md.
CPU_OPTIONS = {**OPTIONS, "realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}
# A group's scale, of some 40 operations, is not to become a temporary, which would take a kernel of its own.
GPU_OPTIONS = {**OPTIONS, "realize_opcount_threshold": 60}


def batch(packs: dict[tuple[int, ...], Pack]) -> Batch:
    """A batch whose blocks are stepped by compiled kernels."""
    return Batch(run, packs, vectors.groups_per_row)


def run(step: Step, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
    """Step a block in place, by a kernel compiled on first use.

    On a CPU it is contiguous, has at least two rows, and in each row as many groups as `vectors` says.
    """
    head, grad = tensors[:2]
    if works_in_cache(head.device):
        _kernel_in_cache(step, grad.dtype, head.device, hyper)(tensors, t, place, hyper)
    else:
        _kernel_for(step, tensors, place)([tensors], t, [place], hyper)


def kind_of(step: Step, parameter: Tensor) -> tuple[Any, ...]:
    """Equal for parameters that `prepare` need be called with but once."""
    shape = () if works_in_cache(parameter.device) else tuple(parameter.shape)
    return id(step), parameter.dtype, parameter.device, shape


def prepare(step: Step, parameter: Tensor, hyper: Numbers) -> bool:
    """Compile what steps of `parameter`, with gradients of its dtype, will need; false if nothing was left to do."""
    before = len(_kernels)
    if works_in_cache(parameter.device):
        _kernel_in_cache(step, parameter.dtype, parameter.device, hyper)
    else:  # step one like it
        head, grad, *rest = step.storage.zeros(tuple(parameter.shape), parameter.dtype, parameter.device)
        like_it = batch({})
        like_it.add(step, Piece.of(step, [head, *rest]), grad, torch.ones(()), hyper)
        like_it.flush()
    return len(_kernels) > before


def compile_in_place(step: Step, **options: Any) -> Kernel:
    """Of several blocks, each with its place: `kernel(blocks, t, places, hyper)`."""

    def kernel(blocks: Sequence[Sequence[Tensor]], t: Tensor, places: Sequence[Place], hyper: Numbers) -> None:
        for tensors, place in zip(blocks, places, strict=True):
            step(tensors, t, place, hyper)

    return _compile(kernel, step, {**GPU_OPTIONS, **options})


def mark_rows(tensor: Tensor) -> None:
    """Have Dynamo not bake in how many rows and groups there are, only how long a group is."""
    for dim in range(max(1, tensor.dim() - 1)):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _kernel_for(step: Step, tensors: Sequence[Tensor], place: Place) -> Kernel:
    """The kernel for blocks of this form on a device that takes whole parameters; compiled when first called."""
    head, grad = tensors[:2]
    form = head.dim(), head.shape[-1] if head.dim() > 1 else None, place.terms is None
    key = id(step), grad.dtype, head.device, *form
    if key not in _kernels:
        for tensor in (*tensors, *(place.terms or ())[:1]):
            mark_rows(tensor)
        _kernels[key] = compile_in_place(step)
    return _kernels[key]


def _kernel_in_cache(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """The kernel for blocks of any number of rows, compiled on the first call."""
    key = id(step), grad_dtype, device
    if key not in _kernels:
        _keep_freed_memory()

        def kernel(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
            step(tensors, t, place, hyper)

        if vectors.come_from_gcc(step, grad_dtype):
            # In every call: what Dynamo watches beside its arguments, as the number of threads, has it compile again.
            compiled = vectors.left_to_gcc()(_compile(kernel, step, {**CPU_OPTIONS, **vectors.plain_loops()}))
        else:
            compiled = _compile(kernel, step, {**CPU_OPTIONS, **vectors.wide_vectors()})
        compiled(*_example(step, grad_dtype, device), hyper)
        _kernels[key] = compiled
    return _kernels[key]


def _compile(kernel: FunctionType, step: Step, options: dict[str, Any]) -> Kernel:
    # Dynamo counts graphs, and gives up at eight, per code object: each kernel gets one of its own.
    code: CodeType = kernel.__code__
    kernel.__code__ = code.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, options=options)


def _example(step: Step, grad_dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor, Place]:
    """A block of zeros of the usual size, by which Inductor decides on threads; its rows not to be baked in."""
    size = step.storage.group_size
    form = Form.of(CHUNK_ELEMENTS, size, vectors.groups_per_row(step, grad_dtype, device))
    tensors = [form.join(rows) for rows in step.storage.zeros((form.rows, size), grad_dtype, device)]
    place = form.place(0, row_phases(form.rows, size, size, device).clone(), size)
    for tensor in (*tensors, *(place.terms or ())[:1]):
        mark_rows(tensor)
    return tensors, torch.ones(()), place


def _keep_freed_memory() -> None:
    """Have the C library keep what a call frees for the next one.

    It returns blocks to the system by what has been freed before; freeing one of just under 32 MiB, which takes no
    memory as long as nobody writes to it, raises the limit. Each call would else wait for hundreds of new pages.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")
