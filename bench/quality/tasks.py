"""What is trained: models and data, made from a seed alone.

Two contenders with the same seed see the same initial weights and the same batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.loop import Schedule, follow, outputs_of
from bench.transformer import Plan, batches, held_out_loss, loss_of, new_model, standard_library

MEASURED_AT_ONCE = 256  # examples


class Task(Protocol):
    """Something to train and to measure."""

    @property
    def about(self) -> str:
        """The model and the data, for readers."""
        ...

    def model(self, seed: int) -> nn.Module:
        """An fp32 model to begin with."""
        ...

    def batches(self, steps: int, seed: int) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The held-out `loss`, and the share of `errors` if there are right answers."""
        ...


class Examples(NamedTuple):
    """Inputs and their classes."""

    inputs: Tensor
    classes: Tensor


class Labelled(NamedTuple):
    """Examples to train on, and others to measure on."""

    training: Examples
    held_out: Examples


def divided(inputs: Tensor, classes: Tensor, every: int = 4) -> Labelled:
    """Shuffle the examples, always alike, and hold out one of `every`."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, classes = inputs[order], classes[order]
    held_out = torch.arange(len(inputs)) % every == 0
    return Labelled(Examples(inputs[~held_out], classes[~held_out]), Examples(inputs[held_out], classes[held_out]))


@dataclass(frozen=True)
class Classify:
    """Learn the classes of examples, `batch` of them at a time, drawn anew in each step."""

    about: str
    build: Callable[[], nn.Module]
    data: Callable[[], Labelled]
    batch: int = 64

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build()

    def batches(self, steps: int, seed: int) -> Iterator[Examples]:
        inputs, classes = self.data().training
        random = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(inputs), (self.batch,), generator=random)
            yield Examples(inputs[chosen], classes[chosen])

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return F.cross_entropy(outputs_of(model, batch.inputs).float(), batch.classes)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        inputs, classes = self.data().held_out
        logits = torch.cat([outputs_of(model, each).float() for each in inputs.split(MEASURED_AT_ONCE)])
        wrong = logits.argmax(-1) != classes
        return {"loss": F.cross_entropy(logits, classes).item(), "errors": wrong.float().mean().item()}


@dataclass(frozen=True)
class Continue:
    """Go on with other data from a model that was trained in fp32 with torch's AdamW; the same for all contenders."""

    before: Classify
    then: Classify
    schedule: Schedule

    @property
    def about(self) -> str:
        return f"{self.before.about}; then {self.then.about}"

    def model(self, seed: int) -> nn.Module:
        model = self.before.model(seed)
        model.load_state_dict(trained(self, seed))
        return model

    def batches(self, steps: int, seed: int) -> Iterator[Examples]:
        return self.then.batches(steps, seed)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return self.then.loss(model, batch)

    def measure(self, model: nn.Module) -> dict[str, float]:
        return self.then.measure(model)


@cache
def trained(task: Continue, seed: int) -> dict[str, Tensor]:
    """The weights after the first training."""
    model = task.before.model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.schedule.lr)
    given = task.before.batches(task.schedule.steps, seed)
    for _ in follow(optimizer, task.schedule, given, lambda batch: task.before.loss(model, batch)):
        pass
    return model.state_dict()


@dataclass(frozen=True)
class NextByte:
    """Learn the standard library's source, byte by byte. The plan's steps and learning rate are not used."""

    plan: Plan
    measured: int = 40  # batches

    @property
    def about(self) -> str:
        shape = self.plan.shape
        with torch.device("meta"):
            elements = sum(weight.numel() for weight in new_model(shape, 0).parameters())
        return (
            f"GPT of {elements / 1e6:.2f} million parameters ({shape.layers} layers of {shape.width}) on bytes of the "
            f"standard library's source, {self.plan.batch} × {shape.context} in a batch"
        )

    def model(self, seed: int) -> nn.Module:
        return new_model(self.plan.shape, seed)

    def batches(self, steps: int, seed: int) -> Iterator[Tensor]:
        return batches(standard_library().training, self.plan, steps, seed)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model, batch)

    def measure(self, model: nn.Module) -> dict[str, float]:
        return {"loss": held_out_loss(model, self.plan, self.measured)}
