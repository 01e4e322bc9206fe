"""python -m bench.roofline [--out PNG]: draw the modelled time per element of AdamW's kernel on each device.

Memory, issue and XU of our kernel, emitted and compiled here, beside the published hand-written kernel's and the time
that memory alone takes for fp32 and bf16 AdamW. It writes docs/img/roofline.png and prints docs/gpu.md's table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flashopt_compile.commands.table import table
from flashopt_compile.kernels import emit
from flashopt_compile.kernels.report import VERDICT_HEAD, Row, report
from flashopt_compile.kernels.roofline import DEVICES, FUSED_BF16, FUSED_FP32, Device, Verdict, verdict
from flashopt_compile.rules.adamw import adamw

matplotlib.use("Agg")

PICTURE = Path(__file__).parent.parent / "docs" / "img" / "roofline.png"
# Bytes, instructions and XU operations per element of the published kernel as it is launched (DESIGN, section 6).
PUBLISHED = {"sm_80": (12.25, 140.0, 22.0), "sm_90": (12.25, 142.0, 19.0), "sm_100": (12.25, 142.0, 20.0)}
COLOURS = {"memory": "#0072B2", "issue": "#E69F00", "XU": "#CC79A7"}  # after Okabe and Ito
INK = "#222222"
FAINT = "#707070"
HEIGHT = 0.19


def rows() -> list[Row]:
    """The report on AdamW's kernel for each target that a device has."""
    return [report(emit(adamw, target))[0] for target in dict.fromkeys(device.target for device in DEVICES)]


def published(device: Device) -> Verdict | None:
    """The verdict on the published kernel, where its instructions were counted."""
    return verdict(device, *PUBLISHED[device.target]) if device.target in PUBLISHED else None


def draw(ours: Sequence[Verdict], path: Path) -> None:
    """Write the picture: three bars for each device, and marks for the other optimizers."""
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.95 * len(ours)), layout="constrained")
    axes.set_xscale("log")
    for place, each in enumerate(ours):
        limits = {"memory": each.memory, "issue": each.issue, "XU": each.special}
        for number, (name, time) in enumerate(limits.items()):
            at = place + (number - 1) * (HEIGHT + 0.03)
            axes.barh(at, time, HEIGHT, color=COLOURS[name], label=name if place == 0 else None, zorder=2)
            weight = "bold" if name == each.bound_by else "normal"
            axes.text(time * 1.03, at, f"{time:.2f}", va="center", fontsize=9, weight=weight, color=INK, zorder=4)
        marks = {"fp32 fused AdamW, memory": ("|", FUSED_FP32), "bf16 AdamW, memory": (":", FUSED_BF16)}
        for name, (mark, moved) in marks.items():
            time = moved / each.device.bandwidth * 1e3
            style = "solid" if mark == "|" else "dotted"
            axes.vlines(time, place - 0.4, place + 0.4, color=INK, linestyle=style, label="" if place else name)
        if other := published(each.device):
            label = "published kernel, the slowest of its three" if place == 0 else None
            axes.plot(other.ps_per_element, place, "D", color="#009E73", markersize=7, label=label, zorder=5)
    axes.set_yticks(range(len(ours)), [f"{each.device.name}\nbound by {each.bound_by}" for each in ours], fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ours) - 0.4, -0.6)
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("picoseconds per element (log scale); the longest bar of a device sets its time", fontsize=11)
    axes.set_title(
        "AdamW, bf16 + 8 bits: a model of its time, not a measurement", loc="left", fontsize=13, weight="bold"
    )
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8, zorder=0)
    axes.legend(frameon=False, loc="lower right", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture (%(default)s)")
    options = parser.parse_args(arguments)
    found = rows()
    print(table([VERDICT_HEAD, *(cells for row in found for cells in row.verdict_cells())]))
    ours = [each for row in found for each in row.verdicts]
    others = [other for each in ours if (other := published(each.device))]
    print(
        table(
            [["published", "ps", "bound by"], *([o.device.name, f"{o.ps_per_element:.2f}", o.bound_by] for o in others)]
        )
    )
    draw(ours, options.out)


if __name__ == "__main__":
    main()
