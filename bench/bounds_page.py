"""Write docs/bounds.md and its picture from the findings of `bench.proof`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch

from bench.findings import CHECKS, Findings, Relative
from quant.bounds import GROUPS, grouped_bound, mean_error, split_bound

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"


class Curve(NamedTuple):
    """How to draw a format. Ours use Okabe and Ito's colours, which colour-blind readers can tell apart."""

    color: str
    style: str = "-"
    width: float = 2.6
    label_at: tuple[float, float] | None = None  # exponent and error at which to write the name


CURVES = {
    "bf16 + int8": Curve("#0072B2", label_at=(88, 1.0e-5)),
    "bf16 + int16": Curve("#CC79A7", label_at=(88, 6.3e-8)),
    "fp16 + int8": Curve("#D55E00", label_at=(0, 1.25e-6)),
    "fp16 + int16": Curve("#009E73", label_at=(-45, 1.25e-6)),
    "plain bf16": Curve("#303030", "--", 1.8, label_at=(88, 5.5e-3)),
    "bf16 + 8 raw low bits": Curve("#707070", "--", 1.8, label_at=(88, 4.4e-5)),
    "bf16 + 16 raw low bits": Curve("#A0A0A0", "--", 1.8),
}

PAGE = """\
<!-- Written by `make proof` (python -m bench.proof). Do not edit. -->
# Error bounds

Every format has a worst error that is derived, not measured: [quant/bounds.py](../quant/bounds.py) holds
it as a sympy expression. This page compares it with the worst error found by trying
{coverage}.

## Split weights

A weight is a correctly rounded 16-bit `head` and an integer `tail`. Rounding leaves at most half an ulp
of the head, and the tail divides that half into L = 127 or 32767 codes, so the nearest code is off by at
most ulp(head)/4L; forming the result in fp32 rounds once more. Errors are in units of ulp(head), the
distance between neighbouring 16-bit values: 2⁻⁷ of a bf16 value's power of two, 2⁻¹⁰ of an fp16 value's.

{splits}

"Tightness" is the largest ratio of an error to the bound for its exponent. "Exact" is the share of all finite
fp32 values that come back bit for bit; fp16 heads hold only {in_fp16_range:.1%} of these values at full
precision (2⁻¹⁴ to 65520).

![Worst relative error of each format, binade by binade](img/bounds.png)

bf16 heads keep fp32's range, with one relative error everywhere except in the subnormals. fp16 heads are
eight times finer, lose precision below 2⁻¹⁴ and overflow at 65520, like the fp16 parameters they are.
The raw low bits in the picture belong to a *truncated* head: 16 of them are lossless and 8 are half as
precise as an int8 tail, but the 16-bit parameter that the model computes with is then off by up to a
whole ulp instead of half of one.

These checks ran with torch.compile's default options. The violations are those of all formats together:

{checks}

Pairs are all finite heads with all tails from −L to L. None overflows: half an ulp above the largest
head is still finite in fp32. Decoded values rise with the tail, strictly so for int8 tails; neighbouring
codes of int16 tails may be closer than fp32 can resolve.

## Companded groups

A group's values are stored as 8-bit codes of φ(x/scale) and a bf16 scale. The inverse ψ decodes them. The
worst error is the largest change of ψ over half a code (nearest) or a whole one (dither), as a share of
the scale.

{groups}

Dithered rounding has the larger worst error, and a mean error of {mean}.
"""


def title(found: Findings) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.int16: "int16"}
    return f"{names[found.format.head]} + {names[found.format.tail]}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table. The first `left` columns are text, the others figures."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def derived_in_ulps(found: Findings) -> float:
    """The bound in the worst case: an input whose fp32 ulp is the largest fraction of its head's ulp."""
    share = torch.finfo(torch.float32).eps / torch.finfo(found.format.head).eps
    return split_bound(found.format).number(ulp_head=1.0, ulp_fp32=share)


def in_fp16_range() -> float:
    """The share of finite fp32 values between fp16's smallest normal value and its overflow."""
    ends = torch.tensor([torch.finfo(torch.float16).smallest_normal, 65520.0]).view(torch.int32)
    return (ends[1] - ends[0]).item() / (255 * 2**23)


def split_table(findings: Sequence[Findings]) -> str:
    header = (
        "format",
        "bytes",
        "worst error, derived",
        "worst error, seen",
        "tightness",
        "exact",
        "violations",
    )
    rows = [
        (
            title(found),
            f"{split_bound(found.format).bytes}",
            f"{derived_in_ulps(found):.4g}",
            f"{found.worst_in_ulps:.4g}",
            f"{found.tightness:.1%}",
            f"{found.exact / found.finite:.2%}",
            f"{found.total_violations:,}",
        )
        for found in findings
    ]
    return markdown(header, rows)


def check_table(findings: Sequence[Findings]) -> str:
    rows = [(check, f"{sum(found.violations[check] for found in findings):,}") for check in CHECKS]
    return markdown(("check", "violations"), rows)


def group_table() -> str:
    rows = []
    for format in GROUPS:
        nearest, dither = (grouped_bound(format, rounding) for rounding in ("nearest", "dither"))
        worst = (f"{bound.number(scale=1.0):.4%}" for bound in (nearest, dither))
        rows.append((nearest.format, f"φ(x) = `{format.compander.expression}`", f"{nearest.bytes:.4g}", *worst))
    return markdown(("format", "compander", "bytes", "worst error, nearest", "worst error, dither"), rows, left=2)


def coverage(findings: Sequence[Findings]) -> str:
    inputs, pairs = findings[0].inputs, sum(found.pairs for found in findings)
    which = "all 2³² fp32 values" if inputs == 2**32 else f"a sample of {inputs:,} fp32 values"
    return f"{which} in each split format, and {pairs:,} (head, tail) pairs"


def write_page(findings: Sequence[Findings], others: dict[str, Relative], docs: Path = DOCS) -> None:
    """Write docs/bounds.md and docs/img/bounds.png."""
    page = PAGE.format(
        coverage=coverage(findings),
        splits=split_table(findings),
        checks=check_table(findings),
        groups=group_table(),
        in_fp16_range=in_fp16_range(),
        mean=mean_error(),
    )
    (docs / "img").mkdir(parents=True, exist_ok=True)
    (docs / "bounds.md").write_text(page, encoding="utf-8")
    draw({title(found): found.relative for found in findings} | others, docs / "img" / "bounds.png")


def draw(found: dict[str, Relative], path: Path) -> None:
    """Draw the worst relative error by exponent and, below it, the binades that come back exactly."""
    plt.rcParams.update({"font.size": 12})
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(11, 7.4), height_ratios=(4, 1.3), layout="constrained"
    )
    for row, (name, curve) in enumerate(CURVES.items()):
        draw_errors(above, name, curve, found[name])
        draw_exact(below, row, curve, found[name])
    draw_overflow(above, 16)
    above.set_yscale("log")
    above.set_ylim(2e-8, 2)
    above.set_ylabel("worst relative error in the binade")
    above.set_title("What comes back of an fp32 value, by its magnitude", loc="left", fontweight="bold")
    above.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    below.set_title("exact: every value of the binade comes back bit for bit", loc="left", fontsize=12)
    below.set_yticks(range(len(CURVES)), list(CURVES), fontsize=10)
    for label, curve in zip(below.get_yticklabels(), CURVES.values(), strict=True):
        label.set_color(curve.color)
    below.set_ylim(len(CURVES) - 0.4, -0.6)
    below.set_xlim(-150, 129)
    below.set_xticks(range(-144, 129, 16), [f"$2^{{{exponent}}}$" for exponent in range(-144, 129, 16)])
    below.set_xlabel("|w|")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_errors(axes: Axes, name: str, curve: Curve, found: Relative) -> None:
    exponents = sorted(found)
    errors = [found[exponent] or float("nan") for exponent in exponents]
    axes.plot(exponents, errors, color=curve.color, linestyle=curve.style, linewidth=curve.width)
    if curve.label_at:
        axes.text(*curve.label_at, name, color=curve.color, ha="center", va="center", fontweight="bold")


def draw_overflow(axes: Axes, exponent: int) -> None:
    """Mark the exponent at which a head overflows to ±Inf."""
    axes.plot([exponent, exponent], [1e-8, 8e-7], color="#909090", linewidth=1, linestyle=":")
    axes.text(exponent + 2, 4.5e-7, "fp16 heads overflow at 65520", color="#606060", va="center", fontsize=11)


def draw_exact(axes: Axes, row: int, curve: Curve, found: Relative) -> None:
    exact = [exponent for exponent, error in found.items() if error == 0]
    axes.barh(row, 1.0, left=[each - 0.5 for each in exact], height=0.62, color=curve.color)
