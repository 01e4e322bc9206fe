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
    head, grad = tensors[:2]
    if head.is_contiguous() and grad.is_contiguous():
        return _step_contiguous(step, run, tensors, 0, t, hyper)
    row_elements = head[0].numel()
    rows = max(1, CHUNK_ELEMENTS // row_elements)
    for first in range(0, len(head), rows):
        slab = [tensor[first : first + rows] for tensor in tensors]
        copies = [tensor.contiguous() for tensor in slab]
        _step_contiguous(step, run, copies, first * row_elements, t, hyper)
        if copies[0] is not slab[0]:
            slab[0].copy_(copies[0])


def _step_contiguous(step: Step, run: Run, tensors: Sequence[Tensor], position: int, t: Tensor, hyper: Numbers) -> None:
    for start, block in step.storage.blocks(tuple(tensors[0].shape), tensors):
        run(block, t, wrapped_int32(position + start), hyper)


def wrapped_int32(position: int) -> Tensor:
    """`position` modulo 2^32, as the int32 tensor that element indices are counted from."""
    return torch.tensor((position + 2**31) % 2**32 - 2**31, dtype=torch.int32)
