"""Counter-based uniform numbers for dithered rounding: a hash of element index and step, no generator state.

The same element at the same step draws the same number in eager, compiled, on any device and on any shard,
so a resumed or resharded run continues bit for bit.
"""

import torch
from torch import Tensor

# Odd constants of 32 bits, as the signed numbers int32 tensors take: Knuth's and Weyl's for the counters,
# the two of the "lowbias32" finalizer, and one per stream.
INDEX_STRIDE = -1640531535
STEP_STRIDE = 1013904223
MIX = 2146121005
STREAMS = (-2073254261, 747796405, -1028477387, 1540483477, -862048943, 461845907)


def mix(index: Tensor, step: Tensor) -> Tensor:
    """32 well-mixed bits for each int32 `index` at the int32 `step`, to draw streams from."""
    bits = index * INDEX_STRIDE + step * STEP_STRIDE
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * MIX
    return bits ^ ((bits >> 15) & 0x1FFFF)


def uniform(bits: Tensor, stream: int) -> Tensor:
    """fp32 numbers in [0, 1), multiples of 2^-24; each stream is a different draw from the same bits."""
    drawn = bits * STREAMS[stream]
    return ((drawn >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def element_index(block: Tensor, start: Tensor | int) -> Tensor:
    """The position of each element of `block` in the contiguous tensor it is a view of, modulo 2^32.

    `start` is the position of the block's first element.
    """
    index = torch.zeros((), dtype=torch.int32, device=block.device)
    for dim, (size, stride) in enumerate(zip(block.shape, block.stride(), strict=True)):
        along = torch.arange(size, dtype=torch.int32, device=block.device) * stride
        index = index + along.view(-1, *(1,) * (block.dim() - dim - 1))
    return index + start
