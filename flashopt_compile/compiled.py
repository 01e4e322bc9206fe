"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.batch import CHUNK_ELEMENTS, Batch, works_in_cache
from flashopt_compile.pieces import Piece, lane_phases, row_phases
from flashopt_compile.step import Numbers, Place, Step
from flashopt_compile.storage import FLAT_COLUMNS
from quant.dither import phase_of
from quant.ulp import scalar_loops

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


def run(step: Step, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
    """Step a block in place, by a kernel compiled on first use; on a CPU a contiguous one of at least two rows."""
    head, grad = tensors[:2]
    if not works_in_cache(head.device):
        _kernel_for(step, tensors, place)([tensors], t, [place], hyper)
        return
    kernel = _kernel_in_cache(step, grad.dtype, head.device, hyper)
    # The kernel does not write the head in place: a masked store to where the next load begins stalls it.
    rows, columns = head.shape
    spare = spare_memory(columns, head.dtype, head.device, threading.get_ident())
    new_head = spare[:rows] if rows <= spare.shape[0] else torch.empty_like(head)
    kernel(new_head, tensors, t, place, hyper)
    head.copy_(new_head)


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
        batch = Batch(run, {})
        batch.add(step, Piece.of(step, [head, *rest]), grad, torch.ones(()), hyper)
        batch.flush()
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

        def kernel(new_head: Tensor, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
            parts, _ = step.compute(tensors, t, place, hyper)
            for old, new in zip((new_head, *tensors[2:]), parts, strict=True):
                old.copy_(new)

        plain = _plain_loops() if _lacks_vectors(step, grad_dtype) else {}
        compiled = _compile(kernel, step, {**CPU_OPTIONS, **(plain or _wide_vectors())})
        with _loops_apart() if plain else nullcontext():
            compiled(*_example(step, grad_dtype, device), hyper)
        _kernels[key] = compiled
    return _kernels[key]


def _lacks_vectors(step: Step, grad_dtype: torch.dtype) -> bool:
    """Whether Inductor has no fast vectors for a step, and gcc has.

    Inductor has none for int16 (torch 2.13), and those of less than 512 bits load 8 bytes or so through memory. gcc
    does not vectorize the conversion of fp16.
    """
    from torch._inductor import cpu_vec_isa  # takes a second, and compiling imports it anyway

    dtypes = {part.dtype for part in step.storage.step_parts((1, FLAT_COLUMNS), grad_dtype)}
    narrow = cpu_vec_isa.pick_vec_isa().bit_width() != 512
    return torch.int16 in dtypes or (narrow and torch.float16 not in dtypes)


@cache
def _wide_vectors() -> dict[str, str]:
    """Have gcc use whole vectors of 512 bits where Inductor does.

    For some processors, Intel's, it prefers halves: it then copies a vector half by half where a float is cast to its
    bits, and what reads it whole waits for both, so that a step takes two and a half times as long. Inductor has no
    option for more flags, but one whose text is put among them.
    """
    from torch._inductor import config, cpu_vec_isa

    contract = config.cpp.enable_floating_point_contract_flag
    if not isinstance(contract, str) or cpu_vec_isa.pick_vec_isa().bit_width() != 512:
        return {}
    return {"cpp.enable_floating_point_contract_flag": f"{contract} -mprefer-vector-width=512"}


@cache
def _plain_loops() -> dict[str, Any]:
    """Have Inductor write loops over single elements, and gcc vectorize them, as it can for every processor.

    Inductor's flags keep gcc from it; what is said to be the architecture comes after them. Roots that set errno, and
    loads moved to the end of a loop, would keep it from loops of ours. Nothing where the compiler is another.
    """
    from torch._inductor import config, cpp_builder

    march = getattr(config.cpp, "march", "")
    if sys.platform != "linux" or march == "" or not cpp_builder.is_gcc():
        return {}
    flags = "-ftree-loop-vectorize -fno-math-errno -fno-tree-pre"
    return {"cpp.simdlen": 1, "cpp.march": f"{march or 'native'} {flags}"}


@contextmanager
def _loops_apart() -> Iterator[None]:
    """Have Inductor put no loop over groups around those over elements: gcc vectorizes either, but not the two."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Apart(InductorChoices):
        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            elements = [math.prod((*lengths, *reduced)) for _, (lengths, reduced) in (node1.group, node2.group)]
            return elements[0] == elements[1] and not node1.is_reduction()

    with V.set_choices_handler(Apart()), scalar_loops():
        yield


def _compile(kernel: FunctionType, step: Step, options: dict[str, Any]) -> Kernel:
    # Dynamo counts graphs, and gives up at eight, per code object: each kernel gets one of its own.
    code: CodeType = kernel.__code__
    kernel.__code__ = code.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, options=options)


def _example(step: Step, grad_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor, Place]:
    """A block of zeros of the usual size, by which Inductor decides on threads; its rows not to be baked in."""
    size = step.storage.grouped.group_size if step.storage.grouped else FLAT_COLUMNS
    shape = CHUNK_ELEMENTS // size, size
    tensors = step.storage.zeros(shape, grad_dtype, device)
    rows = row_phases(shape[0], size, size, device).clone()
    new_head = torch.zeros_like(tensors[0])
    for tensor in (new_head, *tensors, rows):
        mark_rows(tensor)
    return new_head, tensors, torch.ones(()), Place(phase_of(0), (rows, lane_phases(size, device)))


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
