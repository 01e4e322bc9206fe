"""What other optimizers keep for a parameter, so that a plan has something to compare ours with."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

Shape = tuple[int, ...]
LEAST_8_BIT = 4096  # elements; both libraries keep smaller states uncompressed
BLOCK = 256  # elements that share an fp32 scale there


class Kept(NamedTuple):
    """Bytes of one parameter: what is trained, its gradient, its states, and what a checkpoint holds of the weights."""

    weight: int
    gradient: int
    states: int
    saved: int


def _uniform(weight: int, gradient: int, each: int, saved: int) -> Callable[[Shape, int], Kept]:
    """The same bytes for every element."""

    def kept(shape: Shape, states: int) -> Kept:
        n = math.prod(shape)
        return Kept(weight * n, gradient * n, states * each * n, saved * n)

    return kept


def _torchao(shape: Shape, states: int) -> Kept:
    n = math.prod(shape)
    is_small = n < LEAST_8_BIT or n % BLOCK
    each = 2 * n if is_small else n + 4 * (n // BLOCK)
    return Kept(2 * n, 2 * n, states * each, 2 * n)


def _bitsandbytes(shape: Shape, states: int) -> Kept:
    n = math.prod(shape)
    each = 4 * n if n < LEAST_8_BIT else n + 4 * -(-n // BLOCK)
    return Kept(2 * n, 2 * n, states * each, 2 * n)


def peers_of(kind: str) -> Mapping[str, Callable[[Shape, int], Kept]]:
    """By name, what others do in place of the optimizer `kind` (AdamW, Adam, SGD, SGDW, Lion): bytes by local shape.

    "mixed" is a 16-bit model with fp32 master weights and states. All but "fp32" have 16-bit weights and gradients.
    """
    plain = f"torch {kind}" if kind in ("AdamW", "Adam", "SGD") else kind  # torch has no Lion
    found = {
        f"{plain} mixed": _uniform(2 + 4, 2, 4, 4),
        f"{plain} fp32": _uniform(4, 4, 4, 4),
        f"{plain} bf16": _uniform(2, 2, 2, 2),
    }
    if kind in ("AdamW", "Adam"):
        found[f"torchao {kind}8bit"] = _torchao
    if kind in ("AdamW", "Adam", "SGD", "Lion"):
        found[f"bitsandbytes {kind}8bit"] = _bitsandbytes
    return found
