"""A word to whoever waits for a step that is being compiled, so that nobody thinks it hangs."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("flashopt_compile")
SECONDS = 2.0

_told = threading.Event()


@contextmanager
def patience(owner: str) -> Iterator[None]:
    """Tell, once in a process, that a step is being compiled if what is done inside takes longer than two seconds.

    A record always goes to the logger `flashopt_compile`, and a line to stderr if that is a terminal.
    """
    if _told.is_set():
        yield
        return
    timer = threading.Timer(SECONDS, tell, [owner])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(owner: str) -> None:
    """Log that the owner's step is being compiled, and print it on a terminal, unless this has been told before."""
    if _told.is_set():
        return
    _told.set()
    text = (
        f"{owner}: compiling the step: some ten seconds for each kind of parameter, once. opt.warmup() does this "
        "beforehand, and TORCHINDUCTOR_CACHE_DIR keeps the result."
    )
    LOGGER.info(text)
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
