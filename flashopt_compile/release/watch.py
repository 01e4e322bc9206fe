"""Notices that torch.nn.utils.clip_grad_norm_ looks for gradients that have been released, and clips nothing.

Between the end of a backward pass and `optimizer.step()`, one parameter is of a subclass of its class, whose `grad`
notes who reads it. Nothing of torch is patched, and the parameter is its old self before anything else runs.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

CLIPPING = torch.nn.utils.clip_grad_norm_.__name__


class Watch:
    """Watches one parameter for one round at a time, until it has warned."""

    def __init__(self, parameter: Tensor, owner: str) -> None:
        self._parameter, self._owner = parameter, owner
        self._class = type(parameter)
        self._has_seen = self._has_told = False

    def begin(self) -> None:
        """Watch from now on: a backward pass has ended."""
        if not self._has_told and type(self._parameter) is self._class:
            self._parameter.__class__ = _watched(self._class, self)

    def end(self) -> None:
        """Watch no longer, and warn of what has been seen."""
        if type(self._parameter) is not self._class:
            self._parameter.__class__ = self._class
        if self._has_seen and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{self._owner}: {CLIPPING} found no gradients and clipped nothing, as gradient release has freed "
                "them; give enable_gradient_release clip_norm instead.",
                RuntimeWarning,
                stacklevel=2,
            )

    def note(self, names: list[str]) -> None:
        """Note which functions read the gradient, the innermost first."""
        self._has_seen = self._has_seen or CLIPPING in names


def _watched(kind: type[Any], watch: Watch) -> type[Any]:
    def read(parameter: Any) -> Any:
        frame, names = sys._getframe(1), []  # a comprehension has a frame of its own before Python 3.12
        while frame is not None and len(names) < 2:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        watch.note(names)
        return kind.grad.__get__(parameter)

    def write(parameter: Any, value: Any) -> None:
        kind.grad.__set__(parameter, value)

    def delete(parameter: Any) -> None:
        kind.grad.__delete__(parameter)

    return type(kind.__name__, (kind,), {"grad": property(read, write, delete), "__module__": kind.__module__})
