"""Run a function of a test file in a new process, which has compiled nothing yet or has another environment."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); import fresh; fresh.call(*sys.argv[2:])"


def command(function: Callable[..., Any], *arguments: Any, flags: Sequence[str] = ()) -> list[str]:
    """The command line that calls `function`. The arguments must survive JSON unchanged."""
    name = f"{function.__module__}:{function.__name__}"
    return [sys.executable, *flags, "-c", PROGRAM, str(TESTS), name, json.dumps(arguments)]


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes`; None removes a variable."""
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


def run(
    function: Callable[..., Any],
    *arguments: Any,
    flags: Sequence[str] = (),
    variables: Mapping[str, str | None] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Call `function` in a new process and assert that it succeeds."""
    done = subprocess.run(
        command(function, *arguments, flags=flags),
        env=environment(**(variables or {})),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def call(name: str, arguments: str) -> None:
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)(*json.loads(arguments))
