"""The long hunt for wrong steps: random courses of use until the time is up. `make hunt`.

The long forms of the thread, growth and interrupt tests run first. The courses are those of tests/test_hunt.py,
longer and with more kinds of kernels. They run in processes of a few minutes each, so that a crash is reported too.
"""

import argparse
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PARTS = {
    "test_threads.py": {"FLASHOPT_ROUNDS": "50"},
    "test_growth.py": {"FLASHOPT_STEPS": "2000"},
    "test_interrupts.py": {"FLASHOPT_EVERY_LINE": "1"},
}
PROCESS_SECONDS = 600.0  # a new process then compiles its kernels in another order
GRACE_SECONDS = 900.0  # to finish the last courses, or to shrink one that failed
REPORT_SECONDS = 10.0


def run_part(name: str, variables: dict[str, str]) -> bool:
    """Run a test file in its long form. Return True if it passes or does not exist."""
    if not (TESTS / name).exists():
        print(f"hunt: there is no tests/{name}, left out", file=sys.stderr)
        return True
    print(f"hunt: tests/{name} with {variables}", file=sys.stderr)
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{name}"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode == 0


def run_courses(seconds: float, counts: Any, log: str) -> None:
    """Run and count courses for `seconds`. If one fails, print it, shrunk, and exit with 1."""
    sys.path.insert(0, str(TESTS))
    courses = importlib.import_module("courses")
    stateful = importlib.import_module("hypothesis.stateful")
    tally = courses.Course.tally
    before = list(counts)

    def report() -> None:
        counts[:] = [before[0] + tally.courses, before[1] + tally.steps]

    end = time.monotonic() + seconds
    with open(log, "w") as file:
        tally.log, tally.report = file, report
        while time.monotonic() < end:
            try:
                stateful.run_state_machine_as_test(courses.Course, settings=courses.LONG)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
                sys.exit(1)


def progress(counts: Any, start: float) -> str:
    courses, steps = counts
    return f"{courses:,} courses, {steps:,} steps, {(time.monotonic() - start) / 60:.1f} minutes"


def watch(seconds: float, counts: Any, log: str, start: float) -> str | None:
    """Run courses in a process of their own and print progress. Return what went wrong, if anything did."""
    process = multiprocessing.get_context("spawn").Process(target=run_courses, args=(seconds, counts, log))
    end = time.monotonic() + seconds + GRACE_SECONDS
    process.start()
    while process.exitcode is None:
        process.join(REPORT_SECONDS)
        print(f"hunt: {progress(counts, start)}", file=sys.stderr)
        if time.monotonic() > end:
            process.kill()
            return f"a course does not end:\n{Path(log).read_text()}"
    if process.exitcode == 1:
        return "the course above fails"
    return f"a course ends the process ({process.exitcode}):\n{Path(log).read_text()}" if process.exitcode else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hunt", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="how long courses are run (30)")
    parser.add_argument("--courses-only", action="store_true", help="leave out threads, growth and interrupts")
    arguments = parser.parse_args()
    for name, variables in ({} if arguments.courses_only else PARTS).items():
        if not run_part(name, variables):
            sys.exit(1)
    os.environ["FLASHOPT_WIDE"] = "1"  # inherited by the processes
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    counts = multiprocessing.get_context("spawn").Array("q", 2)
    start, found = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        while found is None and (left := start + 60 * arguments.minutes - time.monotonic()) > 0:
            found = watch(min(left, PROCESS_SECONDS), counts, f"{folder}/course", start)
    print(f"{progress(counts, start)}: {found or 'nothing found'}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
