"""The picture of `bench.speed`: a bar for each race, the baseline's step time over ours."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.speed_rows import Row, rounded, with_unit

matplotlib.use("Agg")

# After Okabe and Ito: distinct for every kind of colour vision. One colour per optimizer.
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7")
INK = "#222222"
FAINT = "#707070"
HEIGHT = 0.66  # of a bar


def colours_of(rows: Sequence[Row]) -> list[str]:
    """A colour for each row; rows of the same work share one."""
    works = list(dict.fromkeys(row.work for row in rows))
    return [COLOURS[works.index(row.work) % len(COLOURS)] for row in rows]


def draw_bar(axes: Axes, place: int, row: Row, colour: str) -> None:
    """Draw a bar from 1 to the ratio, its value, and a mark at the goal. Without a value, write why."""
    if row.goal:
        reach = HEIGHT / 2 + 0.1
        axes.plot([row.goal.limit] * 2, [place - reach, place + reach], color=INK, linewidth=2.6, zorder=3)
    if row.value is None:
        axes.text(1.05, place, row.verdict, ha="left", va="center", fontsize=10, color=FAINT, style="italic")
        return
    axes.barh(place, row.value - 1, HEIGHT, left=1, color=colour, zorder=2)
    farthest = max(row.value, 1.0, row.goal.limit if row.goal and 0.7 < row.goal.limit / row.value < 1.6 else 0.0)
    label = with_unit(rounded(row.value, below_ten=2), row.unit)
    weight = "bold" if row.has_passed else "normal"
    axes.text(farthest * 1.06, place, label, ha="left", va="center", fontsize=11, weight=weight, color=INK)


def draw(rows: Sequence[Row], machine: str, path: Path) -> None:
    """Write the picture of the races among `rows` to `path`."""
    races = [row for row in rows if row.is_race]
    values = [row.value for row in races if row.value is not None]
    limits = [row.goal.limit for row in races if row.goal]
    figure, axes = plt.subplots(figsize=(12, 1.9 + 0.42 * len(races)), layout="constrained")
    axes.set_xscale("log")
    for place, (row, colour) in enumerate(zip(races, colours_of(races), strict=True)):
        draw_bar(axes, place, row, colour)
    axes.axvline(1, color=INK, linewidth=1.2, zorder=4)
    axes.set_yticks(range(len(races)), [f"{row.work}: {row.baseline}" for row in races], fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(races) - 0.4, -0.6)
    axes.set_xlim(0.8 * min([*values, *limits, 0.6]), 2 * max([*values, *limits, 2.0]))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("time of the baseline's step ÷ time of ours (log scale); right of 1 ours is faster", fontsize=11)
    axes.set_title(
        "How many times as long as ours another optimizer's step takes", loc="left", fontsize=13, weight="bold"
    )
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8, zorder=0)
    mark = Line2D([], [], color=INK, linewidth=0, marker="|", markersize=13, markeredgewidth=2.6, label="goal")
    axes.legend(handles=[mark], frameon=False, loc="lower right", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel(machine, fontsize=9, color=FAINT)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
