"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flashopt_compile import vectors
from flashopt_compile.batch import CHUNK_ELEMENTS, Batch, BoundKernel, Kernel, Pack, bind, works_in_cache
from flashopt_compile.hyper import flat
from flashopt_compile.pieces import Form, Piece, row_phases
from flashopt_compile.step import Numbers, Place, Step

_number = count()
_kernels: dict[tuple[Any, ...], Any] = {}
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
# Elements that a call takes where loops are in tiles, which leave next to nothing in memory between them.
TILED_CHUNK_ELEMENTS = 1 << 24


def batch(packs: dict[tuple[int, ...], Pack]) -> Batch:
    """A batch whose blocks are stepped by compiled kernels."""
    return Batch(kernel, packs)


def kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, hyper: Numbers) -> Kernel:
    """Of blocks of a step; on a CPU contiguous ones of at least two rows, for which it is compiled on first use."""
    in_cache = works_in_cache(device)
    key = id(step), grad_dtype, device, in_cache, torch.get_num_threads()  # for so many Inductor writes code
    if key not in _kernels:
        if in_cache:
            _kernels[key] = _kernel_in_cache(step, grad_dtype, device, hyper)
        else:
            form = Form.of(CHUNK_ELEMENTS, step.storage.group_size, 1)
            _kernels[key] = Kernel(partial(bind, partial(_run_whole, step)), form)
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

    return _compile(kernel, step, {**GPU_OPTIONS, **options})


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

    def kernel(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        step(tensors, t, place, hyper)

    if plain_loops:
        form = Form.of(TILED_CHUNK_ELEMENTS, size, vectors.groups_per_row(size))
        # In every call: what Dynamo watches beside its arguments may have it compile again.
        compiled = vectors.left_to_gcc()(_compile(kernel, step, {**CPU_OPTIONS, **plain_loops}))
    else:
        form = Form.of(CHUNK_ELEMENTS, size, 1)
        compiled = _compile(kernel, step, {**CPU_OPTIONS, **vectors.wide_vectors()})
    tensors, t, place, numbers = _example(step, grad_dtype, device, form, hyper)
    by_bits = bool(plain_loops) and any(tensor.dtype == torch.float16 for tensor in tensors)
    tensors = _fp16_by_bits(tensors) if by_bits else tensors
    for tensor in (*tensors, *(place.terms or ())[:1]):
        mark_rows(tensor)
    without_checks = _without_checks(compiled, tensors, t, place, numbers)

    def run(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        compiled(_fp16_by_bits(tensors) if by_bits else tensors, t, place, hyper)

    return Kernel(without_checks or partial(bind, run), form)


def _fp16_by_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As gcc takes it, which has no vectors for its conversion."""
    return [tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor for tensor in tensors]


def _without_checks(compiled: Callable[..., None], *example: Any) -> Callable[..., BoundKernel] | None:
    """Compile for an example, and bind the C++ function that this has come to; None if it is not a single plain call.

    Blocks of a form differ in their rows alone, and the function takes no more of a tensor than where it begins. All
    that Dynamo, AOTAutograd and Inductor do around it in each call would take longer than the rest of a step, and more
    so when other work has had the caches since the last.
    """
    ways = _ways_to_the_kernel(compiled, *example)
    leaves, rows = {id(leaf): number for number, leaf in enumerate(_leaves(*example))}, len(example[0][0])
    if len(ways) != 1:
        return None
    ((function, arguments),) = ways
    order = [leaves.get(id(each)) for each in arguments]
    others = [each for each in arguments if id(each) not in leaves]
    # Numbers computed once a call have memory of their own. Anything else would be a view, or kept between two loops.
    own = [each for each in others if isinstance(each, Tensor)]
    in_use = {leaf.untyped_storage().data_ptr() for leaf in _leaves(*example)}
    if any(each.dim() or each.element_size() != 4 or each.untyped_storage().data_ptr() in in_use for each in own):
        return None
    if order.count(1) != 1:  # the gradient
        return None
    if any(each != rows for each in others if not isinstance(each, Tensor)):
        return None
    place_of_grad = order.index(1)

    def bind(stored: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> BoundKernel:
        head, *rest = stored
        leaves = _leaves([head, head, *rest], t, place, hyper)
        known: dict[int, Any] = {id(each): len(head) for each in others}
        beside = torch.empty(len(own), dtype=torch.float32)
        known |= {id(each): place.view(each.dtype) for each, place in zip(own, beside.unbind(), strict=True)}
        given = [
            known[id(each)] if number is None else leaves[number] for each, number in zip(arguments, order, strict=True)
        ]
        before, after = given[:place_of_grad], given[place_of_grad + 1 :]

        def run(grad: Tensor) -> None:
            function(*before, grad, *after)
            increment_version(head)  # for autograd to notice that what it may have saved is no longer what it was

        return run

    return bind


def _ways_to_the_kernel(compiled: Callable[..., None], *example: Any) -> list[tuple[Callable[..., None], list[Any]]]:
    """The C++ functions that a call comes to, in order, and their arguments."""
    from torch._inductor.output_code import CompiledFxGraph

    calls: list[tuple[Any, list[Any]]] = []
    real = CompiledFxGraph.__call__

    def noting(graph: Any, inputs: Any) -> Any:
        calls.append((graph, list(inputs)))
        return real(graph, inputs)

    with mock.patch.object(CompiledFxGraph, "__call__", noting):
        compiled(*example)

    found: list[tuple[Callable[..., None], list[Any]]] = []

    def noted(function: Callable[..., None], *arguments: Any) -> None:
        found.append((function, list(arguments)))
        function(*arguments)

    for graph, inputs in calls:
        module: dict[str, Any] = getattr(graph.current_callable, "__func__", graph.current_callable).__globals__
        functions = {name: partial(noted, each) for name, each in module.items() if name.startswith("cpp_fused")}
        with mock.patch.dict(module, functions):
            graph.current_callable(inputs)
    return found


def _leaves(tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> list[Tensor]:
    """All tensors of a call, in one order."""
    return [*tensors, t, place.start, *(place.terms or ()), *flat(hyper)]


def _compile(kernel: FunctionType, step: Step, options: dict[str, Any]) -> Callable[..., None]:
    # Dynamo counts graphs, and gives up at eight, per code object: each kernel gets one of its own.
    code: CodeType = kernel.__code__
    kernel.__code__ = code.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, options=options)


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
