"""A device other than a CPU steps whole parameters in place; here a CPU is made to, so that it can be seen to agree."""

import copy

import pytest
import torch
from training import ALIGNED, BIAS, RAGGED, assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, batch, compiled

LARGE, LARGE_RAGGED, LONG_ROW = (600, 128), (300, 250), (1, 70001)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch, compiled):
        monkeypatch.setattr(module, "works_in_cache", lambda device: False)


def make(kind: type[FlashOptimizer], eager: bool, **options) -> FlashOptimizer:
    shapes = (ALIGNED, RAGGED, BIAS, LARGE, LARGE_RAGGED, LONG_ROW, (0, 4), (80_000,))
    return kind(parameters(shapes), lr=1e-2, eager=eager, **options)


@pytest.mark.parametrize("options", [{}, {"quantize": False, "rounding": "nearest"}], ids=str)
def test_parameters_stepped_whole_get_the_bits_they_get_in_chunks(options: dict, monkeypatch: pytest.MonkeyPatch):
    in_chunks = train(make(FlashAdamW, eager=True, **options), range(3))
    for module in (batch, compiled):
        monkeypatch.setattr(module, "works_in_cache", lambda device: False)
    assert_identical(stored(train(make(FlashAdamW, eager=True, **options), range(3))), stored(in_chunks))


def test_compiled_whole_parameters_get_the_eager_bits(whole: None):
    eager = train(make(FlashLion, eager=True), range(3))
    ours = make(FlashLion, eager=False)
    before = copy.deepcopy(ours.state_dict()), stored(ours)
    ours.warmup(verbose=False)
    assert_identical(stored(ours), before[1])
    torch._dynamo.utils.counters.clear()
    assert_identical(stored(train(ours, range(3))), stored(eager))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_schedule_and_other_sizes_compile_nothing_more(whole: None):
    optimizer = train(FlashLion(parameters([LARGE]), lr=1e-2), range(1))
    torch._dynamo.utils.counters.clear()
    optimizer.param_groups[0]["lr"] = 3e-3
    train(optimizer, range(1, 3))
    train(FlashLion(parameters([(700, 256)]), lr=1e-2), range(2))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
