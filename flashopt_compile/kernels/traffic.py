"""The memory traffic of a step of emitted code: launches, temporaries, and bytes read and written per element."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.kernels import source
from flashopt_compile.kernels.emit import Emitted, arguments


@dataclass(frozen=True)
class Traffic:
    """The traffic of one step, in bytes per element."""

    launches: int
    temporaries: int
    read_bytes: float
    written_bytes: float
    least_read_bytes: float
    least_written_bytes: float

    @property
    def excess(self) -> float:
        """The share by which the bytes exceed the least possible."""
        least = self.least_read_bytes + self.least_written_bytes
        return (self.read_bytes + self.written_bytes) / least - 1


def traffic(emitted: Emitted) -> Traffic:
    """Count traffic by running the emitted `call` on tensors of the emitted shapes. Each load or store in a kernel
    moves all bytes of its tensor, whether argument or temporary."""
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
    """The bytes to read and write head and parts once, and to read the gradient."""
    written = grads = 0
    for shape in emitted.shapes:
        head, grad, *rest = emitted.step.storage.step_parts(shape, emitted.grad_dtype)
        written += sum(part.bytes for part in (head, *rest))
        grads += grad.bytes
    return written + grads, written
