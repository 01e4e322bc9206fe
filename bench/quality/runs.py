"""One training and what is kept of it: a line of JSON in bench/results/quality/ROW.json."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bench.loop import follow
from bench.machine import describe_machine
from bench.quality.contenders import Contender, stored_weights
from bench.quality.rows import Row, at
from bench.quality.tasks import Task

RESULTS = Path(__file__).parent.parent / "results" / "quality"
POINTS = 25  # of a loss curve
DIVERGED = None  # what JSON keeps of a loss that is not finite

Run = dict[str, Any]


def figure(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else DIVERGED


def measured_in_fp32(task: Task, seed: int, weights: Mapping[str, Tensor]) -> float:
    """The held-out loss of weights with all their bits."""
    model = task.model(seed)
    model.load_state_dict(dict(weights))
    return task.measure(model)["loss"]


def distance(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """The mean distance that a weight has moved."""
    moved = sum((weights[name].double() - start[name].double()).abs().sum().item() for name in start)
    return moved / sum(each.numel() for each in start.values())


def run(row: Row, contender: Contender, lr: float, seed: int, tell: Callable[[float], None]) -> Run:
    """Train once, calling `tell` with each loss, and measure."""
    begin, busy = time.perf_counter(), time.process_time()
    task, schedule = row.task, at(row.schedule, lr)
    model = task.model(seed)
    start_loss = task.measure(model)["loss"]
    optimizer = contender.begin(model, {**row.family.numbers, "lr": lr})
    start = {name: weight.clone() for name, weight in stored_weights(model, optimizer).items()}
    losses = []
    batches = task.batches(schedule.steps, seed)
    for progress in follow(optimizer, schedule, batches, lambda batch: task.loss(model, batch)):
        losses.append(progress.loss)
        tell(progress.loss)
    end = stored_weights(model, optimizer)
    cuts = [len(losses) * point // POINTS for point in range(POINTS + 1)]
    curve = [fmean(losses[low:high]) for low, high in pairwise(cuts) if high > low]
    return {
        "contender": contender.name,
        "lr": lr,
        "seed": seed,
        **{name: figure(value) for name, value in task.measure(model).items()},
        "start": figure(start_loss),
        "stored": figure(measured_in_fp32(task, seed, end)),
        "moved": figure(distance(end, start)),
        "curve": [figure(float(f"{loss:.4g}")) for loss in curve],
        "seconds": round(time.perf_counter() - begin, 1),
        "core_seconds": round(time.process_time() - busy, 1),
        "machine": f"{describe_machine()}, {torch.get_num_threads()} threads",
    }


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from JSON."""
    return json.loads(json.dumps(settings))


def read(row: Row, folder: Path = RESULTS) -> list[Run]:
    """The runs that there are with the row's settings. A loss that was not finite comes back as NaN."""
    path = folder / f"{row.name}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != plain(row.settings):
        return []
    return [{name: _replaced(value, DIVERGED, math.nan) for name, value in each.items()} for each in found["runs"]]


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """The value, or all in a list, with `old` replaced by `new`; NaN equals NaN."""
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    return new if value is old or (value != value and old != old) else value


def write(row: Row, runs: list[Run], folder: Path = RESULTS) -> None:
    """Replace the row's file at once, so that an interrupt loses no run."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{name: _replaced(value, math.nan, DIVERGED) for name, value in each.items()} for each in runs]
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in kept)
    settings = json.dumps(plain(row.settings), ensure_ascii=False)
    path, new = folder / f"{row.name}.json", folder / f".{row.name}.{os.getpid()}"
    new.write_text(f'{{"settings": {settings},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    new.replace(path)


def missing(row: Row, runs: list[Run]) -> list[tuple[Contender, float, int]]:
    """The jobs of a row that have no run yet, of contenders that are installed."""
    done = {(each["contender"], each["lr"], each["seed"]) for each in runs}
    return [job for job in row.jobs if (job[0].name, *job[1:]) not in done and job[0].is_installed]
