"""Counter-based noise for dithered rounding: a hash of element index and step, without generator state.

The same element at the same step draws the same number in eager and compiled steps, on any device and any
shard, so a resumed or resharded run continues bit for bit.
"""

import torch
from torch import Tensor

from quant.ulp import STATE_NOISE_BITS, WEIGHT_NOISE_BITS, on_gpu, once

# Odd 32-bit constants as signed int32 values: Knuth's and Weyl's for the counters, one from the "lowbias32"
# finalizer, and one per word of noise.
INDEX_STRIDE = -1640531535
STEP_STRIDE = 1013904223
MIX = 2146121005
WORDS = (-2073254261, 747796405)
# The streams of noise for the weight and up to five states: (word, first bit, number of bits). Two streams that share
# bits have them as the highest bits of one and the lowest of the other.
STREAMS = (
    (0, 18, WEIGHT_NOISE_BITS),
    *((word, shift, STATE_NOISE_BITS) for word, shift in ((0, 9), (0, 0), (1, 20), (1, 10), (1, 0))),
)


def mix(index: Tensor, step: Tensor) -> Tensor:
    """32 well-mixed bits for each int32 `index` at the int32 `step`, to draw streams from."""
    return mix_phases(phases_of(index) + step_phase(step))


def mix_phases(phases: Tensor) -> Tensor:
    """`mix` from sums of phases. The phase of an index or step is its product with its stride, modulo 2^32."""
    bits = (phases ^ ((phases >> 16) & 0xFFFF)) * MIX
    return bits ^ ((bits >> 15) & 0x1FFFF)


def noise(bits: Tensor, stream: int) -> Tensor:
    """Draw int32 numbers with the stream's number of bits. Each stream is a different draw from the same `mix`."""
    word, shift, count = STREAMS[stream]
    if on_gpu(bits):  # shifted by the product, so that all masks become part of a shift
        return ((bits * _signed(WORDS[word] << (32 - shift - count))) >> (32 - count)) & (2**count - 1)
    return ((bits * WORDS[word]) >> shift) & (2**count - 1)


def phases_of(index: Tensor) -> Tensor:
    """The phase of each `index`, a whole number of any size."""
    # The bit operation stops Inductor's index algebra. It would merge the constants of an index with ours into one of
    # more than 32 bits, by which Triton refuses to multiply an index.
    if on_gpu(index):  # 32-bit products wrap around
        return (index.to(torch.int32) & -1) * INDEX_STRIDE
    return _times(index.to(torch.int64) & -1, INDEX_STRIDE)


def _signed(number: int) -> int:
    """The low 32 bits as a signed number. No branch, as it may be symbolic in Dynamo."""
    return (number + 2**31) % 2**32 - 2**31


def step_phase(step: Tensor) -> Tensor:
    """The phase of the int32 `step`."""
    return _times(step, STEP_STRIDE)


def phase_of(index: int, device: torch.device | str = "cpu") -> Tensor:
    """The phase of a Python number, as a 0-dim tensor."""
    return torch.full((), _signed(index * INDEX_STRIDE), dtype=torch.int32, device=device)


def _times(number: Tensor, stride: int) -> Tensor:
    """The product modulo 2^32. A 32-bit product would overflow, which is undefined in Inductor's C++: if gcc knows the
    number of rows, it draws wrong conclusions from their phases."""
    return (number.to(torch.int64) * stride).to(torch.int32)


def block_phases(block: Tensor) -> tuple[Tensor, Tensor]:
    """Phases of the elements' positions in the tensor that `block` views, counted from the block's first element.

    Returns two terms to add: one number per row and one per place in a row. Inductor would compute the latter,
    consecutive indices, one by one; as a tensor they are a load.
    """
    rows = torch.zeros((), dtype=torch.int64, device=block.device)
    for dim, (size, stride) in enumerate(zip(block.shape[:-1], block.stride(), strict=False)):
        along = torch.arange(size, device=block.device) * stride
        rows = rows + along.view(-1, *(1,) * (block.dim() - dim - 1))
    lanes = torch.arange(block.shape[-1], device=block.device) * block.stride(-1)
    return once(phases_of(rows)), once(phases_of(lanes))
