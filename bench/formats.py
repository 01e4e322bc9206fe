"""Compare the errors of companded groups on optimizer-like data: bf16 with fp16 scales, and every compander.

python -m bench.formats
"""

import sys

import torch
from torch import Tensor

from bench.machine import describe_machine
from quant.bounds import GROUPS
from quant.compand import SOFTSIGN
from quant.grouped import SIGNED8, Grouped
from quant.ulp import STATE_NOISE_BITS

GROUP_COUNT = 2**15
GOAL = 10.0
LEAST, MOST = 1e-12, 1e6


def log_normal_groups(random: torch.Generator) -> Tensor:
    """Groups of signed log-normal values (σ = 1). Magnitudes are log-uniform from LEAST to MOST."""
    bend = torch.randn(GROUP_COUNT, 32, generator=random, dtype=torch.float64).exp()
    sign = torch.randint(0, 2, bend.shape, generator=random) * 2 - 1
    ends = torch.tensor([LEAST, MOST], dtype=torch.float64).log()
    magnitude = (
        ends[0] + torch.rand(GROUP_COUNT, 1, generator=random, dtype=torch.float64) * (ends[1] - ends[0])
    ).exp()
    return (magnitude * sign * bend).to(torch.float32)


def with_fp16_scales(format: Grouped, x: Tensor) -> Tensor:
    """`x` encoded and decoded with the published scales: max |x|, rounded to the nearest fp16."""
    scale = x.abs().amax(-1, keepdim=True)
    codes = format.compander.compressor(format.levels)(x, scale).round()
    return format.compander.expander(format.levels)(codes, scale.to(torch.float16).to(torch.float32))


def group_errors(x: Tensor, decoded: Tensor) -> Tensor:
    """max |error| / max |x| of each group; 1 if the group decodes to NaN, Inf or 0."""
    error = (decoded.double() - x.double()).abs().amax(-1) / x.double().abs().amax(-1)
    return torch.where(error < 1, error, 1.0)


def scale_regimes(x: Tensor) -> dict[str, Tensor]:
    """Masks of the groups whose scale is zero, subnormal, normal or infinite in fp16."""
    scale = x.abs().amax(-1).to(torch.float16)
    normal = torch.finfo(torch.float16).smallest_normal
    return {
        "all groups": torch.ones_like(scale, dtype=torch.bool),
        "fp16 scale 0": scale == 0,
        "fp16 scale subnormal": (scale > 0) & (scale < normal),
        "fp16 scale normal": (scale >= normal) & scale.isfinite(),
        "fp16 scale Inf": scale.isinf(),
    }


def compare_scales(format: Grouped, x: Tensor) -> float:
    """Print the mean error per group with either kind of scale. Return how many times lower ours is."""
    published = group_errors(x, with_fp16_scales(format, x))
    ours = group_errors(x, format.decode(*format.encode(x)))
    print(f"\n  {format.compander.name + ', int8':<22}{'share':>9}{'fp16, nearest':>16}{'bf16, rounded up':>19}")
    for name, chosen in scale_regimes(x).items():
        share, theirs, mine = chosen.double().mean(), published[chosen].mean(), ours[chosen].mean()
        print(f"  {name:<22}{share:>9.2%}{theirs:>16.3e}{mine:>19.3e}")
    ratio = (published.mean() / ours.mean()).item()
    print(f"  {ratio:.1f}× lower; the goal is {GOAL:g}×: {'pass' if ratio >= GOAL else 'FAIL'}")
    return ratio


def momentum_like(random: torch.Generator) -> dict[str, Tensor]:
    """Signed data: normal, Laplace, and Student's t with 3 degrees of freedom."""
    shape = (GROUP_COUNT, 32)
    normal = torch.randn(shape, generator=random)
    laplace = torch.empty(shape).exponential_(generator=random) * torch.randn(shape, generator=random).sign()
    chi_square = torch.stack([torch.randn(shape, generator=random) ** 2 for _ in range(3)]).sum(0)
    return {"normal": normal, "Laplace": laplace, "Student t(3)": normal / (chi_square / 3).sqrt()}


def variance_like(random: torch.Generator) -> dict[str, Tensor]:
    """Data ≥ 0: χ² with 1 and 8 degrees of freedom, and log-normal with σ = 2."""
    shape = (GROUP_COUNT, 32)
    squares = [torch.randn(shape, generator=random) ** 2 for _ in range(8)]
    log_normal = (2 * torch.randn(shape, generator=random)).exp()
    return {"χ²(1)": squares[0], "χ²(8)": torch.stack(squares).sum(0), "log-normal": log_normal}


def rms_error(format: Grouped, x: Tensor, noise: Tensor | None) -> float:
    """RMS of the error over RMS of the values, group by group, then averaged."""
    error = format.decode(*format.encode(x, noise)) - x
    return (error.square().mean(-1) / x.square().mean(-1)).sqrt().mean().item()


def compare_companders(signed: bool, data: dict[str, Tensor], random: torch.Generator) -> None:
    kind = "momentum-like, int8" if signed else "variance-like, uint8"
    print(f"\nCompanders, {kind}: mean over groups of RMS error / RMS value, nearest | dither")
    print(f"  {'':<14}" + "".join(f"{name:>20}" for name in data))
    noise = torch.randint(2**STATE_NOISE_BITS, (GROUP_COUNT, 32), generator=random, dtype=torch.int32)
    for format in (each for each in GROUPS if each.signed == signed):
        cells = (f"{rms_error(format, x, None):.3%} | {rms_error(format, x, noise):.3%}" for x in data.values())
        print(f"  {format.compander.name:<14}" + "".join(f"{cell:>20}" for cell in cells))


def main() -> None:
    random = torch.Generator().manual_seed(0)
    print(describe_machine(), end="\n\n")
    print(
        f"Scales: {GROUP_COUNT:,} log-normal groups of 32, magnitudes log-uniform from {LEAST:g} to {MOST:g}, nearest;"
    )
    print("mean over groups of max |error| / max |x|, 1 for those lost to 0, Inf or NaN")
    x = log_normal_groups(random)
    ratios = [compare_scales(format, x) for format in (SIGNED8, Grouped(SOFTSIGN))]
    compare_companders(True, momentum_like(random), random)
    compare_companders(False, variance_like(random), random)
    sys.exit(0 if min(ratios) >= GOAL else 1)


if __name__ == "__main__":
    main()
