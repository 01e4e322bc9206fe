"""Compare ways to sum up the gradients of micro-batches without fp32 gradients: the evidence for docs/release.md.

python -m bench.accumulation
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.machine import describe_machine
from flashopt_compile.release.sums import STORED
from quant.grouped import SIGNED8

BETA = 0.9
COUNTS = (4, 16, 64)
WIDTH, BATCH = 256, 16

Way = Callable[[list[Tensor]], Tensor]


def micro_gradients(count: int) -> list[Tensor]:
    """The gradients of a hidden matrix for micro-batches of a small regression."""
    torch.manual_seed(0)
    hidden = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), hidden, nn.GELU(), nn.Linear(WIDTH, 1))
    teacher = torch.randn(WIDTH, 1)
    found = []
    for _ in range(count):
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - (x @ teacher).tanh()).square().mean() / count
        (grad,) = torch.autograd.grad(loss, [hidden.weight])
        found.append(grad)
    return found


def in_24_bits(grads: list[Tensor]) -> Tensor:
    """What gradient release does: bf16 heads with 8-bit tails."""
    parts = STORED.encode(torch.zeros_like(grads[0]))
    for grad in grads:
        parts = STORED.advance(*parts, grad, None)
    return STORED.decode(*parts)


def in_bf16(grads: list[Tensor]) -> Tensor:
    total = torch.zeros_like(grads[0], dtype=torch.bfloat16)
    for grad in grads:
        total += grad
    return total.float()


def in_the_momentum(grads: list[Tensor]) -> Tensor:
    """Added to 8-bit codes of a momentum (here one gathered from gradients of the same size), and taken out again."""
    random = torch.Generator().manual_seed(1)
    size = torch.stack(grads).sum(0).square().mean().sqrt()
    before = (torch.randn(grads[0].shape, generator=random) * size * ((1 - BETA) / (1 + BETA)) ** 0.5).view(-1, 32)
    parts = SIGNED8.encode(BETA * before)
    for grad in grads:
        parts = SIGNED8.encode(SIGNED8.decode(*parts) + (1 - BETA) * grad.view(-1, 32))
    return ((SIGNED8.decode(*parts) - BETA * before) / (1 - BETA)).view(grads[0].shape)


WAYS: dict[str, tuple[float, Way]] = {
    "bf16 and 8-bit tail (ours)": (3, in_24_bits),
    "bf16": (2, in_bf16),
    "the 8-bit momentum itself": (0, in_the_momentum),
}


def error(way: Way, grads: list[Tensor]) -> float:
    """The RMS error of a sum, as a share of the sum's RMS."""
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    return float((way(grads).double() - exact).norm() / exact.norm())


def main() -> None:
    print(describe_machine())
    print("RMS error of a sum of gradients, as a share of the sum\n")
    print(f"| summed in | bytes | {' | '.join(f'{count} micro-batches' for count in COUNTS)} |")
    print(f"|---|---|{'---|' * len(COUNTS)}")
    for name, (size, way) in WAYS.items():
        cells = " | ".join(f"{error(way, micro_gradients(count)):.1e}" for count in COUNTS)
        print(f"| {name} | {size} | {cells} |")


if __name__ == "__main__":
    main()
