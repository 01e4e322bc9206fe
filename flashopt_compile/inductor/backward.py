"""What autograd tells of a backward pass while it runs."""

from collections.abc import Callable
from typing import Any

from flashopt_compile.inductor.probes import GATHERING


def _found() -> tuple[Any, Any]:
    """What tells the number of the running pass, and what takes calls to be made at its end."""
    if not GATHERING.is_open():
        return None, None
    task, engine = (each.find() for each in GATHERING.needs)
    try:
        return task, engine.queue_callback
    except AttributeError as error:
        GATHERING.close(str(error))
        return None, None


_TASK, _AT_END = _found()


def running() -> int | None:
    """The number of the backward pass that runs now; None if there is none, or torch does not tell."""
    number = -1 if _TASK is None else _TASK()
    return None if number < 0 else number


def at_end(act: Callable[[], None]) -> None:
    """Call `act` when the backward pass that runs now has computed all gradients. If it fails, nothing is called."""
    assert _AT_END is not None
    _AT_END(act)
