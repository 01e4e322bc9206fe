"""Step times compared with torch's optimizers and other packages': `python -m bench speed`.

Both contenders step in turn, in one process, so that disturbances hit both. Every ratio is one of minimum times,
the least disturbed ones.
"""

import contextlib
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import fresh, peers
from bench.fresh import ROOT, THREADS, chosen_device, synchronize
from bench.machine import describe_machine
from bench.peers import Contender, Runner, Shapes, resnet_shapes
from bench.speed_picture import draw
from bench.speed_rows import Goal, Row, table

MIB = 2**20
WARM_UP_STEPS = 2  # the first compiles and makes the state, the second must move a weight
STEPS_AFTER_THE_FIRST = 4  # in each turn of a size in `growth`
WATCHED_WEIGHTS = 4096
BYTES_PER_ELEMENT = 10  # ours with its gradient, and some to spare
PACKAGES = ("flashopt-compile", "torch", "triton", *(peer.package for peer in peers.PEERS))


@dataclass(frozen=True)
class Plan:
    """How much to measure. A race ends after `most_rounds`, or after `seconds` once it has had `least_rounds`."""

    matrix: tuple[int, int] = (4096, 4096)
    convolutions: int = 33
    growth: tuple[int, ...] = (2**20, 2**22, 2**24, 2**26, 2**28)
    least_rounds: int = 3
    most_rounds: int = 60
    seconds: float = 12.0


FULL = Plan()
QUICK = Plan(matrix=(64, 128), convolutions=1, growth=(2**13, 2**15), least_rounds=2, most_rounds=2, seconds=0.0)


@dataclass(frozen=True)
class Comparison:
    """One race to run."""

    work: str
    shapes: Shapes
    ours: Contender
    baseline: Contender
    goal: float | None


class BaselineError(Exception):
    """An error of a baseline, in one line."""


@contextlib.contextmanager
def blaming_baseline() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        raise BaselineError(f"{type(error).__name__}: {first_line}".rstrip(": ")) from error


def goal_on(device: torch.device, comparison: str, limit: float | None) -> Goal | None:
    """The goal on a CPU. GPUs have none yet."""
    return None if limit is None or device.type != "cpu" else Goal(comparison, limit)


def comparisons(plan: Plan, device: torch.device) -> list[Comparison]:
    """All races, in the order of the table."""
    matrix, network = [plan.matrix], resnet_shapes(plan.convolutions)
    size, small = f"{plan.matrix[0]}×{plan.matrix[1]}", f"{len(network)} small tensors"
    races = [
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.MIXED_ADAMW, 1.0),
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.FP32_ADAMW, 0.6),
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.TORCHAO, 20.0),
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.BITSANDBYTES, 20.0),
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.HEAVYBALL, 3.0),
        Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.OPTIMI, 2.0),
        Comparison(f"SGD, {size}", matrix, peers.OUR_SGD, peers.MIXED_SGD, 1.0),
        Comparison(f"Lion, {size}", matrix, peers.OUR_LION, peers.MIXED_LION, 1.0),
        Comparison(f"Lion, {size}", matrix, peers.OUR_LION, peers.MIXED_LION_IN_ONE, None),
        Comparison(f"AdamW, {small}", network, peers.OUR_ADAMW, peers.FOREACH_ADAMW, 1.0),
    ]
    if device.type != "cpu" and peers.FLASHOPTIM.is_installed:
        races.insert(6, Comparison(f"AdamW, {size}", matrix, peers.OUR_ADAMW, peers.FLASHOPTIM, None))
    return races


def warm_up(runner: Runner) -> None:
    """Take the untimed steps. Refuse an optimizer that moves no weight in the last of them."""
    before = runner.weights[0]
    for _ in range(WARM_UP_STEPS):
        before = runner.weights[0].detach().flatten()[:WATCHED_WEIGHTS].clone()
        runner.renew()
        runner.step()
    if torch.equal(before, runner.weights[0].detach().flatten()[:WATCHED_WEIGHTS]):
        raise RuntimeError(f"step {WARM_UP_STEPS} has changed no weight")


def timed_ms(runner: Runner, device: torch.device) -> float:
    runner.renew()
    synchronize(device)
    begin = time.perf_counter()
    runner.step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def rounds_of(plan: Plan, contenders: int = 2) -> Iterator[int]:
    """Count the rounds that fit into the time of `plan`, which is meant for two contenders."""
    begin, seconds = time.perf_counter(), plan.seconds * contenders / 2
    for number in range(plan.most_rounds):
        if number >= plan.least_rounds and time.perf_counter() - begin > seconds:
            return
        yield number


def race(comparison: Comparison, plan: Plan, device: torch.device) -> Row:
    """Step both contenders in turn. A baseline's error becomes the row's note; our own errors are raised."""
    goal = goal_on(device, "≥", comparison.goal)
    names = {"work": comparison.work, "baseline": comparison.baseline.name, "goal": goal}
    if not comparison.baseline.is_installed:
        package = comparison.baseline.package
        return Row(**names, note=f"skipped: {package} is not installed; pip install -e '.[bench]' adds it")
    ours = comparison.ours.build(comparison.shapes, device)
    warm_up(ours)
    ours_ms: list[float] = []
    baseline_ms: list[float] = []
    try:
        with blaming_baseline():
            baseline = comparison.baseline.build(comparison.shapes, device)
            warm_up(baseline)
        for _ in rounds_of(plan):
            ours_ms.append(timed_ms(ours, device))
            with blaming_baseline():
                baseline_ms.append(timed_ms(baseline, device))
    except BaselineError as error:
        return Row(**names, note=f"failed: {comparison.baseline.name}: {error}")
    return Row(**names, baseline_ms=min(baseline_ms), ours_ms=min(ours_ms), rounds=len(ours_ms))


def free_bytes(device: torch.device) -> float:
    if device.type != "cpu":
        return torch.accelerator.get_memory_info()[0]
    listed = Path("/proc/meminfo")
    if not listed.exists():
        return float("inf")
    lines = listed.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def in_millions(elements: int) -> str:
    return f"{elements / MIB:.3g}M"


def growth(plan: Plan, device: torch.device) -> list[Row]:
    """FlashAdamW's largest time per element over its smallest, among parameters of all sizes in turn.

    The first row times the first step of each turn. It finds the caches as a step of another size left them, without
    Python's own code and data. The second row times the other steps of each turn.
    """
    runners: dict[int, Runner] = {}
    lacking: list[str] = []
    for elements in plan.growth:
        needed, free = BYTES_PER_ELEMENT * elements, free_bytes(device)
        if needed > free:
            lacking.append(
                f"without {in_millions(elements)}, which needs {needed / 1e9:.1f} GB of {free / 1e9:.1f} free"
            )
            continue
        runners[elements] = peers.OUR_ADAMW.build([(elements // 1024, 1024)], device)
        warm_up(runners[elements])
    first_ms: dict[int, list[float]] = {elements: [] for elements in runners}
    later_ms: dict[int, list[float]] = {elements: [] for elements in runners}
    for _ in rounds_of(plan, len(runners)):
        for elements, runner in runners.items():
            for times_ms in (first_ms, *[later_ms] * STEPS_AFTER_THE_FIRST):
                times_ms[elements].append(timed_ms(runner, device))
    work = f"AdamW, time per element, {in_millions(min(runners))} to {in_millions(max(runners))}"
    return [
        growth_row(work, first_ms, goal_on(device, "≤", 1.15), lacking),
        growth_row(f"{work}, several steps in a row", later_ms, None, lacking),
    ]


def growth_row(work: str, times_ms: dict[int, list[float]], goal: Goal | None, lacking: Sequence[str]) -> Row:
    minima_ms = {elements: min(each) for elements, each in times_ms.items()}
    per_element_ns = {elements: 1e6 * each / elements for elements, each in minima_ms.items()}
    notes = [*(f"{in_millions(elements)} {each:.3f}" for elements, each in per_element_ns.items()), *lacking]
    return Row(
        work,
        goal=goal,
        figure=max(per_element_ns.values()) / min(per_element_ns.values()),
        rounds=len(times_ms[min(times_ms)]),
        minima_ms={str(elements): each for elements, each in minima_ms.items()},
        note=f"{work}, in ns: {', '.join(notes)}",
    )


def first_steps(plan: Plan, device: torch.device) -> list[Row]:
    """Time the first steps of two processes that share an Inductor cache, which starts empty."""
    rows = []
    work = f"first step, {len(resnet_shapes(plan.convolutions))} small tensors"
    with tempfile.TemporaryDirectory(prefix="inductor-cold-") as cache:
        for name, limit_s in (("cold", 40.0), ("warm", 8.0)):
            seconds = fresh.ask("first-step", plan.convolutions, cache=cache)
            assert seconds is not None
            goal = goal_on(device, "≤", limit_s)
            rows.append(Row(f"{work}, {name} cache", goal=goal, ours_ms=1e3 * seconds, figure=seconds, unit="s"))
    return rows


def extra_memory(plan: Plan, device: torch.device) -> Row:
    """Measure the extra memory of a FlashAdamW step in a process of its own."""
    work, goal = f"AdamW, {plan.matrix[0]}×{plan.matrix[1]}, extra memory in a step", goal_on(device, "≤", 16.0)
    extra_bytes = fresh.ask("memory", *plan.matrix)
    if extra_bytes is None:
        return Row(work, goal=goal, unit="MiB", note=f"skipped: extra memory needs Linux's {fresh.CLEAR_REFS}")
    return Row(work, goal=goal, figure=extra_bytes / MIB, unit="MiB")


def measure(plan: Plan, device: torch.device) -> list[Row]:
    """Measure all rows, in the order of the table."""
    races = comparisons(plan, device)
    found: dict[int, Row] = {}
    with tqdm(total=len(races) + 3, desc="speed", mininterval=0.2 if sys.stderr.isatty() else 15.0) as bar:
        # Some packages change torch's settings on import, so races that need a package run last.
        for number in sorted(range(len(races)), key=lambda number: bool(races[number].baseline.package)):
            bar.set_postfix_str(f"{races[number].work}: {races[number].baseline.name}")
            found[number] = race(races[number], plan, device)
            gc.collect()
            bar.update()
        rows = [found[number] for number in range(len(races))]
        bar.set_postfix_str("growth")
        rows += growth(plan, device)
        gc.collect()
        bar.update()
        bar.set_postfix_str("first step, cold and warm")
        rows += first_steps(plan, device)
        bar.update()
        bar.set_postfix_str("extra memory")
        rows.append(extra_memory(plan, device))
        bar.update()
    return rows


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {**found, "torch": torch.__version__}  # with its build, which PyPI's metadata leave out


def report(rows: Sequence[Row], plan: Plan, device: torch.device) -> dict[str, Any]:
    """Everything about a run, for its JSON file."""
    name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else "CPU"
    return {
        "date": date.today().isoformat(),
        "quick": plan == QUICK,
        "machine": describe_machine(),
        "device": name,
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "versions": versions(),
        "rows": [row.record() for row in rows],
    }


def main(quick: bool = False, out: Path | None = None) -> None:
    """Measure and print. Write <date>.json and speed.png to `out`, by default to the documentation's folders."""
    if out is None and quick:
        out = ROOT / ".cache" / "bench"  # a smoke test's figures never replace the published ones
    torch.set_num_threads(THREADS)
    plan, device = QUICK if quick else FULL, chosen_device()
    rows = measure(plan, device)
    found = report(rows, plan, device)
    print(found["machine"])
    print(f"{found['device']}, {found['threads']} threads; " + ", ".join(" ".join(each) for each in versions().items()))
    print(f"\n{table(rows)}\n")
    path = (out or ROOT / "bench" / "results") / f"{found['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    picture = (out or ROOT / "docs" / "img") / "speed.png"
    draw(rows, found["machine"], picture)
    print(f"Figures: {path}. Picture: {picture}.")
