"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile import vectors
from flashopt_compile.batch import CHUNK_ELEMENTS, Batch, Kernel, Pack, works_in_cache
from flashopt_compile.pieces import Form, Piece, row_phases
from flashopt_compile.step import Numbers, Place, Step

_number = count()
_kernels: dict[tuple[Any, ...], Any] = {}
# What we have made ourselves needs no checks by Inductor.
OPTIONS: dict[str, Any] = {"size_asserts": False}
# Whatever is not shared by a whole group is computed anew where it is needed: what Inductor would store between
# loops instead, up to four bytes an element each, costs more to write and read back. See docs/performance.md.
CPU_OPTIONS = {**OPTIONS, "realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}
GPU_OPTIONS = {
    **OPTIONS,
    # A group's scale, of some 40 operations, is not to become a temporary, which would take a kernel of its own.
    "realize_opcount_threshold": 60,
    # A frozen `Step` needs no checks by Dynamo beside its tensors'.
    "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
}
# Elements that a call takes where loops are in tiles, which leave next to nothing in memory between them.
TILED_CHUNK_ELEMENTS = 1 << 24


def batch(packs: dict[tuple[int, ...], Pack]) -> Batch:
    """A batch whose blocks are stepped by compiled kernels."""
    return Batch(kernel, packs)


def kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """Of blocks of a step; on a CPU contiguous ones of at least two rows, for which it is compiled on first use."""
    # Inductor writes code for so many threads.
    key = id(step), grad_dtype, device, torch.get_num_threads()
    if key not in _kernels:
        if works_in_cache(device):
            _kernels[key] = _kernel_in_cache(step, grad_dtype, device, hyper)
        else:
            _kernels[key] = Kernel(partial(_run_whole, step), Form.of(CHUNK_ELEMENTS, step.storage.group_size, 1))
    return _kernels[key]


def kind_of(step: Step, parameter: Tensor) -> tuple[Any, ...]:
    """Equal for parameters that `prepare` need be called with but once."""
    shape = () if works_in_cache(parameter.device) else tuple(parameter.shape)
    return id(step), parameter.dtype, parameter.device, shape


def prepare(step: Step, parameter: Tensor, hyper: Numbers) -> bool:
    """Compile what steps of `parameter`, with gradients of its dtype, will need; false if nothing was left to do."""
    before = len(_kernels)
    if works_in_cache(parameter.device):
        kernel(step, parameter.dtype, parameter.device, hyper)
    else:  # step one like it
        head, grad, *rest = step.storage.zeros(tuple(parameter.shape), parameter.dtype, parameter.device)
        like_it = batch({})
        like_it.add(step, Piece.of(step, [head, *rest]), grad, torch.ones(()), 1.0, hyper)
        like_it.flush()
    return len(_kernels) > before


def compile_in_place(step: Step, **options: Any) -> Callable[..., None]:
    """Of several blocks, each with its place: `kernel(blocks, t, places, hyper)`."""

    def kernel(blocks: Sequence[Sequence[Tensor]], t: Tensor, places: Sequence[Place], hyper: Numbers) -> None:
        for tensors, place in zip(blocks, places, strict=True):
            step(tensors, t, place, hyper)

    return _compile(kernel, step, options={**GPU_OPTIONS, **options})


def mark_rows(tensor: Tensor) -> None:
    """Have Dynamo not bake in how many rows and groups there are, only how long a group is."""
    for dim in range(max(1, tensor.dim() - 1)):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _run_whole(step: Step, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
    """By the kernel for blocks of this form on a device that takes whole parameters; compiled when first called."""
    head, grad = tensors[:2]
    form = head.dim(), head.shape[-1] if head.dim() > 1 else None, place.terms is None
    key = id(step), grad.dtype, head.device, *form
    if key not in _kernels:
        for tensor in (*tensors, *(place.terms or ())[:1]):
            mark_rows(tensor)
        _kernels[key] = compile_in_place(step)
    _kernels[key]([tensors], t, [place], hyper)


def _kernel_in_cache(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """The kernel for blocks of any number of rows, compiled."""
    _keep_freed_memory()
    size, plain_loops = step.storage.group_size, vectors.plain_loops()
    if plain_loops:
        form = Form.of(TILED_CHUNK_ELEMENTS, size, vectors.groups_per_row(size))
        direct, context = Direct({**CPU_OPTIONS, **plain_loops}), vectors.left_to_gcc()
    else:
        form = Form.of(CHUNK_ELEMENTS, size, 1)
        direct, context = Direct({**CPU_OPTIONS, **vectors.wide_vectors()}), nullcontext()
    tensors, t, place, numbers = _example(step, grad_dtype, device, form, hyper)
    by_bits = bool(plain_loops) and any(tensor.dtype == torch.float16 for tensor in tensors)

    def kernel(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        step(tensors, t, place, hyper)

    def run_by_bits(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        direct(_fp16_by_bits(tensors), t, place, hyper)

    tensors = _fp16_by_bits(tensors) if by_bits else tensors
    for tensor in (*tensors, *(place.terms or ())[:1]):
        mark_rows(tensor)
    with context:
        direct.bind(_compile(kernel, step, backend=direct.backend), tensors, t, place, numbers)
    return Kernel(run_by_bits if by_bits else direct, form)


def _fp16_by_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As gcc takes it, which has no vectors for its conversion."""
    return [tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor for tensor in tensors]


class Direct:
    """What Inductor has compiled, called without Dynamo's checks of all arguments: blocks differ in their rows alone.

    They would take longer than the rest of a call, and more so when other work has had the caches since the last.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._function: Any = None
        self._inputs: tuple[Any, ...] = ()
        self._order: list[int | None] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """For `torch.compile`: Inductor's, but for noting what it is called with."""
        from torch._inductor.compile_fx import compile_fx

        self._function = compile_fx(graph, inputs, config_patches=self._options)

        def noting(*inputs: Any) -> Any:
            self._inputs = inputs
            return self._function(*inputs)

        return noting

    def bind(self, compiled: Callable[..., None], *example: Any) -> None:
        """Have it compiled, and find out which of its arguments the graph takes in which order."""
        compiled(*example)
        leaves, rows = {id(leaf): number for number, leaf in enumerate(_leaves(*example))}, len(example[0][0])
        assert all(id(each) in leaves or each == rows for each in self._inputs)
        self._order = [leaves.get(id(each)) for each in self._inputs]
        self._inputs = ()

    def __call__(self, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        leaves, rows = _leaves(tensors, t, place, hyper), len(tensors[0])
        self._function(*[rows if number is None else leaves[number] for number in self._order])


def _leaves(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> list[Tensor]:
    """All tensors of a call, in one order."""
    leaves = [*tensors, t, place.start, *(place.terms or ())]
    for number in hyper.values():
        if isinstance(number, tuple):
            leaves += number
        else:
            leaves.append(number)
    return leaves


def _compile(kernel: FunctionType, step: Step, **how: Any) -> Callable[..., None]:
    # Dynamo counts graphs, and gives up at eight, per code object: each kernel gets one of its own.
    code: CodeType = kernel.__code__
    kernel.__code__ = code.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, **how)


def _example(
    step: Step, grad_dtype: torch.dtype, device: torch.device, form: Form, hyper: Numbers
) -> tuple[list[Tensor], Tensor, Place, Numbers]:
    """A block of zeros, of a size by which Inductor decides on threads."""
    size = step.storage.group_size
    rows = form.padded(CHUNK_ELEMENTS // size)
    tensors = [form.join(each) for each in step.storage.zeros((rows, size), grad_dtype, device)]
    place = form.place(0, row_phases(rows, size, size, device).clone(), size)
    # Copies, as of one tensor that is two numbers at once Dynamo would make one input.
    numbers = {
        name: tuple(map(torch.clone, value)) if isinstance(value, tuple) else value.clone()
        for name, value in hyper.items()
    }
    return tensors, torch.ones(()), place, numbers


def _keep_freed_memory() -> None:
    """Have the C library keep what a call frees for the next one.

    It returns blocks to the system by what has been freed before; freeing one of just under 32 MiB, which takes no
    memory as long as nobody writes to it, raises the limit. Each call would else wait for hundreds of new pages.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")
