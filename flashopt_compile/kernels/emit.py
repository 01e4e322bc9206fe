"""A rule → the Triton source that Inductor writes for its step on a GPU, without having one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from flashopt_compile.engine.numbers import as_numbers
from flashopt_compile.engine.step import Numbers, Place, Step
from flashopt_compile.engine.storage import PARAMETER_DTYPES, storage_of
from flashopt_compile.inductor.compile import compile_in_place, mark_rows
from flashopt_compile.kernels import pretend, source
from flashopt_compile.kernels.targets import Target, target_of
from flashopt_compile.rule import Rule

Block = list[Tensor]
# The origin of a graph input: one of the given tensors, or one of its sizes or strides.
Origin = tuple[str, int, int]


@dataclass(frozen=True)
class Emitted:
    """Inductor's code for one step: a module whose `call` launches kernels. `origins` are the origins of its inputs."""

    step: Step
    target: Target
    shapes: tuple[tuple[int, ...], ...]
    grad_dtype: torch.dtype
    source: str
    origins: tuple[Origin, ...]

    @cached_property
    def kernels(self) -> dict[str, str]:
        """The source of each kernel, by name."""
        return source.kernels_of(self.source)

    def bind(self, given: Any) -> list[Any]:
        """The inputs of `call`, taken from the compiled step's arguments."""
        leaves = tree_leaves(given)
        take = {
            "tensor": lambda leaf, _: leaf,
            "size": lambda leaf, dim: leaf.shape[dim],
            "stride": lambda leaf, dim: leaf.stride(dim),
        }
        return [take[what](leaves[leaf], dim) for what, leaf, dim in self.origins]


def emit(
    rule: Rule,
    target: str = "sm_90",
    *,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    shapes: Sequence[tuple[int, ...]] = ((4096, 4096),),
    master_weight_bits: int | None = 24,
    quantize: bool = True,
    rounding: str = "dither",
    maximize: bool = False,
    combo_kernels: bool = False,
    capturable: bool = False,
) -> Emitted:
    """Write the code that training would compile on `target` for a step of parameters of `shapes`, all in one graph.

    `combo_kernels` lets Inductor combine several parameters into one launch. With `capturable`, kernels load their
    numbers from the device, and a CUDA graph that replays them finds new ones.
    """
    if dtype not in PARAMETER_DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are {', '.join(map(str, PARAMETER_DTYPES))}.")
    if not shapes:
        raise ValueError("shapes is empty; at least one is needed.")
    storages = {storage_of(rule, dtype, tuple(shape), master_weight_bits, quantize) for shape in shapes}
    if len(storages) > 1:
        raise ValueError(f"shapes is {tuple(shapes)}; all must be of one kind, large or small.")
    step = Step(rule, storages.pop(), rounding, maximize)
    return emit_step(step, target, shapes, grad_dtype or dtype, combo_kernels, capturable)


def emit_step(
    step: Step,
    target: str,
    shapes: Sequence[tuple[int, ...]],
    grad_dtype: torch.dtype,
    combo_kernels: bool = False,
    capturable: bool = False,
) -> Emitted:
    """`emit` for a `Step`."""
    chosen = target_of(target)
    options = {"combo_kernels": True, **_COMBO} if combo_kernels else {}
    with pretend.gpu(chosen), pretend.no_more_than_code() as outcome, FakeTensorMode(shape_env=ShapeEnv()):
        blocks, *rest = arguments(step, shapes, grad_dtype, torch.device(chosen.device, 0), capturable)
        given = [[_alone(tensor) for tensor in block] for block in blocks], *rest
        try:
            compile_in_place(step, **options)(*given)
        except Exception:
            if not outcome.modules:
                raise
    origins = _origins(outcome.inputs, tree_leaves(given))
    return Emitted(step, chosen, tuple(map(tuple, shapes)), grad_dtype, outcome.modules[0], origins)


# By default Inductor combines at most 8 kernels, and none that it expects to raise peak memory.
_COMBO = {
    "combo_kernel_peak_memory_pct_threshold": None,
    "combo_kernel_max_num_nodes": 256,
    "combo_kernel_max_num_args": 4096,
}


def numbers(step: Step, given: Mapping[str, Any], device: torch.device | str = "cpu") -> Numbers:
    """A step's hyper-parameters in the rule's order: the given ones, and the rule's defaults for the rest."""
    known = dict(step.rule.hyper)
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is not a hyper-parameter of {step.rule.name}; it has {', '.join(known)}.")
    return as_numbers({name: given.get(name, default) for name, default in known.items()}, device)


def blocks_of(step: Step, parameters: Iterable[Sequence[Tensor]]) -> tuple[list[Block], list[Place]]:
    """The blocks in which a GPU steps parameters (each a head, gradient and parts), and their places."""
    blocks, places = [], []
    for tensors in parameters:
        for start, block in step.storage.blocks(tuple(tensors[0].shape), tensors):
            blocks.append(block)
            places.append(Place.at(start))
    return blocks, places


def arguments(
    step: Step,
    shapes: Sequence[tuple[int, ...]],
    grad_dtype: torch.dtype,
    device: torch.device,
    capturable: bool = False,
) -> tuple[list[Block], Tensor, list[Place], Numbers]:
    """The compiled step's arguments for parameters of `shapes`, all zero; numbers on the CPU unless `capturable`."""
    where = device if capturable else torch.device("cpu")
    blocks, places = blocks_of(step, (step.storage.zeros(tuple(shape), grad_dtype, device) for shape in shapes))
    return blocks, torch.ones((), dtype=torch.float32, device=where), places, numbers(step, {}, where)


def _alone(view: Tensor) -> Tensor:
    """A tensor like `view` with memory of its own, as training steps the blocks of a parameter one by one."""
    tensor = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    mark_rows(tensor)
    return tensor


def _origins(inputs: Sequence[Any], leaves: Sequence[Tensor]) -> tuple[Origin, ...]:
    """The origin of each graph input, from Dynamo's notes."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    by_name = {each.source.name: numbers[id(each.example)] for each in inputs if id(each.example) in numbers}
    origins: list[Origin] = []
    for each in inputs:
        if id(each.example) in numbers:
            origins.append(("tensor", numbers[id(each.example)], 0))
        else:  # a symbolic size or stride
            origins.append((each.source.prop.name.lower(), by_name[each.source.base.name], each.source.idx))
    return tuple(origins)
