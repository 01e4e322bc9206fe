"""Plain float64 steps, written from the papers and torch.optim's documentation, and the table of optimizers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW

State = dict[str, Tensor]
Oracle = Callable[..., Tensor]


def adam(w: Tensor, g: Tensor, state: State, t: int, *, lr, betas, eps, weight_decay) -> Tensor:
    """Algorithm 1 of Kingma & Ba (2015) with torch.optim.Adam's L2 penalty, which is added to the gradient."""
    return _adam_move(w, g + weight_decay * w, state, t, lr, betas, eps)


def adamw(w: Tensor, g: Tensor, state: State, t: int, *, lr, betas, eps, weight_decay) -> Tensor:
    """Algorithm 2 of Loshchilov & Hutter (2019) with the decay scaled by lr, as in torch.optim.AdamW."""
    return _adam_move(w - lr * weight_decay * w, g, state, t, lr, betas, eps)


def _adam_move(w: Tensor, g: Tensor, state: State, t: int, lr, betas, eps) -> Tensor:
    beta1, beta2 = betas
    state["m"] = beta1 * state["m"] + (1 - beta1) * g
    state["v"] = beta2 * state["v"] + (1 - beta2) * g**2
    m_hat = state["m"] / (1 - beta1**t)
    v_hat = state["v"] / (1 - beta2**t)
    return w - lr * m_hat / (v_hat**0.5 + eps)


def lion(w: Tensor, g: Tensor, state: State, t: int, *, lr, betas, weight_decay) -> Tensor:
    """Algorithm 2 of Chen et al. (2023)."""
    beta1, beta2 = betas
    update = torch.sign(beta1 * state["m"] + (1 - beta1) * g)
    state["m"] = beta2 * state["m"] + (1 - beta2) * g
    return w - lr * (update + weight_decay * w)


def sgd(w: Tensor, g: Tensor, state: State, t: int, *, lr, momentum, dampening, weight_decay, nesterov) -> Tensor:
    """The algorithm in torch.optim.SGD's documentation. The first gradient fills the buffer undamped."""
    return w - lr * _direction(g + weight_decay * w, state, t, momentum, dampening, nesterov)


def sgdw(w: Tensor, g: Tensor, state: State, t: int, *, lr, momentum, dampening, weight_decay, nesterov) -> Tensor:
    """Algorithm 1 of Loshchilov & Hutter (2019) with the decay scaled by lr, as in torch.optim.AdamW."""
    return w - lr * weight_decay * w - lr * _direction(g, state, t, momentum, dampening, nesterov)


def _direction(g: Tensor, state: State, t: int, momentum, dampening, nesterov) -> Tensor:
    if momentum == 0:
        return g
    state["m"] = g if t == 1 else momentum * state["m"] + (1 - dampening) * g
    return g + momentum * state["m"] if nesterov else state["m"]


@dataclass(frozen=True)
class Row:
    """An optimizer under test: how to make it, its oracle and its torch.optim namesake, if any."""

    name: str
    optimizer: type[FlashOptimizer]
    oracle: Oracle
    options: dict[str, Any] = field(default_factory=dict)
    namesake: type[torch.optim.Optimizer] | None = None

    def hyper(self, **overrides: Any) -> dict[str, Any]:
        """Every hyper-parameter the oracle takes."""
        return {**self.optimizer.hyper, **self.options, **overrides}


ADAM = {"lr": 1e-2, "weight_decay": 0.1}
HEAVY = {"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01}
TABLE = [
    Row("adamw", FlashAdamW, adamw, ADAM, torch.optim.AdamW),
    Row("adam", FlashAdam, adam, ADAM | {"betas": (0.8, 0.95)}, torch.optim.Adam),
    Row("lion", FlashLion, lion, {"lr": 1e-3, "weight_decay": 0.1}),
    Row("sgd", FlashSGD, sgd, {"lr": 5e-2, "weight_decay": 0.01}, torch.optim.SGD),
    Row("sgd momentum", FlashSGD, sgd, HEAVY, torch.optim.SGD),
    Row("sgd dampened", FlashSGD, sgd, HEAVY | {"dampening": 0.5}, torch.optim.SGD),
    Row("sgd nesterov", FlashSGD, sgd, HEAVY | {"nesterov": True}, torch.optim.SGD),
    Row("sgdw", FlashSGDW, sgdw, HEAVY),
    Row("sgdw nesterov", FlashSGDW, sgdw, HEAVY | {"nesterov": True}),
]
