"""The counter-based noise is even, independent, and the same wherever and however it is drawn."""

import itertools
import math

import numpy as np
import pytest
import torch
from strategies import COUNT, Compiled, differences
from torch import Tensor

from quant.dither import STREAMS, block_phases, mix, mix_phases, noise, phases_of, step_phase
from quant.rows import Rows
from quant.ulp import WEIGHT_NOISE_BITS

INDEX = torch.arange(2**18, dtype=torch.int32)
STEPS = (0, 1, 2, 1000, 2**31 - 1)
LAGS = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 128, 256, 768, 1024, 4096)
STRAY = 5  # standard deviations


def even(noise: Tensor, stream: int = 0) -> np.ndarray:
    """Noise as numbers from 0 to 1."""
    return (noise.double().numpy() + 0.5) * 2.0 ** -STREAMS[stream][2]


def draw(step: int, stream: int = 0, index: Tensor = INDEX) -> np.ndarray:
    return even(noise(mix(index, torch.tensor(step, dtype=torch.int32)), stream), stream)


def excess(cells: np.ndarray, count: int) -> float:
    """Chi-square of the draws over `count` cells, in standard deviations from its mean."""
    expected = len(cells) / count
    statistic = ((np.bincount(cells, minlength=count) - expected) ** 2 / expected).sum()
    return (statistic - (count - 1)) / math.sqrt(2 * (count - 1))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation, in standard deviations of that of independent draws."""
    return np.corrcoef(a, b)[0, 1] * math.sqrt(len(a))


def joint_excess(a: np.ndarray, b: np.ndarray) -> float:
    """Chi-square over a 16 × 16 square, which shows dependence without correlation too."""
    return excess((a * 16).astype(int) * 16 + (b * 16).astype(int), 256)


def check_independent(a: np.ndarray, b: np.ndarray) -> None:
    assert abs(correlation(a, b)) < STRAY
    assert abs(joint_excess(a, b)) < STRAY


@pytest.mark.parametrize("stream", range(len(STREAMS)))
@pytest.mark.parametrize("step", STEPS)
def test_draws_are_even(stream: int, step: int):
    u = draw(step, stream)
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < STRAY / math.sqrt(12 * len(u))
    assert abs(excess((u * 256).astype(int), 256)) < STRAY
    ranks = np.arange(1, len(u) + 1) / len(u)
    assert np.abs(np.sort(u) - ranks).max() < 2.2 / math.sqrt(len(u))  # Kolmogorov–Smirnov, 1 in 10,000


@pytest.mark.parametrize("share", [2.0**-7, 2.0**-10, 2.0**-WEIGHT_NOISE_BITS])
def test_rare_draws_are_as_rare_as_they_should_be(share: float):
    u = np.concatenate([draw(step) for step in range(8)])
    for rare in ((u < share).sum(), (u >= 1 - share).sum()):
        assert abs(rare - share * len(u)) < STRAY * math.sqrt(share * len(u))


@pytest.mark.parametrize("element", [0, 1, 5, 2**20, -1])
def test_draws_of_one_element_are_even_and_independent_over_steps(element: int):
    steps = torch.arange(2**16, dtype=torch.int32)
    u = even(noise(mix(torch.tensor(element, dtype=torch.int32), steps), 0))
    assert abs(excess((u * 256).astype(int), 256)) < STRAY
    for lag in (1, 2, 3, 4, 8, 10, 100):
        check_independent(u[:-lag], u[lag:])


@pytest.mark.parametrize("a, b", list(itertools.combinations(range(len(STREAMS)), 2)))
def test_streams_are_independent(a: int, b: int):
    check_independent(draw(7, a), draw(7, b))


@pytest.mark.parametrize("lag", LAGS)
def test_neighbours_are_independent(lag: int):
    u = draw(7)
    check_independent(u[:-lag], u[lag:])


@pytest.mark.parametrize("later", [1, 2, 3, 10, 100, 1000])
def test_steps_are_independent(later: int):
    check_independent(draw(7), draw(7 + later))


def test_compiled_draws_equal_eager_ones():
    def draws(index: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        bits = mix(index, step)
        return bits, *(noise(bits, stream) for stream in range(len(STREAMS)))

    compiled = Compiled(draws)
    for start, step in ((0, 0), (2**31 - COUNT // 2, 1), (-(2**31), 2**31 - 1)):
        index = (torch.arange(COUNT) + start).to(torch.int32)
        args = index, torch.tensor(step, dtype=torch.int32)
        assert [differences(a, b) for a, b in zip(compiled(*args), draws(*args), strict=True)] == [0] * 7


def test_draws_equal_the_documented_hash():
    """A checkpoint must draw the same numbers years later. The hash is computed here in Python's integers."""
    mask = 2**32 - 1
    for index, step, stream in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (123456789, 987654, 5), (2**31 + 7, 2**31 - 1, 3)]:
        bits = (index * 2654435761 + step * 1013904223) & mask
        bits = ((bits ^ (bits >> 16)) * 2146121005) & mask
        bits ^= bits >> 15
        word = (bits * (2221713035 if stream < 3 else 747796405)) & mask
        expected = (word >> (18, 9, 0, 20, 10, 0)[stream]) % (2**12 if stream else 2**14)
        signed = torch.tensor(index, dtype=torch.int64).to(torch.int32)
        bits_drawn = mix(signed, torch.tensor(step, dtype=torch.int32))
        assert noise(bits_drawn, stream).item() == expected


SHAPES = [(64, 32), (6, 75), (5, 33), (4, 3, 50), (2, 3, 5, 7), (70,), (7,)]


def check_phases(block: Tensor, start: int) -> None:
    """Check that a block draws the noise of its elements' positions, which are its values."""
    step = torch.tensor(3, dtype=torch.int32)
    phases = phases_of(torch.tensor(start)) + sum(block_phases(block))
    assert torch.equal(mix_phases(phases + step_phase(step)), mix(block.to(torch.int32), step))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_phases_are_those_of_the_position_in_the_contiguous_tensor(shape: tuple[int, ...]):
    position = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    rows = Rows(shape, 32)
    blocks = rows.blocks(position)
    for block in blocks:
        check_phases(block, int(block.flatten()[0]))
    assert sum(block.numel() for block in blocks) == position.numel()


def test_phases_of_a_strided_view():
    position = torch.arange(4 * 6 * 10, dtype=torch.int32).view(4, 6, 10)
    view = position[1:, ::2, 3:9]
    check_phases(view, int(view[0, 0, 0]))
    check_phases(position.transpose(0, 2), 0)


def test_phases_wrap_at_32_bits():
    for start in (2**31 - 2, 2**32 - 2, 5 * 2**32 + 7):
        check_phases(torch.arange(start, start + 4).remainder(2**32), start)
