"""The demo's picture: two loss curves, their difference, and the bytes per parameter."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

matplotlib.use("Agg")

# After Okabe and Ito: distinct for every kind of colour vision. Dark text is legible on PART_COLOURS.
CURVE_COLOURS = ("#0072B2", "#D55E00")
PART_COLOURS = ("#56B4E9", "#A6D8F3", "#C4C4C4", "#4DBB9D", "#E69F00", "#F0E442")
INK = "#222222"
SMOOTHED_STEPS = 15
WIDTH = 0.8  # of a bar
THIN = 0.4  # bytes: smaller parts are labelled beside the bar

Losses = Mapping[str, Sequence[Sequence[float]]]
Bytes = Mapping[str, Mapping[str, float]]


def smooth(values: np.ndarray) -> np.ndarray:
    """The centred mean of SMOOTHED_STEPS values; fewer at the ends."""
    window = np.ones(SMOOTHED_STEPS)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def draw_losses(axes: Axes, losses: Losses) -> None:
    """Draw for each optimizer the loss of every seed, faint, and their smoothed mean."""
    widths, dashes = (3.0, 1.6), ("-", (0, (4, 2)))
    for (name, runs), colour, width, dash in zip(losses.items(), CURVE_COLOURS, widths, dashes, strict=True):
        steps = np.arange(1, len(runs[0]) + 1)
        for run in runs:
            axes.plot(steps, run, color=colour, alpha=0.25, linewidth=0.8)
        mean = smooth(np.mean(runs, axis=0))
        axes.plot(steps, mean, color=colour, label=name, linewidth=width, linestyle=dash)
    axes.set_ylabel("training loss, nats per byte")
    axes.legend(frameon=False, fontsize=10)
    axes.tick_params(labelbottom=False)


def draw_difference(axes: Axes, losses: Losses) -> None:
    """Draw the second optimizer's loss minus the first's for each batch."""
    exact, ours = (np.array(runs) for runs in losses.values())
    steps = np.arange(1, exact.shape[1] + 1)
    for difference in ours - exact:
        axes.plot(steps, difference, color=INK, alpha=0.6, linewidth=0.8)
    axes.axhline(0, color=INK, linewidth=0.8)
    reach = max(0.1, 1.1 * np.abs(ours - exact).max())
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("difference")
    axes.set_xlabel("step")


def draw_bytes(axes: Axes, sizes: Bytes) -> None:
    """Draw one stacked bar for each optimizer. Every part is labelled with its bytes."""
    for place, parts in enumerate(sizes.values()):
        bottom = 0.0
        for (part, size), colour in zip(parts.items(), PART_COLOURS, strict=True):
            if size < 0.005:
                continue
            axes.bar(place, size, WIDTH, bottom, color=colour, edgecolor="white", linewidth=1)
            beside = size < THIN
            where = place + WIDTH / 2 + 0.03 if beside else place, bottom + size / 2
            label = f"{part}  {size:.2f}".removesuffix(".00")
            axes.text(*where, label, ha="left" if beside else "center", va="center", fontsize=9, color=INK)
            bottom += size
        total = f"{bottom:.2f}".removesuffix(".00")
        axes.text(place, bottom + 0.2, total, ha="center", va="bottom", fontsize=13, weight="bold", color=INK)
    axes.set_xticks(range(len(sizes)), list(sizes), fontsize=10)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(sizes) - 0.2)
    axes.set_ylim(0, 17.5)
    axes.set_ylabel("bytes per parameter")


def draw(losses: Losses, sizes: Bytes, path: Path) -> None:
    """Write the picture to `path`."""
    figure = plt.figure(figsize=(12, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1), height_ratios=(3, 1))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above)
    bars = figure.add_subplot(grid[:, 1])
    draw_losses(above, losses)
    draw_difference(below, losses)
    draw_bytes(bars, sizes)
    for axes in (above, below, bars):
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title("The same training", loc="left", fontsize=12, weight="bold")
    bars.set_title("Less than half the memory", loc="left", fontsize=12, weight="bold")
    figure.align_ylabels([above, below])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
