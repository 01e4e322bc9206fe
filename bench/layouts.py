"""The cost of other memory layouts: time per element relative to a contiguous matrix (`python -m bench layouts`)."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.machine import describe_machine
from bench.speed_rows import Goal, Row, table
from flashopt_compile import FlashAdamW

ROUNDS = 40
BASELINE = "contiguous 4096×1024"


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


LAYOUTS: dict[str, tuple[Callable[[], Tensor], Goal | None]] = {
    BASELINE: (lambda: bf16(4096, 1024), None),
    "rows of 1000": (lambda: bf16(4096, 1000), Goal("≤", 1.4)),
    "rows of 784": (lambda: bf16(4096, 784), Goal("≤", 1.4)),
    "channels_last 512×512×3×3": (
        lambda: bf16(512, 512, 3, 3).contiguous(memory_format=torch.channels_last),
        Goal("≤", 1.4),
    ),
    "transposed 2048×2048": (lambda: bf16(2048, 2048).t(), Goal("≤", 2.0)),
}


def measure(rounds: int = ROUNDS) -> list[Row]:
    """Measure a row for each layout. The layouts step in turn."""
    optimizers: dict[str, FlashAdamW] = {}
    for name, (make, _) in LAYOUTS.items():
        weight = nn.Parameter(make())
        weight.grad = torch.full_like(weight, 1e-3)
        optimizers[name] = FlashAdamW([weight])
    best_ms = dict.fromkeys(LAYOUTS, float("inf"))
    for number in range(rounds + 2):
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if number > 1:  # earlier steps compile and plan
                best_ms[name] = min(best_ms[name], 1e3 * (time.perf_counter() - begin))
    per_element = {
        name: best_ms[name] / sum(weight.numel() for weight in optimizer.param_groups[0]["params"])
        for name, optimizer in optimizers.items()
    }
    return [
        Row(
            f"AdamW, {name}, time per element beside {BASELINE}",
            goal=goal,
            ours_ms=best_ms[name],
            figure=per_element[name] / per_element[BASELINE],
        )
        for name, (_, goal) in LAYOUTS.items()
        if name != BASELINE
    ]


def main(quick: bool = False) -> None:
    torch.set_num_threads(2)
    print(f"{describe_machine()}\n\n{table(measure(2 if quick else ROUNDS))}\n")
