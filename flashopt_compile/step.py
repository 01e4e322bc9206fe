"""The one step of every optimizer: stored parts → decode → fp32 rule → encode → stored parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.rule import Moved, Rule
from flashopt_compile.storage import Storage
from quant.dither import block_phases, mix_phases, noise, phase_of, phases_of, step_phase
from quant.grouped import Grouped
from quant.ulp import kept, once, spread, widened

Numbers = dict[str, Any]  # hyper-parameters by name, as 0-dim fp32 tensors or tuples of such


class Place(NamedTuple):
    """Where a block lies in its parameter, as terms of the phases that noise is drawn from.

    Without `terms`, those of rows and of lanes, the block is a view of its contiguous parameter.
    """

    start: Tensor
    terms: tuple[Tensor, Tensor] | None = None

    @classmethod
    def at(cls, start: int) -> "Place":
        """Of a view whose first element is at `start`; a number on the CPU, which kernels of any device take."""
        return cls(phase_of(start))

    def phases(self, block: Tensor, step: Tensor) -> Tensor:
        """Of all elements of the block at a step."""
        rows, lanes = self.terms or block_phases(block)
        if self.terms:  # Inductor is to see that there are as many as the block has
            rows = rows.expand(*block.shape[:-1], -1)
        return spread(once(self.start + step_phase(step), by=block) + rows, block) + lanes


@dataclass(frozen=True)
class Step:
    """What a step does to a block, apart from the numbers: one compiled graph each."""

    rule: Rule
    storage: Storage
    rounding: str
    maximize: bool

    @classmethod
    def of(cls, rule: Rule, storage: Storage, rounding: str, maximize: bool) -> "Step":
        """The same object each time, to be told by its id: comparing formats takes longer than stepping a bias."""
        return _one_of_a_kind(rule, storage, rounding, maximize)

    def __str__(self) -> str:
        states = ", ".join(
            f"{name} in {'8 bits' if isinstance(format, Grouped) else 'fp32'}" for name, format in self.storage.states
        )
        return f"{self.rule.name} of weights as {self.storage.weight}" + (f", {states}" if states else "")

    def compute(
        self, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The new parts of a block (head, then the rest in storage order), and by how much its weight moves.

        `tensors` is head, gradient, then the rest; where states are grouped, their last dim is one group, or as many as
        there are scales.
        """
        head, grad, *stored = tensors
        weight, formats = self.storage.weight, [format for _, format in self.storage.states]

        beside = len(weight.names) - 1
        weight_parts, stored = (head, *stored[:beside]), stored[beside:]
        w = weight.decode_fast(*weight_parts)
        g = widened(grad)
        states, groups = [], []
        for format in formats:
            own, stored = stored[: len(format.names)], stored[len(format.names) :]
            states.append(format.decode(*own))
            groups.append(own[-1].shape[-1:] if isinstance(format, Grouped) else ())

        moved, *states = self.rule(w, -g if self.maximize else g, *states, t, **hyper)
        by = moved.by if isinstance(moved, Moved) else moved - w

        drawn: list[Tensor | None] = [None] * (1 + len(states))
        if self.rounding == "dither":
            bits = mix_phases(place.phases(head, t.to(torch.int32)))
            drawn = [noise(bits, state) for state in range(len(drawn))]
        parts = list(weight.advance(*weight_parts, by, drawn[0]))
        for format, state, each, count in zip(formats, states, drawn[1:], groups, strict=True):
            parts += format.encode(kept(state) if count else state, each, *count)
        return tuple(parts), by

    def __call__(self, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        """Step a block in place."""
        head, _, *stored = tensors
        parts, _ = self.compute(tensors, t, place, hyper)
        for old, new in zip((head, *stored), parts, strict=True):
            old.copy_(new)


@cache
def _one_of_a_kind(rule: Rule, storage: Storage, rounding: str, maximize: bool) -> Step:
    return Step(rule, storage, rounding, maximize)


def trace(
    step: Step, tensors: Sequence[Tensor], start: int, positions: Tensor | None, t: Tensor, hyper: Numbers
) -> None:
    """Step a parameter (head, gradient, then the rest), or part of it, inside a graph that a caller is compiling.

    Its elements follow each other in the whole parameter from `start` on, or lie at `positions`.
    """
    copies = [tensor.contiguous() for tensor in tensors]
    # Stored as fp32: loops in which all results follow from 16-bit floats would be 32 elements wide, and gcc would no
    # longer see that casting as many floats to their bits is nothing to do.
    copies[1] = once(copies[1].to(torch.float32))
    shape = tuple(copies[0].shape)
    places = [Place.at(start + offset) for offset, _ in step.storage.blocks(shape, copies)]
    if positions is not None:
        # As if they were the gradient, which is cut into blocks like any number of an element.
        phases = [copies[0], phases_of(positions), *copies[2:]]
        none = torch.zeros((), dtype=torch.int32, device=positions.device)
        places = [Place(none, (block[1], none)) for _, block in step.storage.blocks(shape, phases)]
    for place, (_, block) in zip(places, step.storage.blocks(shape, copies), strict=True):
        step(block, t, place, hyper)
    if copies[0] is not tensors[0]:
        tensors[0].copy_(copies[0])
