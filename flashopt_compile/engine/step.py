"""The one step of every optimizer: stored parts → decode → fp32 rule → encode → stored parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.engine.storage import Storage
from flashopt_compile.rule import Moved, Rule
from quant.dither import block_phases, mix_phases, noise, phase_of, phases_of, step_phase
from quant.format import Format
from quant.grouped import Grouped
from quant.ulp import once, spread, widened

Numbers = dict[str, Any]  # hyper-parameters by name, as 0-dim fp32 tensors or tuples of such


class Table(NamedTuple):
    """Phases of a block's rows (rows, 1, 1), of the groups in a row (n, groups), and of the lanes of a group's row.

    Where all of a block's rows are alike, `rows` tells them apart; where its groups come from all over, `groups` does.
    """

    rows: Tensor
    groups: Tensor
    lanes: Tensor


class Place(NamedTuple):
    """Where a block lies in its parameter: the phases that its noise is drawn from.

    Without a table, the block is a view of a contiguous parameter, and the phases follow from its strides.
    """

    start: Tensor
    table: Table | None = None

    @classmethod
    def at(cls, start: int, device: torch.device | str = "cpu") -> "Place":
        """The place of a view whose first element is at `start`; kernels of any device take a number on the CPU."""
        return cls(phase_of(start, device))

    def phases(self, block: Tensor, step: Tensor) -> Tensor:
        """The phase of every element of the block at a step."""
        now = once(self.start + step_phase(step), by=block)
        if self.table is None:
            rows, lanes = block_phases(block)
            return spread(now + rows, block) + lanes
        rows, groups, lanes = self.table
        # Expanded, so that Inductor computes it in the same loop as everything else that belongs to a row.
        own = rows.expand(*block.shape[:-1], -1)
        return spread(once(own + now + groups), block) + lanes


@dataclass(frozen=True)
class Step:
    """What a step does to a block, apart from the numbers: one compiled graph each.

    `for_gcc` has it written for gcc to vectorize (see `quant.ulp`); fp16 blocks are then given as their bits in int16.
    """

    rule: Rule
    storage: Storage
    rounding: str
    maximize: bool
    for_gcc: bool = False

    def __str__(self) -> str:
        states = ", ".join(
            f"{name} in {'8 bits' if isinstance(format, Grouped) else 'fp32'}" for name, format in self.storage.states
        )
        return f"{self.rule.name} of weights as {self.storage.weight}" + (f", {states}" if states else "")

    def dithers(self, format: Format) -> bool:
        """Whether what is stored as `format` is dithered: variances always, or they would only grow.

        Between two steps a variance falls by 1 − β₂ at most, 0.1 %, which to nearest is no code's worth.
        """
        return self.rounding == "dither" or (isinstance(format, Grouped) and not format.signed)

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
            groups.append(own[-1].shape[-1] if isinstance(format, Grouped) else 0)

        moved, *states = self.rule(w, -g if self.maximize else g, *states, t, **hyper)
        by = moved.by if isinstance(moved, Moved) else moved - w

        drawn: list[Tensor | None] = [None] * (1 + len(states))
        dithered = [stream for stream, format in enumerate((weight, *formats)) if self.dithers(format)]
        if dithered:
            bits = mix_phases(place.phases(head, t.to(torch.int32)))
            drawn = [noise(bits, stream) if stream in dithered else None for stream in range(len(drawn))]
        for_gcc = {"for_gcc": True} if self.for_gcc else {}  # which formats of others need not know
        parts = list(weight.advance(*weight_parts, by, drawn[0], **for_gcc))
        for format, state, each, count in zip(formats, states, drawn[1:], groups, strict=True):
            if isinstance(format, Grouped):
                # In tiles each element is computed once; elsewhere storing it costs more than computing it again.
                state = once(state) if self.for_gcc else state
                parts += format.encode(state, each, count, self.for_gcc)
            else:
                parts += format.encode(state, each)
        return tuple(parts), by

    def __call__(self, tensors: Sequence[Tensor], t: Tensor, place: Place, hyper: Numbers) -> None:
        """Step a block in place."""
        head, _, *stored = tensors
        parts, _ = self.compute(tensors, t, place, hyper)
        for old, new in zip((head, *stored), parts, strict=True):
            old.copy_(new)


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
    places = [Place.at(start + offset, t.device) for offset, _ in step.storage.blocks(shape, copies)]
    if positions is not None:
        # Passed in the gradient's place, phases are cut into blocks like any other elements.
        phases = [copies[0], phases_of(positions), *copies[2:]]
        none = torch.zeros((), dtype=torch.int32, device=positions.device)
        no_groups = none.reshape(1)
        places = [Place(none, Table(block[1], no_groups, none)) for _, block in step.storage.blocks(shape, phases)]
    for place, (_, block) in zip(places, step.storage.blocks(shape, copies), strict=True):
        step(block, t, place, hyper)
    if copies[0] is not tensors[0]:
        tensors[0].copy_(copies[0])
