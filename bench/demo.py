"""The method in one run: AdamW in fp32, in bf16, and FlashAdamW train the same transformer on the same batches.

python -m bench.demo [--steps 300] [--seeds 1] [--out demo]
"""

import os

# Waiting threads must not spin: on a busy machine they would take the core from the thread they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from torch import nn
from tqdm import tqdm

from bench.demo_picture import picture, write
from bench.demo_report import Report
from bench.loop import multiplies_bf16
from bench.machine import describe_machine
from bench.transformer import Plan, Shape, held_out_loss, new_model, standard_library, train
from flashopt_compile import FlashAdamW, memory_plan, save

BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {elapsed}{postfix}"
LAST = 20  # the final loss is the mean over this many steps
PARTS = ("weight", "weight tail", "gradient", "first moment", "second moment", "scales")
# The optimizers' own names for their tensors, and the part each belongs to; step counts are a few bytes.
PART_OF = {
    **{"weight": "weight", "tail": "weight tail", "gradient": "gradient"},
    **dict.fromkeys(("m", "m.codes", "exp_avg"), "first moment"),
    **dict.fromkeys(("v", "v.codes", "exp_avg_sq"), "second moment"),
    **dict.fromkeys(("m.scales", "v.scales", "step"), "scales"),
}


@dataclass
class Run:
    """The results of one training."""

    losses: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    held_out: float = 0.0
    seconds: float = 0.0
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)

    @property
    def final(self) -> float:
        return fmean(self.losses[-LAST:])


@dataclass(frozen=True)
class Contender:
    """An optimizer to compare, and the dtype of its model."""

    name: str
    optimizer: type[torch.optim.Optimizer]
    dtype: torch.dtype


EXACT, PLAIN, OURS = "torch AdamW, fp32", "torch AdamW, pure bf16", "FlashAdamW"
RELEASED = "FlashAdamW, gradients released"
CONTENDERS = (
    Contender(EXACT, torch.optim.AdamW, torch.float32),
    Contender(PLAIN, torch.optim.AdamW, torch.bfloat16),
    Contender(OURS, FlashAdamW, torch.bfloat16),
)


def bytes_by_tensor(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes currently allocated for weights, gradients and each kind of state."""
    if isinstance(optimizer, FlashAdamW):
        return optimizer.memory()["parts"]
    counted: dict[str, int] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            tensors = {"weight": weight, "gradient": weight.grad, **optimizer.state[weight]}
            for name, tensor in tensors.items():
                counted[name] = counted.get(name, 0) + tensor.nbytes
    return counted


def bytes_per_parameter(counted: Mapping[str, int], elements: int) -> dict[str, float]:
    parts: dict[str, float] = {part: 0.0 for part in PARTS}
    for name, size in counted.items():
        parts[PART_OF[name]] += size / elements
    return parts


def planned_bytes(model: nn.Module) -> dict[str, float]:
    """What FlashAdamW takes if each gradient is used and freed during backward: planned, not trained here."""
    plan = memory_plan(model, FlashAdamW, release=True)
    return bytes_per_parameter(plan.parts, plan.parameters)


def run(contender: Contender, plan: Plan, seed: int, checkpoint: Path | None = None) -> Run:
    """Train with one optimizer from one seed, showing progress. Save the result to `checkpoint`, if given."""
    result = Run()
    begin = time.perf_counter()
    model = new_model(plan.shape, seed).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), lr=plan.lr)  # pyright: ignore[reportCallIssue]
    pause = 0.2 if sys.stderr.isatty() else 15.0
    label = f"{contender.name:22} seed {seed}"
    with tqdm(total=plan.steps, desc=label, mininterval=pause, bar_format=BAR) as bar:
        bar.set_postfix_str("first step, compiles" if contender.optimizer is FlashAdamW else "")
        for progress in train(model, optimizer, plan, seed):
            result.losses.append(progress.loss)
            result.optimizer_seconds.append(progress.optimizer_seconds)
            bar.set_postfix_str(f"loss {progress.loss:.3f}", refresh=False)
            bar.update()
    result.held_out = held_out_loss(model, plan)
    result.seconds = time.perf_counter() - begin
    elements = sum(weight.numel() for weight in model.parameters())
    result.bytes_per_parameter = bytes_per_parameter(bytes_by_tensor(optimizer), elements)
    if checkpoint is not None:
        save(checkpoint, model, optimizer, steps=plan.steps, seed=seed)
    return result


def figure(values: Sequence[float], digits: int) -> str:
    """The mean and, for several values, their standard deviation."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def sizes_of(runs: Mapping[str, list[Run]], shape: Shape) -> dict[str, dict[str, float]]:
    """Bytes per parameter by part: measured for each run, planned for released gradients."""
    sizes = {name: each[0].bytes_per_parameter for name, each in runs.items()}
    return {**sizes, RELEASED: planned_bytes(new_model(shape, 0).to(torch.bfloat16))}


def rows_of(runs: Mapping[str, list[Run]], sizes: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """The results of all optimizers, side by side, under a heading."""
    columns = [runs.get(name, []) for name in sizes]

    def row(label: str, cell: Callable[[list[Run]], str]) -> tuple[str, ...]:
        return label, *(cell(each) if each else "–" for each in columns)

    rows: list[tuple[str, ...]] = [
        ("", *sizes),
        row(f"training loss, last {LAST} steps", lambda each: figure([r.final for r in each], 4)),
        row("held-out loss", lambda each: figure([r.held_out for r in each], 4)),
        ("bytes per parameter", *(f"{sum(parts.values()):.2f}" for parts in sizes.values())),
    ]
    for part in PARTS:
        cells = [parts[part] for parts in sizes.values()]
        rows.append((f"    {part}", *(f"{size:.2f}" if size >= 0.005 else "–" for size in cells)))
    return [
        *rows,
        row(
            "optimizer step, median ms",
            lambda each: f"{1e3 * median(s for r in each for s in r.optimizer_seconds[1:]):.1f}",
        ),
        row("first step (compiles), s", lambda each: f"{each[0].optimizer_seconds[0]:.1f}"),
        row("whole training, s", lambda each: f"{fmean(r.seconds for r in each):.0f}"),
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows for a terminal; a heading is broken at its comma."""
    (_, *names), *others = rows
    halves = [name.partition(", ") for name in names]
    heads = [("", *(half[0] for half in halves)), ("", *(half[2] for half in halves))]
    return "\n".join(f"{label:30}" + "".join(f"{cell:>20}" for cell in cells) for label, *cells in [*heads, *others])


def verdict(runs: Mapping[str, list[Run]]) -> str:
    """How far the held-out losses differ from the exact one, and how far they may."""
    exact, plain, ours = ([r.held_out for r in runs[name]] for name in (EXACT, PLAIN, OURS))
    apart, theirs = fmean(ours) - fmean(exact), fmean(plain) - fmean(exact)
    text = (
        f"FlashAdamW's held-out loss differs from exact AdamW's by {apart:+.4f} nats per byte, pure bf16's by "
        f"{theirs:+.4f}."
    )
    if len(exact) == 1:
        return f"{text} From seed to seed, exact AdamW itself differs by 0.015 or so; --seeds 3 measures it."
    noise = stdev(exact)
    agree = "within" if abs(apart) <= noise else "beyond"
    return f"{text} Ours is {agree} seed noise: exact AdamW varies by ±{noise:.4f} from seed to seed."


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description="AdamW in fp32, in bf16, and FlashAdamW, side by side."
    )
    parser.add_argument("--steps", type=int, default=Plan.steps, help="steps of each training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each optimizer (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write to (%(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < LAST or options.seeds < 1:
        parser.error(f"steps is {options.steps}, seeds {options.seeds}; allowed are at least {LAST} and 1.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    begin = time.perf_counter()
    plan = Plan(steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, report = options.out / "demo.ckpt", options.out / "report.html"
    parameters = sum(weight.numel() for weight in new_model(plan.shape, 0).parameters())
    setting = (
        f"A byte-level transformer of {parameters / 1e6:.2f} million parameters; "
        f"{len(standard_library().training) / 1e6:.1f} MB of the standard library's source; "
        f"{plan.steps} steps of {plan.batch} × {plan.shape.context} bytes."
    )
    print(f"{describe_machine()}\n{setting}")
    if not multiplies_bf16():
        print("This processor is slow at bf16 matrices: bf16 weights are multiplied as fp32.")
    runs: dict[str, list[Run]] = {contender.name: [] for contender in CONTENDERS}
    for seed in range(options.seeds):
        for contender in CONTENDERS:
            kept = checkpoint if seed == 0 and contender.name == OURS else None
            runs[contender.name].append(run(contender, plan, seed, kept))
    sizes = sizes_of(runs, plan.shape)
    rows, losses = rows_of(runs, sizes), {name: [r.losses for r in each] for name, each in runs.items()}
    print(f"\n{table(rows)}\n\n{verdict(runs)}")
    write(picture(losses, sizes), options.out / "demo.png")
    content = Report(losses, sizes, rows, verdict(runs), (setting, describe_machine()), checkpoint)
    report.write_text(content.page(), encoding="utf-8")
    print(f"Checkpoint: {checkpoint}; try .venv/bin/flashopt inspect {checkpoint}.")
    print(f"Report: {report}; open it in a browser. {time.perf_counter() - begin:.0f} s in all.")


if __name__ == "__main__":
    main()
