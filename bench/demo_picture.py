"""The demo's pictures: loss curves, how far they lie from the exact one, and the bytes per parameter."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

matplotlib.use("Agg")

# After Okabe and Ito: distinct for every kind of colour vision. Dark text is legible on PART_COLOURS.
CURVES = (
    {"color": "#0072B2", "linewidth": 3.0, "linestyle": "-"},
    {"color": "#999999", "linewidth": 1.8, "linestyle": (0, (1, 1))},
    {"color": "#D55E00", "linewidth": 1.6, "linestyle": (0, (4, 2))},
)
PART_COLOURS = ("#56B4E9", "#A6D8F3", "#C4C4C4", "#4DBB9D", "#E69F00", "#F0E442")
INK = "#222222"
SMOOTHED_STEPS = 15
WIDTH = 0.5  # of a bar
THIN = 0.4  # bytes: no room for a label inside

Losses = Mapping[str, Sequence[Sequence[float]]]
Bytes = Mapping[str, Mapping[str, float]]


def smooth(values: np.ndarray) -> np.ndarray:
    """The centred mean of SMOOTHED_STEPS values; fewer at the ends."""
    window = np.ones(SMOOTHED_STEPS)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def draw_losses(axes: Axes, losses: Losses) -> None:
    """Draw for each optimizer the loss of every seed, faint, and their smoothed mean."""
    for (name, runs), curve in zip(losses.items(), CURVES, strict=True):
        steps = np.arange(1, len(runs[0]) + 1)
        for run in runs:
            axes.plot(steps, run, color=curve["color"], alpha=0.2, linewidth=0.8)
        axes.plot(steps, smooth(np.mean(runs, axis=0)), label=name, **curve)
    axes.set_ylabel("training loss, nats per byte")
    axes.legend(frameon=False, fontsize=10)
    axes.tick_params(labelbottom=False)


def draw_difference(axes: Axes, losses: Losses) -> None:
    """Draw each further optimizer's loss minus the first's, batch by batch, smoothed, in the mean of all seeds."""
    exact, *others = (np.array(runs) for runs in losses.values())
    steps, reach = np.arange(1, exact.shape[1] + 1), 0.05
    axes.axhline(0, color=CURVES[0]["color"], linewidth=1.6)
    for runs, curve in zip(others, CURVES[1:], strict=True):
        difference = smooth((runs - exact).mean(axis=0))
        axes.plot(steps, difference, **curve)
        reach = max(reach, 1.1 * np.abs(difference).max())
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("minus fp32")
    axes.set_xlabel("step")


def draw_bytes(axes: Axes, sizes: Bytes) -> None:
    """Draw one stacked bar for each optimizer, its name and total above it. Wide parts show their bytes."""
    for place, (name, parts) in enumerate(sizes.items()):
        left = 0.0
        for (_, size), colour in zip(parts.items(), PART_COLOURS, strict=True):
            axes.barh(place, size, WIDTH, left, color=colour, edgecolor="white", linewidth=1)
            if size >= THIN:
                label = f"{size:.1f}".removesuffix(".0")
                axes.text(left + size / 2, place, label, ha="center", va="center", fontsize=9, color=INK)
            left += size
        above = place - WIDTH / 2 - 0.06
        axes.text(0, above, name, ha="left", va="bottom", fontsize=10, color=INK)
        total = f"{left:.2f}".removesuffix(".00")
        axes.text(left + 0.15, place, total, ha="left", va="center", fontsize=13, weight="bold", color=INK)
    used = [part for part in next(iter(sizes.values())) if any(parts[part] >= 0.005 for parts in sizes.values())]
    colours = dict(zip(next(iter(sizes.values())), PART_COLOURS, strict=True))
    patches = [Patch(color=colours[part], label=part) for part in used]
    axes.legend(
        handles=patches,
        ncols=3,
        frameon=False,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(-0.03, -0.12),
        columnspacing=1,
        handlelength=1.5,
    )
    axes.set_yticks([])
    axes.set_xlim(0, 18)
    axes.set_ylim(len(sizes) - 1 + WIDTH, -0.7)
    axes.set_xlabel("bytes per parameter")
    axes.spines["left"].set_visible(False)


def bare(figure: Figure, *axes: Axes) -> Figure:
    """Take away the frame's upper and right lines."""
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    return figure


def picture(losses: Losses, sizes: Bytes) -> Figure:
    """Everything side by side, for a page that is wide enough."""
    figure = plt.figure(figsize=(12, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.1, 1), height_ratios=(3, 1))
    above, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[:, 1])
    below = figure.add_subplot(grid[1, 0], sharex=above)
    draw_losses(above, losses)
    draw_difference(below, losses)
    draw_bytes(bars, sizes)
    above.set_title("The same training", loc="left", fontsize=12, weight="bold")
    bars.set_title("Less than half the memory", loc="left", fontsize=12, weight="bold")
    return bare(figure, above, below, bars)


def curves(losses: Losses) -> Figure:
    """The curves alone, as wide as a phone."""
    figure = plt.figure(figsize=(4.6, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 1))
    above = figure.add_subplot(grid[0])
    below = figure.add_subplot(grid[1], sharex=above)
    draw_losses(above, losses)
    draw_difference(below, losses)
    return bare(figure, above, below)


def bars(sizes: Bytes) -> Figure:
    """The bytes alone, as wide as a phone."""
    figure = plt.figure(figsize=(4.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    draw_bytes(axes, sizes)
    return bare(figure, axes)


def write(figure: Figure, path: Path) -> None:
    """Write a picture to `path`, and forget it."""
    figure.savefig(path, dpi=150)
    plt.close(figure)


def svg(figure: Figure) -> bytes:
    """Give a picture as SVG, and forget it."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()
