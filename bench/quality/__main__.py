"""Exact fp32 training beside ours: python -m bench.quality [--row digits,low-lr] [--seeds N] [--page]

Each run is kept as soon as it has ended, so that an interrupted study goes on where it stopped. docs/quality.md is
written anew after each row.
"""

import os

# Waiting threads must not spin: on a busy machine they would take the core from the thread they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from bench.quality.page import write_page
from bench.quality.rows import ROWS, Row
from bench.quality.runs import RESULTS, missing, read, run, write


def study(row: Row, folder: Path) -> None:
    """Do the runs of a row that are missing."""
    runs = read(row, folder)
    jobs = missing(row, runs)
    for number, (contender, lr, seed) in enumerate(jobs, start=1):
        label = f"{row.name} {number}/{len(jobs)}: {contender.name}, seed {seed}, lr {lr:.2g}"
        pause = 0.2 if sys.stderr.isatty() else 30.0
        with tqdm(total=row.schedule.steps, desc=label, mininterval=pause, leave=False) as bar:

            def tell(loss: float, bar: tqdm = bar) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()

            runs.append(run(row, contender, lr, seed, tell))
        write(row, runs, folder)
        last = runs[-1]
        print(f"[{time.strftime('%H:%M:%S')}] {label}: {last['loss']} after {last['seconds']:.0f} s", flush=True)


def chosen(names: str, seeds: int) -> list[Row]:
    """The rows whose names begin with one of `names`, with at least so many seeds."""
    begins = tuple(each.strip() for each in names.split(",") if each.strip())
    return [replace(row, seeds=max(seeds, row.seeds)) for row in ROWS if row.name.startswith(begins or ("",))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description="Exact fp32 training beside ours.")
    parser.add_argument("--row", default="", metavar="LIST", help="beginnings of the names of rows (all)")
    parser.add_argument("--seeds", type=int, default=0, help="seeds, if more than the row has by itself")
    parser.add_argument(
        "--page", action="store_true", help="write docs/quality.md from what there is, and train nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args(arguments)
    rows = chosen(options.row, options.seeds)
    if not rows:
        parser.error(f"--row is {options.row!r}; rows are {', '.join(row.name for row in ROWS)}.")
    for row in rows:
        if not options.page:
            study(row, options.out)
            write_page(options.out)
    write_page(options.out)


if __name__ == "__main__":
    main()
