"""A compiled training step beside the same loop uncompiled: the same losses, both times, and how many graphs.

`python examples/compiled_training.py`; it trains the demo's transformer, smaller.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.transformer import Plan, Shape, batches, new_model, standard_library
from flashopt_compile import FlashAdamW

PLAN = Plan(steps=12, batch=8, lr=2e-3, warmup=4, shape=Shape(width=64, layers=2, heads=2, context=32))
graphs = 0


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Inductor, counting what it compiles."""
    global graphs
    graphs += 1
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def train(model: nn.Module, optimizer: FlashAdamW, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run(step: Callable[..., Tensor]) -> tuple[list[float], list[float]]:
    """The losses of a run, and the time of each step in milliseconds."""
    model = new_model(PLAN.shape, seed=0).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), lr=PLAN.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PLAN.lr, total_steps=PLAN.steps + 1)
    losses, times_ms = [], []
    for batch in batches(standard_library().training, PLAN, PLAN.steps, seed=0):
        begin = time.perf_counter()
        losses.append(step(model, optimizer, batch).item())
        times_ms.append(1e3 * (time.perf_counter() - begin))
        schedule.step()
    return losses, times_ms


if __name__ == "__main__":
    compiled = torch.compile(train, backend=counting)
    found = {"uncompiled": run(train), "compiled": run(compiled)}
    print("step    " + "".join(f"{name:>12}" for name in found))
    for number, losses in enumerate(zip(*(losses for losses, _ in found.values()), strict=True), start=1):
        print(f"{number:4}    " + "".join(f"{loss:12.4f}" for loss in losses))
    for name, (_, times_ms) in found.items():
        print(f"{name}: first step {times_ms[0] / 1e3:.1f} s, later ones {median(times_ms[3:]):.1f} ms")
    furthest = max(abs(a - b) for a, b in zip(*(losses for losses, _ in found.values()), strict=True))
    print(f"{graphs} graphs in {PLAN.steps} steps under OneCycleLR; losses differ by {furthest:.4f} at most")
    assert furthest < 0.05, "a compiled model rounds its activations elsewhere, but not so far"
