"""The library on every torch that it supports: python -m bench.matrix [--torch 2.15.0] [--only suite] [--again]

`make matrix` runs it. Each torch gets a venv of its own under .cache/, which is removed once all its results are there.
The results are kept in bench/results/torch-VERSION.json as soon as each is known, so that a run can be interrupted and
continued. The table of docs/compatibility.md is written anew after each. Needs nothing but Python.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- written by make matrix -->", "<!-- end -->"
# Each torch, and the triton that belongs to it.
TORCHES = {"2.13.0": "3.8.0", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
QUESTIONS = ("machine", "kernels", "caller", "first step", "ratios")
HEAD = (
    *("torch", "triton", "Python", "suite", "AdamW 16.7M", "300 small tensors"),
    *("caller's torch.compile", "flashopt kernels", "first step"),
)


class Failed(Exception):
    """Why something gave no result, in one line."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def folder_of(version: str) -> Path:
    return ROOT / ".cache" / f"venv-{version}"


def python_of(version: str) -> Path:
    return folder_of(version) / "bin" / "python"


def install(version: str) -> None:
    """Make the venv of a torch, unless it is complete."""
    done = folder_of(version) / ".installed"
    if done.exists():
        return
    say(f"torch {version}: installing into {folder_of(version).relative_to(ROOT)}, some 3 GB")
    subprocess.run([sys.executable, "-m", "venv", folder_of(version)], check=True)
    packages = [f"torch=={version}", f"triton=={TORCHES[version]}", "-e", ".[test]"]
    subprocess.run([python_of(version), "-m", "pip", "install", "--quiet", *packages], cwd=ROOT, check=True)
    done.touch()


def environment(cache: Path | str, **variables: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": f"{cache}/triton"}
    return {**os.environ, **own, **variables}


def ask(version: str, question: str) -> Any:
    """The answer of `bench.version_row` in a new process; the first step begins with an empty cache."""
    command = [python_of(version), "-m", "bench.version_row", question]
    with cache_of(version, is_cold=question == "first step") as cache:
        done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["no output"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def cache_of(version: str, is_cold: bool) -> Iterator[Path | str]:
    if is_cold:
        with tempfile.TemporaryDirectory(prefix="inductor-cold-") as cache:
            yield cache
    else:
        yield ROOT / ".cache" / f"inductor-{version}"


def run_suite(version: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the tests, and show their output as it comes."""
    command = [python_of(version), "-m", "pytest", "-n", "2", "-q", "-rfE", "--show-capture=no", "--tb=line"]
    command += ["-p", "no:cacheprovider", *arguments]
    begin, lines = time.perf_counter(), []
    with cache_of(version, is_cold=False) as cache:
        given = environment(cache, OMP_WAIT_POLICY="passive")
        with subprocess.Popen(
            command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}
    if "passed" not in counts:
        raise Failed(lines[-1])
    failures = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {"counts": counts, "failures": failures, "seconds": round(time.perf_counter() - begin)}


def path_of(version: str) -> Path:
    return RESULTS / f"torch-{version}.json"


def read(version: str) -> dict[str, Any]:
    path = path_of(version)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(version: str, results: Mapping[str, Any]) -> None:
    path_of(version).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, ensure_ascii=False)
    path_of(version).write_text(f"{text}\n", encoding="utf-8")


def is_done(result: Any) -> bool:
    return result is not None and not (isinstance(result, dict) and "failed" in result)


def run(version: str, only: Sequence[str], again: bool, keep: bool) -> None:
    """Find what is not known yet of one torch, and write the table after each result."""
    tasks: dict[str, Callable[[], Any]] = {each: lambda each=each: ask(version, each) for each in QUESTIONS}
    tasks["suite"] = lambda: run_suite(version)
    results = read(version)
    asked = [name for name in tasks if name in (only or tasks) and (again or not is_done(results.get(name)))]
    if asked:
        install(version)
    for number, name in enumerate(asked, start=1):
        say(f"torch {version}: {name} ({number} of {len(asked)})")
        begin = time.perf_counter()
        try:
            results[name] = tasks[name]()
        except Failed as error:
            results[name] = {"failed": str(error)}
        results["date"] = date.today().isoformat()
        write(version, results)
        write_page()
        say(f"torch {version}: {name} took {time.perf_counter() - begin:.0f} s: {cell_of(name, results)}")
    if not keep and all(is_done(results.get(name)) for name in tasks):
        shutil.rmtree(folder_of(version), ignore_errors=True)


def cell_of(name: str, results: Mapping[str, Any]) -> str:
    """A result in a few words."""
    found = results.get(name)
    if found is None:
        return "not run"
    if isinstance(found, dict) and "failed" in found:
        return f"fails: {found['failed']}"
    return CELLS[name](found) if name in CELLS else str(found)


def _suite(found: Any) -> str:
    counts = found["counts"]
    return ", ".join(f"{number:,} {what}" for what, number in counts.items())


def _kernels(found: Any) -> str:
    compiled = {row["registers"] for row in found.values() if row["registers"] is not None}
    spilling = [target for target, row in found.items() if row["spills"]]
    told = f"{len(found)} targets, {min(compiled)} to {max(compiled)} registers"
    return f"{told}, spills on {', '.join(spilling)}" if spilling else told


CELLS: dict[str, Callable[[Any], str]] = {
    "suite": _suite,
    "kernels": _kernels,
    "caller": lambda found: f"{found['seconds']:.0f} s, " + ("same bits" if found["same_bits"] else "OTHER BITS"),
    "first step": lambda found: f"{found:.0f} s",
    "ratios": lambda found: f"{found['16.7M']:.2f}× and {found['300 small']:.2f}×",
}


def table() -> str:
    """The Markdown table of all results that there are, and the failures below it."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    notes, machines = [], set()
    for version, triton in TORCHES.items():
        results = read(version)
        machine = str(results.get("machine", ""))
        python = re.search(r"Python (\S+?),", machine)
        machines.add(machine.partition(";")[0])
        ratios = results.get("ratios") if is_done(results.get("ratios")) else None
        cells = [
            *(version, triton, python[1] if python else "–", cell_of("suite", results)),
            f"{ratios['16.7M']:.2f}×" if ratios else cell_of("ratios", results),
            f"{ratios['300 small']:.2f}×" if ratios else cell_of("ratios", results),
            *(cell_of(name, results) for name in ("caller", "kernels", "first step")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        failures = results.get("suite", {}).get("failures", [])
        notes += [f"- torch {version}: {failure}" for failure in failures]
    below = ", ".join(sorted(machines - {""}))
    return "\n".join([*lines, *(["", f"({below})"] if below else []), *(["", *notes] if notes else [])])


def write_page() -> None:
    """Put the table into docs/compatibility.md, between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.matrix", description="Every torch that is supported.")
    parser.add_argument("--torch", default="", metavar="LIST", help=f"of {','.join(TORCHES)} (all)")
    parser.add_argument("--only", default="", metavar="LIST", help=f"of {','.join(QUESTIONS)},suite (all)")
    parser.add_argument("--again", action="store_true", help="also what is known already")
    parser.add_argument("--keep", action="store_true", help="do not remove a venv that is not needed any more")
    options = parser.parse_args(arguments)
    versions = [each.strip() for each in options.torch.split(",") if each.strip()] or list(TORCHES)
    only = [each.strip() for each in options.only.split(",") if each.strip()]
    for name, given, allowed in (("torch", versions, TORCHES), ("only", only, (*QUESTIONS, "suite"))):
        if unknown := set(given) - set(allowed):
            parser.error(f"--{name} is {','.join(sorted(unknown))}; allowed are {', '.join(allowed)}.")
    for version in versions:
        run(version, only, options.again, options.keep)
    write_page()
    print(f"\n{table()}\n")


if __name__ == "__main__":
    main()
