"""The one step of every optimizer: stored parts → decode → fp32 rule → encode → stored parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.rule import Moved, Rule
from flashopt_compile.storage import CHUNK_ELEMENTS, Storage
from quant.dither import element_index, mix, uniform

Numbers = dict[str, Any]
Run = Callable[[Sequence[Tensor], Tensor, Tensor, Numbers], None]


@dataclass(frozen=True)
class Step:
    """What a step does to a block, apart from the numbers: one compiled graph each."""

    rule: Rule
    storage: Storage
    rounding: str
    maximize: bool

    def compute(
        self, tensors: Sequence[Tensor], t: Tensor, start: Tensor, hyper: Numbers
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The new parts of a block (head, then the rest in storage order), and by how much its weight moves.

        `tensors` is head, gradient, then the rest; `start` the position of the first element, int32.
        """
        head, grad, *stored = tensors
        weight, formats = self.storage.weight, [format for _, format in self.storage.states]

        beside = len(weight.names) - 1
        weight_parts, stored = (head, *stored[:beside]), stored[beside:]
        w = weight.decode(*weight_parts)
        g = grad.to(torch.float32)
        states = []
        for format in formats:
            states.append(format.decode(*stored[: len(format.names)]))
            stored = stored[len(format.names) :]

        moved, *states = self.rule(w, -g if self.maximize else g, *states, t, **hyper)
        by = moved.by if isinstance(moved, Moved) else moved - w

        draws: list[Tensor | None] = [None] * (1 + len(states))
        if self.rounding == "dither":
            bits = mix(element_index(head, start), t.to(torch.int32))
            draws = [uniform(bits, stream) for stream in range(len(draws))]
        parts = list(weight.advance(*weight_parts, by, draws[0]))
        for format, state, u in zip(formats, states, draws[1:], strict=True):
            parts += format.encode(state, u)
        return tuple(parts), by

    def __call__(self, tensors: Sequence[Tensor], t: Tensor, start: Tensor, hyper: Numbers) -> None:
        """Step a block in place."""
        head, _, *stored = tensors
        parts, _ = self.compute(tensors, t, start, hyper)
        for old, new in zip((head, *stored), parts, strict=True):
            old.copy_(new)


def step_parameter(step: Step, run: Run, tensors: Sequence[Tensor], t: Tensor, hyper: Numbers) -> None:
    """Step a whole parameter (head, gradient, then the rest) block by block, whatever the strides of the first two."""
    head, grad, *stored = tensors
    if head.is_contiguous() and grad.is_contiguous():
        slabs = [slice(None)]
    else:
        row_elements = max(1, head.numel() // max(1, head.shape[0]))
        rows = max(1, CHUNK_ELEMENTS // row_elements)
        slabs = [slice(row, row + rows) for row in range(0, head.shape[0], rows)]
    for slab in slabs:
        part = [tensor if slab == slice(None) else tensor[slab] for tensor in (head, grad, *stored)]
        old = part[0]
        part[0], part[1] = old.contiguous(), part[1].contiguous()
        first = (slab.start or 0) * (head.numel() // head.shape[0] if slab.start else 0)
        for start, block in step.storage.blocks(tuple(old.shape), part):
            run(block, t, wrapped_int32(first + start), hyper)
        if part[0] is not old:
            old.copy_(part[0])


def wrapped_int32(position: int) -> Tensor:
    return torch.tensor((position + 2**31) % 2**32 - 2**31, dtype=torch.int32)
