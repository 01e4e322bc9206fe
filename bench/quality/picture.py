"""The pictures of docs/quality.md: intervals in margins, and losses by learning rate."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.demo_picture import CURVES, INK, write
from bench.quality.tally import Tally, pictured

COLOURS = {"ours": "#D55E00", "control": "#0072B2", "peer": "#009E73"}
SHOWN = 6.0  # margins; beyond, an arrow


def draw_intervals(axes: Axes, tallies: Sequence[Tally]) -> int:
    """Draw a line for each judged contender, and return how many there are."""
    labels = []
    for tally in tallies:
        for contender in tally.row.contenders[1:]:
            found = tally.judgements[contender.name]
            if not found.verdict or not found.margin:
                continue
            place, colour = len(labels), COLOURS[contender.role]
            labels.append(f"{tally.row.name}: {contender.name}")
            if found.mean is None or found.low is None or found.high is None:
                axes.text(SHOWN, place, "diverged", ha="right", va="center", fontsize=8, color=colour)
                continue
            low, mean, high = (each / found.margin for each in (found.low, found.mean, found.high))
            axes.plot([max(low, -SHOWN), min(high, SHOWN)], [place, place], color=colour, linewidth=2)
            if abs(mean) <= SHOWN:
                axes.plot(mean, place, "o", color=colour, markersize=5)
            if high > SHOWN:
                axes.plot(SHOWN, place, ">", color=colour, markersize=6)
            if low > SHOWN:
                axes.text(SHOWN - 0.2, place, f"{mean:.0f}", ha="right", va="center", fontsize=8, color=colour)
            if low < -SHOWN:
                axes.plot(-SHOWN, place, "<", color=colour, markersize=6)
    axes.axvspan(-1, 1, color="#DDDDDD", zorder=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(-SHOWN - 0.3, SHOWN + 0.3)
    axes.set_xlabel("difference from exact fp32, in margins (right is worse)")
    axes.legend(
        handles=[Line2D([], [], color=colour, marker="o", label=role) for role, colour in COLOURS.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return len(labels)


def draw_rates(axes: Axes, tally: Tally) -> None:
    """Draw the held-out loss at each learning rate: every seed, and the mean over the seeds that both have."""
    exact, ours = tally.row.contenders[:2]
    seeds = sorted(tally.by_seed[exact.name].keys() & tally.by_seed[ours.name].keys())
    for contender, curve in ((exact, CURVES[0]), (ours, CURVES[-1])):
        by_rate = [
            [run["loss"] for seed in seeds for run in tally.by_seed[contender.name][seed] if run["lr"] == rate]
            for rate in tally.row.rates
        ]
        for losses in zip(*by_rate, strict=True):
            axes.plot(tally.row.rates, losses, color=curve["color"], alpha=0.2, linewidth=0.8)
        means = [fmean(losses) if losses else math.nan for losses in by_rate]
        axes.plot(tally.row.rates, means, label=contender.name, **curve)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tally.row.rates, [f"{rate:.2g}" for rate in tally.row.rates], rotation=30)
    axes.minorticks_off()
    axes.set_title(f"{tally.row.name}, {len(seeds)} seeds", loc="left", fontsize=11)
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("held-out loss, nats")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def draw_curves(axes: Axes, tally: Tally) -> None:
    """Draw the training losses of the exact optimizer and ours, the mean over the seeds that both have."""
    row = tally.row
    exact, ours = row.contenders[:2]
    seeds = sorted(tally.by_seed[exact.name].keys() & tally.by_seed[ours.name].keys())
    for contender, curve in ((exact, CURVES[0]), (ours, CURVES[-1])):
        curves = [run["curve"] for seed in seeds for run in tally.by_seed[contender.name][seed]]
        means = [fmean(losses) for losses in zip(*curves, strict=True)]
        steps = [row.schedule.steps * (point + 0.5) / len(means) for point in range(len(means))]
        axes.plot(steps, means, label=contender.name, **curve)
    axes.set_title(f"{row.name}, {len(seeds)} seeds", loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def side_by_side(tallies: Sequence[Tally], draw_one: Callable[[Axes, Tally], None], path: Path) -> None:
    """Write a picture with one part for each row."""
    figure, places = plt.subplots(
        1, len(tallies), figsize=(4.6 * len(tallies), 3.6), layout="constrained", squeeze=False
    )
    for place, tally in zip(places.flat, tallies, strict=True):
        draw_one(place, tally)
    write(figure, path)


def draw_all_intervals(tallies: Sequence[Tally], path: Path) -> None:
    """Write the picture of all intervals, as high as it has lines."""
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    figure.set_size_inches(9, 1.4 + 0.24 * max(draw_intervals(axes, tallies), 4))
    write(figure, path)


def draw(tallies: Sequence[Tally], folder: Path) -> None:
    """Write the pictures that have something to show, and remove those that have not."""
    for name, shown in pictured(tallies).items():
        path = folder / name
        if not shown:
            path.unlink(missing_ok=True)
        elif name == "quality.png":
            draw_all_intervals(shown, path)
        else:
            side_by_side(shown, draw_rates if name == "quality-rates.png" else draw_curves, path)
