"""Gradient release of sharded models: the bits of an ordinary step on any number of processes."""

from pathlib import Path

import pytest
from processes import run


@pytest.mark.parametrize("world", [2, 3])
def test_released_shards_step_to_the_bits_of_ordinary_ones(world: int, tmp_path: Path):
    run(tmp_path, world, "releases", "releases_with_sums")
