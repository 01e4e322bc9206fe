"""Devices other than CPUs step whole parameters in place. Here a CPU does the same, so that bits can be compared."""

import pytest
import torch
from training import ALIGNED, BIAS, RAGGED, assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer
from flashopt_compile.inductor import compile as inductor

LARGE, LARGE_RAGGED, LONG_ROW = (600, 128), (300, 250), (1, 70001)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "works_in_blocks", lambda device: False)


def make(kind: type[FlashOptimizer], eager: bool, **options) -> FlashOptimizer:
    shapes = (ALIGNED, RAGGED, BIAS, LARGE, LARGE_RAGGED, LONG_ROW, (0, 4), (80_000,))
    return kind(parameters(shapes), lr=1e-2, eager=eager, **options)


@pytest.mark.parametrize(
    "kind, options", [(FlashLion, {}), (FlashAdamW, {"quantize": False, "rounding": "nearest"})], ids=str
)
def test_compiled_whole_parameters_get_the_eager_bits(kind: type[FlashOptimizer], options: dict, whole: None):
    eager = train(make(kind, eager=True, **options), range(3))
    ours = make(kind, eager=False, **options)
    before = stored(ours)
    ours.warmup(verbose=False)
    assert_identical(stored(ours), before)
    torch._dynamo.utils.counters.clear()
    assert_identical(stored(train(ours, range(3))), stored(eager))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_parameters_in_another_order_and_with_other_strides_get_the_eager_bits(whole: None):
    """Large parameters are copied a few rows at a time, small ones together."""

    def run(eager: bool) -> list[torch.Tensor]:
        params = [
            torch.nn.Parameter(p.detach().t().contiguous().t()) for p in parameters([ALIGNED, LARGE, LARGE_RAGGED])
        ]
        return stored(train(FlashLion(params, lr=1e-2, eager=eager), range(2)))

    assert_identical(run(False), run(True))


def test_a_schedule_and_other_sizes_compile_nothing_more(whole: None):
    optimizer = train(FlashLion(parameters([LARGE]), lr=1e-2), range(1))
    torch._dynamo.utils.counters.clear()
    optimizer.param_groups[0]["lr"] = 3e-3
    train(optimizer, range(1, 3))
    train(FlashLion(parameters([(700, 256)]), lr=1e-2), range(2))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
