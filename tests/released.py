"""Models and training loops for the tests of gradient release."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile import FlashAdamW, FlashOptimizer, enable_gradient_release

Made = tuple[nn.Module, FlashOptimizer]


class Net(nn.Module):
    """Matrices of several kinds, norms and biases, a tied weight, a frozen and an unused one."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 32)
        self.first = nn.Linear(32, 70)
        self.norm = nn.LayerNorm(70)
        self.second = nn.Linear(70, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(40, 40)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + self.second(torch.nn.functional.gelu(self.norm(self.first(h))))
        return self.head(self.frozen(h))


def batches(steps: int, size: int = 16, seed: int = 1) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, 50, (size,), generator=random)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), (x + 1) % 50)


def made(kind: Any = FlashAdamW, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Made:
    model = Net(dtype=dtype)
    return model, kind(model.parameters(), **{"lr": 1e-2, "eager": True, **options})


def train(
    model: nn.Module,
    optimizer: FlashOptimizer,
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
    steps: int = 4,
    before_step: Callable[[], Any] = lambda: None,
) -> None:
    """An ordinary loop, of which gradient release changes nothing."""
    for x in batches(steps):
        backward(loss_of(model, x))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def ordinary(kind: Any = FlashAdamW, clip_norm: float | None = None, steps: int = 4, **options: Any) -> Made:
    model, optimizer = made(kind, **options)

    def clip() -> None:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

    train(model, optimizer, steps=steps, before_step=clip)
    return model, optimizer


def released(kind: Any = FlashAdamW, steps: int = 4, release: Any = None, **options: Any) -> Made:
    model, optimizer = made(kind, **options)
    with enable_gradient_release(model, optimizer, **(release or {})) as handle:
        train(model, optimizer, handle.backward, steps=steps)
    return model, optimizer


def everything(made: Made) -> dict[str, Tensor]:
    """All weights and states by name."""
    model, optimizer = made
    return {
        f"{name} {key}": value.detach().clone()
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items()
    }


def assert_same(found: Made, expected: Made) -> None:
    one, other = everything(found), everything(expected)
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different, different
