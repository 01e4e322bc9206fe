"""Compare formats for AdamW's moments: the error of its updates on gradients of real and of hard runs.

python -m bench.states          prints the tables and writes docs/formats.md
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bench.machine import describe_machine
from bench.transformer import Plan, new_model, standard_library, train
from flashopt_compile.rules.adamw import adamw
from quant.compand import FOURTH_ROOT, SIGNED_ROOT, SOFTSIGN, SQUARE_ROOT, Compander, mu_law, root
from quant.format import Format, Raw
from quant.grouped import Grouped
from quant.ulp import STATE_NOISE_BITS

PAGE = Path(__file__).parent.parent / "docs" / "formats.md"
COUNTED_STEPS = 100  # at the end of a trace
QUADRATIC = Compander("quadratic 0.6", "sign(x) * (sqrt(9 + 40*Abs(x)) - 3) / 4")
MOMENTUM = tuple(Grouped(compander) for compander in (SOFTSIGN, QUADRATIC, mu_law(), SIGNED_ROOT))
VARIANCE = tuple(Grouped(compander, signed=False) for compander in (SQUARE_ROOT, root(3), FOURTH_ROOT, root(8)))
CHOSEN = dict(adamw.states)
NUMBERS = {
    "lr": torch.tensor(1.0),
    "betas": (torch.tensor(0.9), torch.tensor(0.999)),
    "eps": torch.tensor(1e-12),
    "weight_decay": torch.tensor(0.0),
}


@dataclass(frozen=True)
class Outcome:
    """The effect of storing AdamW's moments on its updates, and on v / exact v at the end."""

    update_error: float
    displacement: float
    v_median: float
    v_low: float
    v_high: float


def stored(format: Format, x: Tensor, rounding: str, random: torch.Generator) -> Tensor:
    if isinstance(format, Raw):
        return x
    noise = None
    if rounding == "dither":
        noise = torch.randint(2**STATE_NOISE_BITS, x.shape, generator=random, dtype=torch.int32)
    return format.decode(*format.encode(x, noise))


def follow(
    gradients: Iterable[Tensor], steps: int, m_format: Format, v_format: Format, roundings: tuple[str, str]
) -> Outcome:
    """Run AdamW's rule on a trace, storing the moments after every step, and compare with float64."""
    random = torch.Generator().manual_seed(0)
    m = v = exact_m = exact_v = torch.zeros(())
    moved = exact_moved = error = size = torch.zeros((), dtype=torch.float64)
    for t, g in enumerate(gradients, 1):
        m, v = m.expand(g.shape), v.expand(g.shape)
        exact_m, exact_v = exact_m.double().expand(g.shape), exact_v.double().expand(g.shape)
        time = torch.tensor(float(t))
        (_, by), m, v = adamw(torch.zeros_like(g), g, m, v, time, **NUMBERS)
        (_, exact_by), exact_m, exact_v = adamw(
            torch.zeros_like(g, dtype=torch.float64), g.double(), exact_m, exact_v, time, **NUMBERS
        )
        moved, exact_moved = moved + by, exact_moved + exact_by
        if t > steps - COUNTED_STEPS:
            error, size = error + ((by - exact_by) ** 2).sum(), size + (exact_by**2).sum()
        m, v = stored(m_format, m, roundings[0], random), stored(v_format, v, roundings[1], random)
    # The first element of each group is the outlier, if the trace has one. Judge the others.
    kept = slice(1, None)
    ratio = (v.double() / exact_v)[..., kept].flatten()
    low, median, high = ratio.nanquantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    displacement = moved[..., kept].norm() / exact_moved[..., kept].norm()
    return Outcome(float((error / size).sqrt()), float(displacement), median, low, high)


def hard_traces(groups: int = 32) -> dict[str, list[Tensor]]:
    """Gradients in groups of 32, made hard to store."""
    random = torch.Generator().manual_seed(1)

    def noise() -> Tensor:
        return torch.randn(groups, 32, generator=random)

    def with_first(g: Tensor, value: Tensor | float) -> Tensor:
        return torch.cat([torch.as_tensor(value).expand(groups, 1) * torch.ones(groups, 1), g[:, 1:]], 1)

    spread = (1.5 * noise()).exp()
    return {
        "stationary noise": [noise() for _ in range(1200)],
        "scales spread e^±1.5 in a group": [spread * (noise() + 0.2) for _ in range(1200)],
        "×0.1 after 500, steady maximum": [with_first(noise() * (1 if t < 500 else 0.1), 3.0) for t in range(1500)],
        "outlier 1000× its group": [with_first(1e-3 * g, g[:, :1]) for g in (noise() for _ in range(60))],
    }


def real_traces(steps: int = 300) -> dict[str, list[Tensor]]:
    """Gradients of three matrices of the demo's transformer, trained in fp32 with torch's AdamW."""
    plan = Plan(steps=steps, batch=8)
    model = new_model(plan.shape, seed=0)
    weights = dict(model.named_parameters())
    watched = {
        "trained: embedding": weights["bytes.weight"],
        "trained: attention": weights["blocks.1.qkv.weight"],
        "trained: perceptron": weights["blocks.1.down.weight"],
    }
    traces: dict[str, list[Tensor]] = {name: [] for name in watched}
    standard_library()
    progress = train(model, torch.optim.AdamW(model.parameters(), lr=plan.lr), plan, seed=0)
    for _ in tqdm(progress, total=steps, desc="training for traces", leave=False):
        for name, weight in watched.items():
            assert weight.grad is not None
            traces[name].append(weight.grad.detach().flatten()[: 256 * 32].view(-1, 32).clone())
    return traces


def name_of(format: Format) -> str:
    return format.compander.name if isinstance(format, Grouped) else "fp32"


def table(
    title: str, candidates: Sequence[tuple[str, Format, Format, tuple[str, str]]], traces: dict[str, list[Tensor]]
) -> str:
    """A Markdown table. Each candidate's row has its update error on each trace, worst v and displacement."""
    lines = [
        f"## {title}",
        "",
        "| format | rounding | " + " | ".join(traces) + " | worst v median | outlier's neighbours move |",
    ]
    lines.append("|---" * (len(traces) + 4) + "|")
    for name, m_format, v_format, roundings in tqdm(candidates, desc=title, leave=False):
        outcomes = {
            trace: follow(gradients, len(gradients), m_format, v_format, roundings)
            for trace, gradients in traces.items()
        }
        errors = " | ".join(f"{outcome.update_error:.3f}" for outcome in outcomes.values())
        worst = max((outcome.v_median for outcome in outcomes.values()), key=lambda median: abs(median - 1))
        neighbours = outcomes["outlier 1000× its group"].displacement
        lines.append(
            f"| {name} | {' / '.join(dict.fromkeys(roundings))} | {errors} | {worst:.2f} | {neighbours:.2f}× |"
        )
    return "\n".join(lines)


def main() -> None:
    print(describe_machine())
    traces = {**hard_traces(), **real_traces()}
    both = ("nearest", "dither")
    tables = [
        table(
            "Momentum, beside an exact variance",
            [(name_of(m), m, Raw(), (rounding, rounding)) for m in MOMENTUM for rounding in both],
            traces,
        ),
        table(
            "Variance, beside an exact momentum",
            [(name_of(v), Raw(), v, (rounding, rounding)) for v in VARIANCE for rounding in both],
            traces,
        ),
        table(
            "Both",
            [
                (
                    "softsign + square root (published)",
                    Grouped(SOFTSIGN),
                    Grouped(SQUARE_ROOT, signed=False),
                    ("nearest", "nearest"),
                ),
                ("softsign + fourth root", Grouped(SOFTSIGN), CHOSEN["v"], ("dither", "dither")),
                ("**signed root + fourth root**", CHOSEN["m"], CHOSEN["v"], ("dither", "dither")),
                ("signed root + eighth root", CHOSEN["m"], VARIANCE[3], ("dither", "dither")),
            ],
            traces,
        ),
    ]
    page = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- tables: python -m bench.states -->\n", "<!-- end of tables -->"
    before, rest = page.split(start)
    written = f"Measured on {describe_machine()}.\n\n" + "\n\n".join(tables)
    PAGE.write_text(before + start + written + "\n\n" + end + rest.split(end)[1], encoding="utf-8")
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
