"""What autograd tells of a backward pass while it runs."""

from collections.abc import Callable

from flashopt_compile.inductor.probes import GATHERING

_TASK, _AT_END = (each.find() for each in GATHERING.needs) if GATHERING.is_open() else (None, None)


def running() -> int | None:
    """The number of the backward pass that runs now; None if there is none, or torch does not tell."""
    number = -1 if _TASK is None else _TASK()
    return None if number < 0 else number


def at_end(act: Callable[[], None]) -> None:
    """Call `act` when the backward pass that runs now has computed all gradients. If it fails, nothing is called."""
    assert _AT_END is not None
    _AT_END(act)
