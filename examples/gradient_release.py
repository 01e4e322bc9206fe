"""Gradient release beside ordinary training, both clipped: the same losses, and the memory of one step.

`python examples/gradient_release.py --out release.png` draws that memory, with torch's fp32 AdamW.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.transformer import Plan, Shape, batches, loss_of, new_model, standard_library
from flashopt_compile import FlashAdamW, enable_gradient_release

PLAN = Plan(steps=4, batch=4, lr=1e-3, warmup=2, shape=Shape(width=256, layers=12, heads=4, context=32))
CLIP = 1.0
Trace = list[tuple[float, float]]  # how far a step has got, and the bytes per parameter that exist then


@dataclass
class Run:
    """A model in training, and what exists of it during its last step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]
    trace: Trace
    arrived: int = 0  # elements whose gradient is complete

    def note(self, progress: float) -> None:
        """Note how many bytes of weights, gradients and states exist now."""
        weights = list(self.model.parameters())
        grads = [each.grad for each in weights if each.grad is not None]
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        elements = sum(each.numel() for each in weights)
        self.trace.append((progress, sum(each.nbytes for each in (*weights, *grads, *states)) / elements))

    def gradient_is_complete(self, parameter: Tensor) -> None:
        self.arrived += parameter.numel()
        self.note(self.arrived)

    @property
    def peak_of_gradients(self) -> float:
        """Bytes per parameter that a step needs beside what exists before it."""
        return max(held for _, held in self.trace) - self.trace[0][1]


def run(kind: Any, dtype: torch.dtype, clip_mode: str = "") -> Run:
    """Train, with gradients released if there is a way of clipping them."""
    model = new_model(PLAN.shape, seed=0).to(dtype)
    optimizer = kind(model.parameters(), lr=PLAN.lr)
    found = Run(model, optimizer, [], [])
    for parameter in model.parameters():
        # Before release is enabled, so that gradients are seen before they are freed.
        parameter.register_post_accumulate_grad_hook(found.gradient_is_complete)
    if clip_mode:
        handle = enable_gradient_release(model, optimizer, clip_norm=CLIP, clip_mode=clip_mode)
    for batch in batches(standard_library().training, PLAN, PLAN.steps, seed=0):
        found.trace.clear()
        found.arrived = 0
        found.note(0)
        loss = loss_of(model, batch)
        if clip_mode:
            handle.backward(loss)  # in place of loss.backward() and clip_grad_norm_
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.note(1.05 * found.arrived)
        optimizer.zero_grad()
        found.note(1.1 * found.arrived)
        found.losses.append(loss.item())
    return found


def draw(runs: dict[str, Run], path: Path) -> None:
    """Draw what exists over one step, a curve for each optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, found), colour in zip(runs.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        end = found.trace[-1][0]
        progress, held = zip(*((place / end, each) for place, each in found.trace), strict=True)
        progress, held = (-0.35, *progress, 1.1), (held[0], *held, held[-1])
        axes.fill_between(progress, held, step="post", color=colour, alpha=0.12)
        axes.step(progress, held, where="post", color=colour, linewidth=2)
        label, is_last = f"{name}: {max(held):.1f} bytes at most", found is list(runs.values())[-1]
        place = (0.88, held[0] - 0.25) if is_last else (0.88, max(held) + 0.25)
        vertical = "top" if is_last else "bottom"
        axes.text(*place, label, color=colour, fontsize=11, weight="bold", ha="right", va=vertical)
    for place, phase in ((-0.17, "forward"), (0.45, "backward"), (1.0, "step,\nzero_grad")):
        axes.text(place, -0.5, phase, ha="center", va="top", fontsize=10)
    axes.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
    axes.axvline(1 / 1.1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlim=(-0.35, 1.1), ylim=(0, 18), xticks=[], ylabel="bytes per parameter")
    axes.set_title("Weights, states and gradients over one training step", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write a picture of memory over one step")
    out = parser.parse_args().out
    kept = run(FlashAdamW, torch.bfloat16)
    exact, previous = (run(FlashAdamW, torch.bfloat16, mode) for mode in ("exact", "previous"))
    print("step        kept   released, exact   released, previous")
    for step, each in enumerate(zip(kept.losses, exact.losses, previous.losses, strict=True), start=1):
        print(f"{step:4}    {each[0]:8.4f} {each[1]:17.4f} {each[2]:20.4f}")
    for name, found in {"kept": kept, "released, exact": exact, "released, previous": previous}.items():
        print(f"gradients {name}: {found.peak_of_gradients:.2f} bytes per parameter at most")
    furthest = max(abs(a - b) for a, b in zip(kept.losses, exact.losses, strict=True))
    print(f"losses differ by {furthest:.1e} at most, clipped exactly")
    assert furthest < 1e-3, "the same steps"
    assert max(exact.peak_of_gradients, previous.peak_of_gradients) < kept.peak_of_gradients / 4
    if out:
        fp32 = run(torch.optim.AdamW, torch.float32)
        draw({"AdamW in fp32": fp32, "FlashAdamW": kept, "FlashAdamW, gradients released": previous}, out)
