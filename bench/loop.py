"""The training loop and the schedule that all comparisons use."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Schedule:
    """The learning rate rises for `warmup` steps, then falls along a cosine to a tenth of its peak."""

    steps: int = 300
    lr: float = 4e-3
    warmup: int = 30

    def lr_factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class Progress:
    """One training step: its loss, and the seconds `optimizer.step()` took."""

    loss: float
    optimizer_seconds: float


def multiplies_bf16() -> bool:
    """True if bf16 matrices multiply as fast as fp32 ones. Without AVX-512 they take eight times longer."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def outputs_of(model: nn.Module, *inputs: Tensor) -> Any:
    """The model's outputs, computed in the dtype of its weights, which floating-point inputs are cast to.

    Where `multiplies_bf16` is false, fp32 copies are used.
    """
    weights = {} if multiplies_bf16() else {name: weight.float() for name, weight in model.named_parameters()}
    dtype = torch.float32 if weights else next(model.parameters()).dtype
    cast = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    return functional_call(model, weights, cast)


def follow(
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
) -> Iterator[Progress]:
    """Step on each batch, yielding afterwards. The last step's gradients stay in the model."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.lr_factor)
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        begin = time.perf_counter()
        optimizer.step()
        seconds = time.perf_counter() - begin
        scheduler.step()
        yield Progress(loss.item(), seconds)
