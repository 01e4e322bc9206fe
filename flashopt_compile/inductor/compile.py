"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

import importlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import (
    Bound,
    ComputedKernel,
    Copying,
    Kernel,
    WholeStep,
    copied_by_torch,
    eager,
    run_at_once,
)
from flashopt_compile.engine.layout import Block, Layout, Part
from flashopt_compile.engine.numbers import flat
from flashopt_compile.engine.planner import Item, Planner
from flashopt_compile.engine.step import Numbers, Place, Step, Table
from flashopt_compile.inductor import bind, copies, example, gcc, interleave, probes

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # what we have made ourselves needs no checks
}
# Whatever is not shared by a whole group is computed anew where it is needed: what Inductor would store between
# loops instead, up to four bytes an element each, costs more to write and read back. See docs/performance.md.
CPU_OPTIONS = {**OPTIONS, "realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}
# A group's scale, of some 40 operations, is not to become a temporary, which would take a kernel of its own.
GPU_OPTIONS = {**OPTIONS, "realize_opcount_threshold": 60}
# Elements that one call takes: enough to hide what a call costs.
CALL_ELEMENTS = 1 << 22
MOST_KERNELS = 256

_numbers_of_kernels = count()
_kernels: "OrderedDict[tuple[Any, ...], Any]" = OrderedDict()  # compiled in this process, the latest used last
_compiling = threading.RLock()


def kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers) -> Kernel:
    """The kernel for blocks of a step, compiled on first use; the step itself where torch cannot compile.

    `numbers` are like those that it will be given.
    """
    if not works_in_blocks(device):
        return WholeKernel(step)
    threads = torch.get_num_threads()  # Inductor writes code for so many
    key = step, grad_dtype, device, threads, *probes.permission()
    return _remembered(key, lambda: _block_kernel(step, grad_dtype, device, numbers))


def works_in_blocks(device: torch.device) -> bool:
    """Whether a kernel takes blocks of a few million elements; a GPU's takes a whole parameter."""
    return device.type == "cpu"


def prepare(step: Step, parameter: Tensor, numbers: Numbers) -> bool:
    """Compile what steps of `parameter`, with gradients of its dtype, will need; false if nothing was left to do."""
    before = set(_kernels)
    if works_in_blocks(parameter.device):
        kernel(step, parameter.dtype, parameter.device, numbers)
    else:  # step one like it
        head, grad, *rest = step.storage.zeros(tuple(parameter.shape), parameter.dtype, parameter.device)
        parts = [Part(tensor, is_scale) for tensor, is_scale in zip(rest, step.storage.scales[1:], strict=True)]
        t = torch.ones((), dtype=torch.float32, device=flat(numbers)[0].device)
        item = Item(step, Layout.of(step.storage, parameter.shape), head, grad, parts, t, 1.0, numbers)
        for stage in Planner(kernel, [item]).stages():
            for call in stage.calls:
                run_at_once(call.operations([head], [grad]))
    return set(_kernels) != before


def kind_of(step: Step, parameter: Tensor) -> tuple[Any, ...]:
    """A key that is equal for parameters which share what `prepare` compiles."""
    shape = () if works_in_blocks(parameter.device) else tuple(parameter.shape)
    return step, parameter.dtype, parameter.device, shape


def compile_in_place(step: Step, **options: Any) -> Callable[..., None]:
    """Compile a function of several blocks, each with its place: `kernel(blocks, t, places, numbers)`."""

    def kernel(blocks: Sequence[Sequence[Tensor]], t: Tensor, places: Sequence[Place], numbers: Numbers) -> None:
        for tensors, place in zip(blocks, places, strict=True):
            step(tensors, t, place, numbers)

    _give_own_code(kernel, step)
    return torch.compile(
        kernel, fullgraph=True, options={**probes.known({**GPU_OPTIONS, **options}), **probes.guards()}
    )


def mark_rows(tensor: Tensor) -> None:
    """Tell Dynamo that the numbers of rows and groups change, and only a group's length is fixed."""
    for dim in range(max(1, tensor.dim() - 1)):
        probes.mark_dynamic(tensor, dim)


@dataclass(frozen=True)
class WholeKernel:
    """Steps whole parameters in place, by the kernel for their form, which is compiled when first called."""

    step: Step
    most_elements: int = CALL_ELEMENTS
    is_deferred: bool = False

    @property
    def width(self) -> int:
        return self.step.storage.group_size

    @property
    def whole(self) -> WholeStep:
        def run(tensors: Sequence[Tensor], start: int, t: Tensor, numbers: Numbers) -> None:
            tensors = [tensor.detach() for tensor in tensors]  # compilers mind what a tensor is a view of
            for first, block in self.step.storage.blocks(tuple(tensors[0].shape), tensors):
                self._run(block, t, Place.at(start + first), numbers)

        return run

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound:
        def run(head: Tensor, grad: Tensor) -> list[Any]:
            self._run([block.view(head.detach()), block.view(grad), *block.rest], t, block.place, numbers)
            return []

        return run

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        return copied_by_torch

    def _run(self, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> None:
        head, grad = tensors[:2]
        form = head.dim(), head.shape[-1] if head.dim() > 1 else None, place.table is None, t.device

        def compiled() -> Callable[..., None]:
            for tensor in (*tensors, *(place.table or ())[:2]):
                mark_rows(tensor)
            return compile_in_place(self.step)

        _remembered((self.step, grad.dtype, head.device, *form), compiled)([tensors], t, [place], numbers)


@dataclass(frozen=True)
class BoundKernel:
    """Steps blocks by a C++ function that is called directly."""

    found: bind.Found
    width: int
    most_elements: int = CALL_ELEMENTS
    is_deferred: bool = True
    whole: WholeStep | None = None

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound:
        return self.found.bind(block, t, numbers)

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        for form in interleave.forms_of(target.shape, target.stride(), source.stride()):
            way, dtype = form.way, form.way.dtype_for(target.dtype)
            key = way, dtype, torch.get_num_threads(), *probes.permission()
            found = _remembered(key, partial(_copier, way, dtype))
            if found is not None:
                return found.bind(form)
        return copied_by_torch


def _remembered(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what was made for a key, making it on first use. The least recently used are forgotten."""
    with _compiling:
        if key not in _kernels:
            _kernels[key] = make()
            if len(_kernels) > MOST_KERNELS:
                _kernels.popitem(last=False)
        _kernels.move_to_end(key)
        return _kernels[key]


def _block_kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers) -> Kernel:
    """The bound kernel of a step; failing that, the compiled step; failing that, the step itself."""
    try:
        if probes.permission()[0]:
            raise bind.NotCompiled("torch.compile is switched off, as TORCH_COMPILE_DISABLE=1 does")
        _import_inductor()
        return _compiled_kernel(step, grad_dtype, device, numbers)
    except Exception as error:
        return _uncompiled(step, error)


def _compiled_kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers) -> Kernel:
    """The kernel in tiles if it gives the plain bits; or else the plain kernel, bound if possible.

    Plain bits are those of the uncompiled step. If a kernel's differ, it may be because torch's own functions round
    otherwise than compiled ones, so the plain kernel decides.
    """
    given = step, grad_dtype, device, numbers
    tiled, why, is_unbound, why_not = None, "", False, probes.BINDING.fault()
    if why_not is None:
        try:
            if for_gcc := gcc.loops_for_gcc():
                tiled, why, is_unbound = _try_to_bind(*given, for_gcc)
        except bind.NotCompiled:
            raise
        except Exception as error:  # no compiler can be found
            why = probes.reason_of(error)
        if tiled is not None and example.agree(tiled, eager(step), *given):
            return tiled
    plain: Kernel | None = None
    if why_not is None:
        plain, why_not, _ = _try_to_bind(*given, {})
    plain = plain or _computing_kernel(*given)
    if tiled is not None:
        if example.agree(tiled, plain, *given):
            return tiled
        why, is_unbound = "they give other bits than the plain compiled step", False
    if why and why != why_not:
        # If neither way can be bound, it is not for the tiles.
        path = probes.BINDING if is_unbound and not isinstance(plain, BoundKernel) else probes.TILES
        path.close(why)
    elif why_not and not probes.COMPILER.fault() and not probes.TILES.fault():
        probes.BINDING.close(why_not)
    return plain


def _try_to_bind(
    step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers, for_gcc: dict[str, Any]
) -> tuple[BoundKernel | None, str, bool]:
    """A bound kernel; or None, why, and whether it was compiled but cannot be bound.

    Whatever fails in the private parts of an unknown torch has a way round.
    """
    try:
        return _bound_kernel(step, grad_dtype, device, numbers, for_gcc), "", False
    except bind.NotCompiled:
        raise
    except Exception as error:
        is_unbound = isinstance(error, bind.Unbound)
        return None, str(error) if is_unbound else probes.reason_of(error), is_unbound


def _bound_kernel(
    step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers, for_gcc: dict[str, Any]
) -> BoundKernel:
    size = step.storage.group_size
    width = size * gcc.groups_per_row(size) if for_gcc else size
    written = replace(step, for_gcc=bool(for_gcc))
    noting = bind.Noting({**probes.known(CPU_OPTIONS), **(for_gcc or gcc.wide_vectors())})

    def kernel(tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> None:
        written(tensors, t, place, numbers)

    _give_own_code(kernel, step)
    compiled = torch.compile(kernel, backend=noting, fullgraph=True, options=probes.guards())
    given = example.of(written, grad_dtype, device, numbers, width, example.SMALL if for_gcc else example.LARGE)
    found = bind.find(compiled, noting, given.sizes, given.tensors, given.t, given.place, given.numbers)
    example.check(compiled, found, written, grad_dtype, device, numbers, width)
    return BoundKernel(found, width)


def _computing_kernel(step: Step, grad_dtype: torch.dtype, device: torch.device, numbers: Numbers) -> Kernel:
    """The compiled step, called through Dynamo. Raises whatever forbids torch to compile."""
    compiled, size = _computing(step), step.storage.group_size
    given = example.of(step, grad_dtype, device, numbers, size, example.LARGE)
    compiled(given.tensors, given.t, given.place, given.numbers)
    return ComputedKernel(compiled, size)


def _copier(way: copies.Way, dtype: torch.dtype) -> copies.Copier | None:
    """The bound copy between memory orders; None where there is none, and another way or torch's own is used."""
    options = way.options()
    if options is None or probes.BINDING.fault() is not None:
        return None
    noting = bind.Noting({**probes.known(OPTIONS), **options})

    def kernel(target: Tensor, source: Tensor) -> None:
        way.copy(target, source)

    kernel.__code__ = kernel.__code__.replace(co_name=f"copy_{next(_numbers_of_kernels)}")
    try:
        return copies.find(way, torch.compile(kernel, backend=noting, fullgraph=True), noting, dtype)
    except Exception as error:
        way.path.close(str(error) if isinstance(error, bind.Unbound) else probes.reason_of(error))
        return None


def _computing(step: Step) -> Callable[..., Sequence[Tensor]]:
    """The compiled function that gives the new parts of a block."""

    def kernel(tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> Sequence[Tensor]:
        return step.compute(tensors, t, place, numbers)[0]

    _give_own_code(kernel, step)
    compiled = torch.compile(kernel, fullgraph=True, options={**probes.known(CPU_OPTIONS), **probes.guards()})

    def compute(tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> Sequence[Tensor]:
        # Copies in one long row: Dynamo tells views, strides and single rows apart, and would compile for each.
        row = [tensor.reshape(1, -1, tensor.shape[-1]).clone() for tensor in tensors]
        table = place.table
        assert table is not None
        groups = (table.rows + table.groups).reshape(-1, table.groups.shape[-1])
        for tensor in (*row, groups):
            mark_rows(tensor)
        one_row = Place(place.start, Table(torch.zeros_like(table.rows[:1]), groups, table.lanes))
        parts = compiled(row, t, one_row, numbers)
        head, _, *rest = tensors
        return [part.view(old.shape) for part, old in zip(parts, (head, *rest), strict=True)]

    return compute


def _uncompiled(step: Step, error: Exception) -> Kernel:
    reason = probes.reason_of(error)
    text = (
        f"torch.compile cannot be used here ({reason}); steps run eagerly, with the same results, some 30 times slower"
    )
    probes.tell(f"compiled {reason.partition(':')[0]}", text)
    return eager(step)


@cache
def _import_inductor() -> None:
    """Import what compiling needs. It warns of its own deprecated parts, which `python -W error` would make fatal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


def _give_own_code(kernel: FunctionType, step: Step) -> None:
    """Give a kernel its own code object: Dynamo allows eight graphs for each."""
    code: CodeType = kernel.__code__
    kernel.__code__ = code.replace(co_name=f"{step.rule.name}_step_{next(_numbers_of_kernels)}")
