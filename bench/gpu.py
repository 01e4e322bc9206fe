"""A first run on a real GPU, in one command: `python -m bench gpu`.

It checks that steps give the CPU's results within the bound of docs/gpu.md, measures the memory that a step takes, and
races AdamW against torch's and other packages'. `--device cpu --quick` tries it out on tiny sizes.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import peers, speed
from bench.fresh import ROOT, chosen_device, extra_bytes, synchronize
from bench.peers import Contender, Shapes, resnet_shapes
from bench.speed import Comparison, race
from bench.speed_picture import draw
from bench.speed_rows import Goal, Row, table
from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD

# Shares of heads and codes that may differ from the CPU's after a step: the most that docs/gpu.md has of emitted
# kernels, 6 heads of 65,536 and 1 code of 1,000. Where a number lies next to a tie, other formulas decide otherwise.
MOST_HEADS, MOST_CODES = 1e-4, 1e-3
STEPS = 5
MIB = 2**20
RULES: dict[str, Callable[..., FlashOptimizer]] = {
    "AdamW": partial(FlashAdamW, **peers.ADAMW),
    "SGD": partial(FlashSGD, **peers.SGD),
    "Lion": partial(FlashLion, **peers.LION),
}
BF16_ADAMW = Contender(
    "torch AdamW, fused, all bf16",
    partial(peers.alone, lambda params: torch.optim.AdamW(params, fused=True, **peers.ADAMW)),
)


@dataclass(frozen=True)
class Sizes:
    """How much to measure, and with which shapes to compare."""

    equal: Shapes
    matrix: tuple[int, int]
    convolutions: int
    plan: speed.Plan


FULL = Sizes([(1024, 1024), (300, 1000), (64, 64), (16, 9), (7,)], (8192, 8192), 33, speed.Plan(seconds=6.0))
QUICK = Sizes([(288, 256), (64, 50), (7,)], (64, 128), 1, speed.QUICK)


def stepped(make: Callable[..., FlashOptimizer], shapes: Shapes, device: torch.device) -> FlashOptimizer:
    """An optimizer that has taken its last step on a device, and those before on the CPU: all start it alike."""
    random = torch.Generator().manual_seed(0)
    on_cpu = [nn.Parameter(torch.randn(shape, generator=random).mul(0.05).to(torch.bfloat16)) for shape in shapes]
    first = make(on_cpu)
    weights, optimizer = on_cpu, first
    for number in range(STEPS):
        if number == STEPS - 1:
            weights = [nn.Parameter(weight.detach().clone().to(device)) for weight in on_cpu]
            optimizer = make(weights)
            optimizer.load_state_dict(first.state_dict())
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random).mul(1e-2).to(torch.bfloat16).to(weight.device)
        optimizer.step()
    synchronize(device)
    return optimizer


def differences(ours: FlashOptimizer, theirs: FlashOptimizer) -> dict[str, float]:
    """Shares of heads and codes that differ, and by how much at most: heads in ulps, codes in steps."""
    heads: list[Tensor] = []
    codes: list[Tensor] = [torch.zeros(1)]
    for one, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(one["params"], other["params"], strict=True):
            heads.append((in_order(p.detach().cpu()) - in_order(q.detach().cpu())).abs().flatten())
            for key, state in ours.state[p].items():
                if key.endswith(".codes"):
                    codes.append((state.cpu().int() - theirs.state[q][key].cpu().int()).abs().flatten())
    found: dict[str, float] = {}
    for name, by in (("head", torch.cat(heads)), ("code", torch.cat(codes))):
        found[name] = (by > 0).double().mean().item()
        found[f"{name} by"] = by.max().item()
    return found


def in_order(weight: Tensor) -> Tensor:
    """16-bit floats as whole numbers: neighbours differ by one."""
    bits = weight.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def equality(sizes: Sizes, device: torch.device) -> list[Row]:
    """What share of weights and codes differs from the CPU's after a step from the same state."""
    rows = []
    for name, make in RULES.items():
        found = differences(stepped(make, sizes.equal, device), stepped(make, sizes.equal, torch.device("cpu")))
        for what, most in (("head", MOST_HEADS), ("code", MOST_CODES)):
            rows.append(
                Row(
                    f"{name}, {what}s that differ from the CPU's, per million",
                    goal=Goal("≤", 1e6 * most),
                    figure=1e6 * found[what],
                    unit="",
                    note=f"{name}, {what}s: those that differ do so by {found[f'{what} by']:.0f} at most",
                )
            )
    return rows


def memory(sizes: Sizes, device: torch.device) -> Row:
    """The memory that a step takes beside what is stored."""
    work, goal = f"AdamW, {sizes.matrix[0]}×{sizes.matrix[1]}, extra memory in a step", Goal("≤", 16.0)
    runner = peers.OUR_ADAMW.build([sizes.matrix], device)
    speed.warm_up(runner)
    runner.renew()
    extra = extra_bytes(runner.step, device)
    if extra is None:
        return Row(work, goal=goal, unit="MiB", note="skipped: this system does not tell a process's peak memory")
    return Row(work, goal=goal, figure=extra / MIB, unit="MiB")


def races(sizes: Sizes, device: torch.device) -> list[Row]:
    """AdamW against all others, on a matrix and on a ResNet's tensors. A peer that is not installed is skipped."""
    matrix, network = [sizes.matrix], resnet_shapes(sizes.convolutions)
    size, small = f"AdamW, {sizes.matrix[0]}×{sizes.matrix[1]}", f"AdamW, {len(network)} small tensors"
    others = (peers.FP32_ADAMW, BF16_ADAMW, peers.FOREACH_ADAMW, peers.FLASHOPTIM, peers.TORCHAO, peers.BITSANDBYTES)
    plan = [Comparison(size, matrix, peers.OUR_ADAMW, other, None) for other in others]
    plan += [Comparison(small, network, peers.OUR_ADAMW, other, None) for other in others[:4]]
    return [race(each, sizes.plan, device) for each in plan]


def name_of(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name()


def main(quick: bool = False, out: Path | None = None, device: str | None = None) -> None:
    """Measure and print; write gpu.json and gpu.png to `out`, by default to bench/results and docs/img."""
    chosen = torch.device(device) if device else chosen_device()
    if chosen.type == "cpu" and device is None:
        print("bench gpu: skipped, as there is no GPU here; --device cpu tries it out on the CPU")
        return
    sizes = QUICK if quick else FULL
    rows: list[Row] = []
    for part in (equality, memory, races):
        print(f"bench gpu: {part.__name__}", file=sys.stderr)
        found: Any = part(sizes, chosen)
        rows += [found] if isinstance(found, Row) else found
    report = {**speed.report(rows, sizes.plan, chosen), "quick": quick, "device": name_of(chosen)}
    print(f"{report['machine']}; {report['device']}\n\n{table(rows)}\n")
    if out is None and (quick or chosen.type == "cpu"):
        out = ROOT / ".cache" / "bench"  # a trial's figures never replace the published ones
    results, picture = (out, out) if out else (ROOT / "bench" / "results", ROOT / "docs" / "img")
    for folder in (results, picture):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False, default=str)
    (results / "gpu.json").write_text(text + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):  # without matplotlib there is no picture
        draw(rows, f"{report['device']}; {report['machine']}", picture / "gpu.png")
    missed: Sequence[str] = [row.work for row in rows if row.has_passed is False]
    if missed:
        raise SystemExit(f"bench gpu: missed: {'; '.join(missed)}")
