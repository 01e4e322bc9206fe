"""The rows that `bench.speed` measures. They are printed and saved from here and drawn by `speed_picture`."""

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.bounds_page import markdown

HEADER = ("work", "baseline", "baseline ms", "ours ms", "ratio", "goal", "pass/FAIL")
COMPARISONS = {"≥": operator.ge, "≤": operator.le}


def rounded(number: float, below_ten: int = 3) -> str:
    """`number` with `below_ten` decimals below 10, one below 100 and none above."""
    return f"{number:,.{below_ten if number < 10 else 1 if number < 100 else 0}f}"


def with_unit(shown: str, unit: str) -> str:
    return f"{shown}×" if unit == "×" else f"{shown} {unit}"


@dataclass(frozen=True)
class Goal:
    """The goal for a figure: Goal("≥", 1.0)."""

    comparison: str
    limit: float

    def is_met_by(self, value: float) -> bool:
        return COMPARISONS[self.comparison](value, self.limit)


@dataclass(frozen=True)
class Row:
    """One figure: the ratio of the two minima, or `figure` in `unit`.

    `note` explains the figure, or why there is none ("skipped: ..." or "failed: ..."). `minima_ms` holds the times
    behind a figure if there are more than two.
    """

    work: str
    baseline: str = "–"
    goal: Goal | None = None
    baseline_ms: float | None = None
    ours_ms: float | None = None
    figure: float | None = None
    unit: str = "×"
    rounds: int = 1
    minima_ms: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def value(self) -> float | None:
        if self.figure is not None:
            return self.figure
        if self.baseline_ms is None or self.ours_ms is None:
            return None
        return self.baseline_ms / self.ours_ms

    @property
    def is_race(self) -> bool:
        """True if the row compares two contenders, measured or not."""
        return self.baseline != "–"

    @property
    def has_passed(self) -> bool | None:
        return None if self.value is None or self.goal is None else self.goal.is_met_by(self.value)

    @property
    def verdict(self) -> str:
        if self.value is None:
            return self.note.partition(":")[0]
        return {True: "pass", False: "FAIL", None: "–"}[self.has_passed]

    def cells(self) -> tuple[str, ...]:
        times = ("–" if each is None else f"{each:,.2f}" for each in (self.baseline_ms, self.ours_ms))
        value = "–" if self.value is None else with_unit(rounded(self.value), self.unit)
        goal = f"{self.goal.comparison} {with_unit(f'{self.goal.limit:g}', self.unit)}" if self.goal else "–"
        return (self.work, self.baseline, *times, value, goal, self.verdict)

    def record(self) -> dict[str, Any]:
        """All fields and the values derived from them, for JSON."""
        return {**asdict(self), "value": self.value, "passed": self.has_passed}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with the notes below."""
    notes = [row.note for row in rows if row.note]
    return "\n".join([markdown(HEADER, [row.cells() for row in rows], left=2), *([""] if notes else []), *notes])
