"""A model and optimizer to save, and processes that save until they are killed, for the tests of files.

python tests/saving.py PATH   at each line of input, forks a process that saves repeatedly and prints a line per save
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile import FlashAdamW, FlashOptimizer, save


def new_model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Linear(64, 48)).to(dtype)


def pair(
    seed: int = 0,
    steps: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    kind: type[FlashOptimizer] = FlashAdamW,
    **options: Any,
) -> tuple[nn.Sequential, Any]:
    """A model and an optimizer that has taken some steps."""
    model = new_model(seed, dtype)
    optimizer = kind(model.parameters(), eager=True, **options)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take numbered steps. A step's number seeds its gradients."""
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all weights, buffers and states in a fixed order."""
    states = [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [*model.state_dict().values(), *(value for state in states for _, value in sorted(state.items()))]
    return [tensor.clone() for tensor in tensors]


def main(path: str) -> None:
    torch.set_num_threads(1)  # forking loses all other threads
    model, optimizer = pair()
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            save_for_ever(path, model, optimizer)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


def save_for_ever(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    count = 0
    while True:
        save(path, model, optimizer, count=count, weight=torch.full((200_000,), float(count)))
        print(f"saved {count}", flush=True)
        count += 1


if __name__ == "__main__":
    main(sys.argv[1])
