"""Steps of a GPU without one: what Inductor writes for it runs on CPU tensors, and launches go to a stand-in.

Real are the plan, the binding, Inductor's code around the kernel, its tuner object and the launcher that it writes for
each kernel. Not real are Dynamo and AOTAutograd, which cannot take CPU tensors for a GPU's (a plain call binds the
inputs itself), the device, and what carries a launch out.
"""

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

from flashopt_compile.engine.step import Numbers, Place, Step
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor import example, launch, notes
from flashopt_compile.kernels import pretend, source
from flashopt_compile.kernels.emit import Emitted, _origins
from flashopt_compile.kernels.targets import target_of

# The inputs of Inductor's code, taken from the tensors of a step.
_TAKEN: dict[str, Callable[[Tensor, int], Any]] = {
    "tensor": lambda tensor, _: tensor,
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride(dim),
    "storage_offset": lambda tensor, _: tensor.storage_offset(),
}
_written: dict[Any, Emitted] = {}
# Carries a launch out: its grid and stream, then the kernel's arguments.
Runner = Callable[..., Any]


@dataclass
class Device:
    """A pretended GPU. `runner` is given the name and source of each kernel, and returns what carries its launches out.

    With `is_capturable`, numbers and step counts count as the device's, as those of capturable groups do.
    """

    runner: Callable[[str, str], Runner] = lambda name, text: "".format  # a C function that takes anything
    target: str = "sm_90"
    is_capturable: bool = False
    stream: int = 7
    compiled: list["Standin"] = field(default_factory=list)


@contextlib.contextmanager
def device(given: Device) -> Iterator[Device]:
    """Within, CPU tensors are stepped as those of a GPU."""

    def compiled(step: Step) -> notes.Compiled:
        found = notes.Compiled()
        standin = Standin(step, given, found.see)
        given.compiled.append(standin)
        found.run, found.graphs = standin.call, standin.graphs
        return found

    with (
        mock.patch.object(inductor, "works_in_blocks", lambda _: False),
        mock.patch.object(launch, "is_launched", lambda _: True),
        mock.patch.object(inductor, "compile_noted", compiled),
        mock.patch.object(inductor, "_kernels", type(inductor._kernels)()),
    ):
        yield given


class Standin:
    """Stands in for a compiled step. It makes a graph for its first block, which serves blocks of all sizes."""

    def __init__(self, step: Step, device: Device, seen: Callable[[Any], None]) -> None:
        self._step, self._device, self._seen = step, device, seen
        self.graphs: list[Any] = []
        self.written: Emitted | None = None

    def call(self, blocks: Sequence[Sequence[Tensor]], t: Tensor, places: Sequence[Place], numbers: Numbers) -> None:
        given = [list(each) for each in blocks], t, list(places), numbers
        if self.written is None:
            self.written = _written_before(self._step, self._device, given)
            graph = SimpleNamespace(current_callable=entry(self.written.source, self._device))
            self._seen(graph)
            self.graphs.append(graph)
        leaves = tree_leaves(given)
        self.graphs[0].current_callable([_TAKEN[what](leaves[leaf], dim) for what, leaf, dim in self.written.origins])


def _written_before(step: Step, device: Device, given: Any) -> Emitted:
    """`written`, or what was written for another block of the same form."""
    forms = [
        (tuple(each.shape[1:]), each.stride()[1:], each.dtype, min(2, each.storage_offset()))
        for each in tree_leaves(given)
        if isinstance(each, Tensor)
    ]
    key = step, device.target, device.is_capturable, str(forms)
    if key not in _written:
        _written[key] = written(step, device, *given)
    return _written[key]


def written(step: Step, device: Device, blocks: Any, t: Tensor, places: Any, numbers: Numbers) -> Emitted:
    """What Inductor writes for a block like this one of `device`."""
    target, where = target_of(device.target), torch.device(target_of(device.target).device, 0)
    with pretend.gpu(target), pretend.no_more_than_code() as outcome, FakeTensorMode(shape_env=ShapeEnv()):

        def like(tensor: Tensor, on: Any) -> Tensor:
            elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            offset = tensor.storage_offset()
            memory = torch.empty(offset + elements, dtype=tensor.dtype, device=on)
            return memory.as_strided(tensor.shape, tensor.stride(), offset)

        here = where if device.is_capturable else torch.device("cpu")
        fake_blocks = tree_map(lambda tensor: like(tensor, where), blocks)
        (place,) = places
        fake_table = place.table and type(place.table)(*(like(each, where) for each in place.table))
        fake_places = [Place(like(place.start, torch.device("cpu")), fake_table)]
        given = fake_blocks, like(t, here), fake_places, tree_map(lambda number: like(number, here), numbers)
        for tensor in (*fake_blocks[0], *(fake_table or ())[:2]):
            example.mark_rows(tensor)
        with contextlib.suppress(Exception):
            inductor.compile_in_place(step)(*given)
    origins = _origins(outcome.inputs, tree_leaves(given))
    return Emitted(step, target, ((),), blocks[0][1].dtype, outcome.modules[0], origins)


def entry(module: str, device: Device) -> Callable[[list[Any]], Any]:
    """The `call` of Inductor's module, with its tuners."""
    (call,) = (
        node
        for each in ast.parse(module).body
        if isinstance(each, ast.ClassDef) and each.name == "Runner"
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    guards = cast(Any, torch._C)._dynamo.guards
    namespace: dict[str, Any] = {
        **{"torch": _Torch, "inf": float("inf"), "nan": float("nan")},
        **{"copy_if_misaligned": guards.copy_if_misaligned, "get_raw_stream": lambda index: device.stream},
        **{"reinterpret_tensor": guards._reinterpret_tensor, "assert_size_stride": guards.assert_size_stride},
        **{name: tuner(name, text, device) for name, text in source.kernels_of(module).items()},
    }
    exec(compile(ast.Module([call], []), "<call>", "exec"), namespace)
    return MethodType(namespace["call"], SimpleNamespace(partitions=[]))


class _Torch:
    """`torch` for Inductor's code, which selects a device."""

    ops = torch.ops
    cuda = SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=lambda index: None)
    xpu = cuda


def tuner(name: str, text: str, device: Device) -> Any:
    """Inductor's own object for a kernel, tuned, whose launcher ends at the device's runner."""
    found = getattr(source.load_kernel(name, text), name)
    config = found.configs[0]
    kernel = Kernel(found, device.runner(name, text))
    result = triton_heuristics.StaticTritonCompileResult(
        cast(Any, kernel), config, found._create_compile_meta(config), found.inductor_meta
    )
    found.launchers = [result.make_launcher()]
    return found


class Kernel:
    """A kernel as Inductor's static launcher has it, if compiled for a device."""

    n_regs = n_spills = shared = 0
    hash = "pretended"
    cubin_path = "pretended"

    def __init__(self, tuner: Any, run: Runner) -> None:
        self.arg_names = tuner.fn.arg_names
        self.declared_constexprs = self.full_constexprs = [
            number for number, each in enumerate(tuner.triton_meta["signature"].values()) if each == "constexpr"
        ]
        self.run = run

    def load_kernel(self, device: int) -> None:
        """Nothing: there is no device."""
