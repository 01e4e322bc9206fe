"""Counter-based noise for dithered rounding: a hash of element index and step, no generator state.

The same element at the same step draws the same number in eager, compiled, on any device and on any shard,
so a resumed or resharded run continues bit for bit.
"""

import torch
from torch import Tensor

from quant.ulp import STATE_NOISE_BITS, WEIGHT_NOISE_BITS, once

# Odd constants of 32 bits, as the signed numbers int32 tensors take: Knuth's and Weyl's for the counters,
# one of the "lowbias32" finalizer, and one per word of noise.
INDEX_STRIDE = -1640531535
STEP_STRIDE = 1013904223
MIX = 2146121005
WORDS = (-2073254261, 747796405)
# The streams that noise is drawn in, the weight's and those of up to five states: of which word, from which bit on, and
# how many bits. Where two share bits, they are the highest of the one and the lowest of the other.
STREAMS = (
    (0, 18, WEIGHT_NOISE_BITS),
    *((word, shift, STATE_NOISE_BITS) for word, shift in ((0, 9), (0, 0), (1, 20), (1, 10), (1, 0))),
)


def mix(index: Tensor, step: Tensor) -> Tensor:
    """32 well-mixed bits for each int32 `index` at the int32 `step`, to draw streams from."""
    return mix_phases(phases_of(index) + step_phase(step))


def mix_phases(phases: Tensor) -> Tensor:
    """`mix` of the indices and steps whose phases, the products with their strides modulo 2^32, add to `phases`."""
    bits = (phases ^ ((phases >> 16) & 0xFFFF)) * MIX
    return bits ^ ((bits >> 15) & 0x1FFFF)


def noise(bits: Tensor, stream: int) -> Tensor:
    """int32 numbers of as many bits as the stream has; each stream is a different draw from the same `mix`."""
    word, shift, count = STREAMS[stream]
    return ((bits * WORDS[word]) >> shift) & (2**count - 1)


def phases_of(index: Tensor) -> Tensor:
    """What `mix_phases` takes for each `index`, a whole number of any size."""
    # An operation on bits ends Inductor's algebra of indices, which would multiply the constants of an index and ours
    # to one of more than 32 bits, and Triton refuses to multiply an index by such.
    return _times(index.to(torch.int64) & -1, INDEX_STRIDE)


def step_phase(step: Tensor) -> Tensor:
    """What `mix_phases` takes for the int32 `step`."""
    return _times(step, STEP_STRIDE)


def phase_of(index: int) -> Tensor:
    """`phases_of` a number, as a number on the CPU."""
    # Without a branch, as the index may be one that Dynamo does not know yet.
    return torch.tensor((index * INDEX_STRIDE + 2**31) % 2**32 - 2**31, dtype=torch.int32, device="cpu")


def _times(number: Tensor, stride: int) -> Tensor:
    """The product modulo 2^32. In 32 bits it would overflow, which is undefined in the C++ that Inductor writes: where
    gcc knows how many rows there are, it draws conclusions from their phases."""
    return (number.to(torch.int64) * stride).to(torch.int32)


def block_phases(block: Tensor) -> tuple[Tensor, Tensor]:
    """Phases of the positions that the elements of `block` have, counted from its first, in the tensor it views.

    As two terms to be added: one number for each row, and one for each place in a row. Inductor makes the latter,
    consecutive indices, one by one; given as a tensor they are a load.
    """
    rows = torch.zeros((), dtype=torch.int64, device=block.device)
    for dim, (size, stride) in enumerate(zip(block.shape[:-1], block.stride(), strict=False)):
        along = torch.arange(size, device=block.device) * stride
        rows = rows + along.view(-1, *(1,) * (block.dim() - dim - 1))
    lanes = torch.arange(block.shape[-1], device=block.device) * block.stride(-1)
    return once(phases_of(rows)), once(phases_of(lanes))
