"""What a step of the emitted code moves: launches, temporaries, and bytes of memory read and written per element."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.kernels import source
from flashopt_compile.kernels.emit import Emitted, arguments


@dataclass(frozen=True)
class Traffic:
    """What one step moves, in bytes per element."""

    launches: int
    temporaries: int
    read_bytes: float
    written_bytes: float
    least_read_bytes: float
    least_written_bytes: float

    @property
    def excess(self) -> float:
        """By what share the bytes are above the least."""
        least = self.least_read_bytes + self.least_written_bytes
        return (self.read_bytes + self.written_bytes) / least - 1


def traffic(emitted: Emitted) -> Traffic:
    """Counted by running the emitted `call` on tensors of the emitted shapes: each load or store of a kernel moves
    as many bytes as the tensor it is of, be that argument or temporary."""
    moved = {"read": 0, "written": 0, "launches": 0}

    def launch(name: str) -> source.Launch:
        names, loads, stores = source.accesses_of(emitted.kernels[name])

        def count(*given: Any) -> None:
            moved["launches"] += 1
            for argument, value in zip(names, given, strict=False):
                if isinstance(value, Tensor):
                    moved["read"] += loads[argument] * value.numel() * value.itemsize
                    moved["written"] += stores[argument] * value.numel() * value.itemsize

        return count

    given = arguments(emitted.step, emitted.shapes, emitted.grad_dtype, torch.device("meta"))
    temporaries = source.run_call(emitted.source, emitted.bind(given), launch)
    elements = sum(map(math.prod, emitted.shapes))
    least_read, least_written = least_bytes(emitted)
    return Traffic(
        moved["launches"],
        len(temporaries),
        moved["read"] / elements,
        moved["written"] / elements,
        least_read / elements,
        least_written / elements,
    )


def least_bytes(emitted: Emitted) -> tuple[int, int]:
    """All that is stored read and written once, and the gradient read."""
    written = grads = 0
    for shape in emitted.shapes:
        head, grad, *rest = emitted.step.storage.step_parts(shape, emitted.grad_dtype)
        written += sum(part.bytes for part in (head, *rest))
        grads += grad.bytes
    return written + grads, written
