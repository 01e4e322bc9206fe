"""20 steps of every rule, dtype, master width and rounding give the bits of version 0.4.

Beside weights rounded to nearest, variances are dithered since 0.6: those bits are of that version.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW

PINNED = [Path(__file__).parent / "golden" / f"bits-{version}.json" for version in ("0.4.0", "0.6.0")]
RULES: dict[str, tuple[type[FlashOptimizer], dict]] = {
    "adamw": (FlashAdamW, {"lr": 1e-2}),
    "adam": (FlashAdam, {"lr": 1e-2}),
    "adam with a penalty": (FlashAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": (FlashLion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (FlashSGD, {"lr": 1e-2}),
    "sgd with momentum": (FlashSGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
    "sgd with a penalty": (FlashSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd nesterov": (FlashSGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgdw": (FlashSGDW, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "sgdw nesterov": (FlashSGDW, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FORMATS = [
    *((dtype, bits) for dtype in (torch.bfloat16, torch.float16) for bits in (24, 32, None)),
    (torch.float32, 24),
]
# Whole groups, an odd number of groups, short last groups, vectors, large ones of each, and other strides.
SHAPES = [(64, 64), (48, 96), (70, 100), (37,), (40, 4, 3, 3), (1,), (300, 256), (300, 300), (70000,)]


def parameters(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made.append(torch.randn(320, 288, generator=generator).to(dtype).t())
    made.append(torch.randn(64, 48, 5, 5, generator=generator).to(dtype).to(memory_format=torch.channels_last))
    return made


def digest(rule: str, dtype: torch.dtype, bits: int | None, rounding: str, eager: bool = True) -> str:
    """A hash of all weights and states after 20 steps."""
    cls, options = RULES[rule]
    weights = parameters(dtype)
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = cls(weights, **options, master_weight_bits=bits, rounding=rounding, eager=eager)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for weight in weights:
            grad, size = (draw(weight.shape, generator=generator) for draw in (torch.randn, torch.rand))
            weight.grad = (grad * (size * size) * (size * size)).to(dtype)  # the bits of pow depend on threads
        optimizer.step()
    found = hashlib.sha256()
    for weight in weights:
        for tensor in (weight.detach(), *optimizer.state[weight].values()):
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def cases() -> list[tuple[str, torch.dtype, int | None, str]]:
    return [(rule, *format, rounding) for rule in RULES for format in FORMATS for rounding in ("dither", "nearest")]


def name_of(rule: str, dtype: torch.dtype, bits: int | None, rounding: str) -> str:
    return f"{rule}, {str(dtype).removeprefix('torch.')}, {bits} bits, {rounding}"


@pytest.mark.parametrize("case", cases(), ids=lambda case: name_of(*case))
def test_twenty_steps_have_the_bits_of_version_0_4(case):
    pinned = {name: bits for path in PINNED for name, bits in json.loads(path.read_text()).items()}
    assert digest(*case) == pinned[name_of(*case)]
