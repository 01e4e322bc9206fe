"""The method in one run: exact fp32 AdamW and FlashAdamW train the same transformer on the same batches.

python -m bench.demo [--steps 300] [--seeds 1] [--out demo.png] [--checkpoint demo.ckpt]
"""

import os

# Waiting threads must not spin: on a busy machine they would take the core from the thread they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from tqdm import tqdm

from bench.demo_picture import draw
from bench.machine import describe_machine
from bench.transformer import Plan, held_out_loss, multiplies_bf16, new_model, standard_library, train
from flashopt_compile import FlashAdamW, save

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


CONTENDERS = (
    Contender("torch AdamW, fp32", torch.optim.AdamW, torch.float32),
    Contender("FlashAdamW, bf16", FlashAdamW, torch.bfloat16),
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


def bytes_per_parameter(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    elements = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
    parts: dict[str, float] = {part: 0.0 for part in PARTS}
    for name, size in bytes_by_tensor(optimizer).items():
        parts[PART_OF[name]] += size / elements
    return parts


def run(contender: Contender, plan: Plan, seed: int, checkpoint: Path | None = None) -> Run:
    """Train with one optimizer from one seed, showing progress. Save the result to `checkpoint`, if given."""
    result = Run()
    begin = time.perf_counter()
    model = new_model(plan.shape, seed).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), lr=plan.lr)  # pyright: ignore[reportCallIssue]
    pause = 0.2 if sys.stderr.isatty() else 15.0
    label = f"{contender.name:17} seed {seed}"
    with tqdm(total=plan.steps, desc=label, mininterval=pause, bar_format=BAR) as bar:
        bar.set_postfix_str("first step, compiles" if contender.optimizer is FlashAdamW else "")
        for progress in train(model, optimizer, plan, seed):
            result.losses.append(progress.loss)
            result.optimizer_seconds.append(progress.optimizer_seconds)
            bar.set_postfix_str(f"loss {progress.loss:.3f}", refresh=False)
            bar.update()
    result.held_out = held_out_loss(model, plan)
    result.seconds = time.perf_counter() - begin
    result.bytes_per_parameter = bytes_per_parameter(optimizer)
    if checkpoint is not None:
        save(checkpoint, model, optimizer, steps=plan.steps, seed=seed)
    return result


def figure(values: Sequence[float], digits: int) -> str:
    """The mean and, for several values, their standard deviation."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def table(runs: dict[str, list[Run]]) -> str:
    """The results of both optimizers, side by side."""
    columns = list(runs.values())
    rows: list[tuple[str, ...]] = [
        ("", *runs),
        (f"training loss, last {LAST} steps", *(figure([r.final for r in each], 4) for each in columns)),
        ("held-out loss", *(figure([r.held_out for r in each], 4) for each in columns)),
        ("bytes per parameter", *(f"{sum(each[0].bytes_per_parameter.values()):.2f}" for each in columns)),
    ]
    for part in PARTS:
        sizes = [each[0].bytes_per_parameter[part] for each in columns]
        rows.append((f"    {part}", *(f"{size:.2f}" if size >= 0.005 else "–" for size in sizes)))
    rows += [
        (
            "optimizer step, median ms",
            *(f"{1e3 * median(s for r in each for s in r.optimizer_seconds[1:]):.1f}" for each in columns),
        ),
        ("first step (compiles), s", *(f"{each[0].optimizer_seconds[0]:.1f}" for each in columns)),
        ("whole training, s", *(f"{fmean(r.seconds for r in each):.0f}" for each in columns)),
    ]
    return "\n".join(f"{label:30}" + "".join(f"{cell:>21}" for cell in cells) for label, *cells in rows)


def verdict(runs: dict[str, list[Run]]) -> str:
    """How far the held-out losses differ, and how far they may."""
    exact, ours = ([r.held_out for r in each] for each in runs.values())
    apart = fmean(ours) - fmean(exact)
    text = f"Held-out losses differ by {apart:+.4f} nats per byte."
    if len(exact) == 1:
        return f"{text} Expected is a difference within seed noise, ±0.02 or so; --seeds 3 measures it."
    noise = stdev(exact)
    agree = "within" if abs(apart) <= noise else "beyond"
    return f"{text} That is {agree} seed noise: exact AdamW varies by ±{noise:.4f} from seed to seed."


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description="Exact fp32 AdamW and FlashAdamW, side by side."
    )
    parser.add_argument("--steps", type=int, default=Plan.steps, help="steps of each training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each optimizer (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture to write (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="write FlashAdamW's checkpoint of the first seed here")
    options = parser.parse_args(arguments)
    if options.steps < LAST or options.seeds < 1:
        parser.error(f"steps is {options.steps}, seeds {options.seeds}; allowed are at least {LAST} and 1.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    begin = time.perf_counter()
    plan = Plan(steps=options.steps)
    parameters = sum(weight.numel() for weight in new_model(plan.shape, 0).parameters())
    print(describe_machine())
    print(
        f"A byte-level transformer of {parameters / 1e6:.2f} million parameters; "
        f"{len(standard_library().training) / 1e6:.1f} MB of the standard library's source; "
        f"{plan.steps} steps of {plan.batch} × {plan.shape.context} bytes."
    )
    if not multiplies_bf16():
        print("This processor is slow at bf16 matrices: bf16 weights are multiplied as fp32.")
    runs: dict[str, list[Run]] = {contender.name: [] for contender in CONTENDERS}
    for seed in range(options.seeds):
        for contender in CONTENDERS:
            kept = options.checkpoint if seed == 0 and contender.optimizer is FlashAdamW else None
            runs[contender.name].append(run(contender, plan, seed, kept))
    print(f"\n{table(runs)}\n\n{verdict(runs)}")
    draw(
        {name: [r.losses for r in each] for name, each in runs.items()},
        {name: each[0].bytes_per_parameter for name, each in runs.items()},
        options.out,
    )
    if options.checkpoint is not None:
        print(f"Checkpoint: {options.checkpoint}; try flashopt inspect {options.checkpoint}.")
    print(f"Picture: {options.out}. {time.perf_counter() - begin:.0f} s in all.")


if __name__ == "__main__":
    main()
