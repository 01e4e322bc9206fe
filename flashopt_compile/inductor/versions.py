"""The versions of torch that this library is for: older ones are refused on import, newer ones warned of.

Nothing else looks at a version. What a torch can do is found by probes (`flashopt_compile/inductor/probes.py`).
"""

import re
import warnings

import torch

OLDEST, NEWEST = (2, 13), (2, 15)


def check(version: str) -> None:
    """Raise ImportError for a torch that is too old; warn of one that is newer than any that was tested."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return
    found = int(numbers[1]), int(numbers[2])
    tested = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    if found < OLDEST:
        raise ImportError(f"flashopt-compile needs torch {tested}, but torch {version} is installed.")
    if found > NEWEST:
        text = f"flashopt_compile: torch {version} is newer than those that were tested ({tested}); steps may be slower"
        warnings.warn(f"{text}, but not wrong.", RuntimeWarning, stacklevel=2)


check(torch.__version__)
