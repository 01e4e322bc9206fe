"""The only place that compiles: a `Step` becomes one fused kernel, written by Inductor for the device at hand."""

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.step import Numbers, Run, Step

_number = count()
EAGER_ELEMENTS = 4096
# Inductor writes an intermediate value out at each of its uses until it has this many operations. The default,
# 30, makes tens of thousands of operations of a step's few hundred, and a minute of code generation.
OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 8}


@cache
def compiled(step: Step) -> Run:
    """`step` compiled for blocks of any size.

    A small block of a single row runs eagerly: Dynamo would compile it apart, and the result is the same.
    """
    runs: dict[tuple[Any, ...], Run] = {}
    grouped = step.storage.grouped

    def call(tensors: Sequence[Tensor], t: Tensor, start: Tensor, hyper: Numbers) -> None:
        head, grad = tensors[:2]
        if head.shape[0] == 1 and head.numel() <= EAGER_ELEMENTS:
            return step(tensors, t, start, hyper)
        whole_groups = grouped is not None and head.shape[-1] == grouped.group_size
        kind = (head.dim(), whole_groups, head.is_contiguous(), grad.dtype, head.device)
        if kind not in runs:
            runs[kind] = _compiled_kernel(step)
            # The first block of a kind makes the graph; sizes other than that of a group must not be baked in.
            for tensor in tensors:
                for dim in range(tensor.dim() - whole_groups):
                    if tensor.shape[dim] > 1:
                        torch._dynamo.mark_dynamic(tensor, dim)
        runs[kind](tensors, t, start, hyper)

    return call


def _compiled_kernel(step: Step) -> Run:
    def kernel(tensors: Sequence[Tensor], t: Tensor, start: Tensor, hyper: Numbers) -> None:
        step(tensors, t, start, hyper)

    # Dynamo counts graphs, and gives up at eight, per code object: each step and kind of block gets one of its
    # own. (Rows that end in a short group need several: Dynamo tells sizes and offsets of 0, 1 and more apart.)
    kernel.__code__ = kernel.__code__.replace(co_name=f"{step.rule.name}_step_{next(_number)}")
    return torch.compile(kernel, fullgraph=True, options=OPTIONS)
