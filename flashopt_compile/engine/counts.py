"""Step counts of a plan: the tensors in which an optimizer's state has them, counted on together."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Operation, copies
from flashopt_compile.engine.pack import settle


class Counts:
    """Counts on the CPU. The host compares them with what it has counted, so that it sees when others write them."""

    def __init__(self, counts: Sequence[Tensor], device: torch.device | str = "cpu") -> None:
        self._own = counts
        self._now = torch.stack([count.detach().to(device, torch.float32) for count in counts])
        self._one = torch.ones((), dtype=torch.float32, device=device)  # torch would make one of a number in each step
        self._after = self._now + 1
        self._places, self.next = self._now.unbind(), self._after.unbind()
        self.taken: list[float] = self._now.tolist()
        self._soon: list[float] = []

    def settle(self) -> None:
        """Move the counts beside each other."""
        settle(self._own, self._places)

    def are_known(self) -> bool:
        """Whether they are what this plan has made of them."""
        return self._now.tolist() == self.taken

    def advance(self) -> None:
        """Work out `next`, which kernels read, before a step."""
        torch.add(self._now, self._one, out=self._after)
        self._soon = self._after.tolist()

    def storing(self, positions: Sequence[int]) -> list[Operation]:
        """The operations that count the step of some parameters."""
        if len(positions) == len(self._places):
            return [partial(self._now.copy_, self._after)]
        return copies([self._places[each] for each in positions], [self.next[each] for each in positions])

    def finish(self) -> None:
        """Note that a step has been counted."""
        self.taken = self._soon


class CapturableCounts(Counts):
    """Counts on a device, which the host never reads: a CUDA graph counts on when it is replayed.

    Where others write them by torch's operations, the versions of the tensors tell. A plan's own writes, to memory that
    they share, do not change these.
    """

    def settle(self) -> None:
        super().settle()
        self._versions = self._versions_now()

    def are_known(self) -> bool:
        return self._versions_now() == self._versions

    def advance(self) -> None:
        torch.add(self._now, self._one, out=self._after)

    def finish(self) -> None:
        pass

    def _versions_now(self) -> list[int]:
        return [each._version for each in self._own]
