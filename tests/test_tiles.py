"""Loops in tiles: what Inductor writes of them, and that it leaves alone what is not row by row."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashOptimizer, FlashSGD, compiled, tiles, vectors
from flashopt_compile.tiles import TILE_ELEMENTS, tiled

pytestmark = pytest.mark.skipif(not vectors.plain_loops(), reason="only what gcc vectorizes is in tiles")
OPTIONS = {"cpp.simdlen": 1, "inplace_buffers": False}


def source_of(function: Callable[..., Any], *arguments: Tensor) -> str:
    """The C++ that Inductor writes in tiles, having checked what it computes."""
    expected = function(*arguments)
    torch._dynamo.reset()
    for tensor in arguments:
        torch._dynamo.mark_dynamic(tensor, 0)
    with fresh_cache(), tiled():
        found, (source,) = run_and_get_code(torch.compile(function, fullgraph=True, options=OPTIONS), *arguments)
    torch.testing.assert_close(found, expected)
    return source


def loops_over_tiles(source: str) -> list[str]:
    return re.findall(r"for\(int64_t tile=.*", source)


def normalized(x: Tensor) -> Tensor:
    """Three loops: the largest of each row, a factor of each, and the quotients."""
    y = x * x
    y = y.as_strided(y.shape, y.stride())
    factor = 1 / y.amax(-1, keepdim=True)
    return y * factor.as_strided(factor.shape, factor.stride())


@pytest.mark.parametrize("rows", [2, 15, 16, 17, 1000])
def test_loops_over_the_same_rows_are_in_one_over_tiles(rows: int):
    source = source_of(normalized, torch.rand(rows, 64) + 1)
    (over_tiles,) = loops_over_tiles(source)
    assert f"tile+=static_cast<int64_t>({TILE_ELEMENTS // 64}L)" in over_tiles
    assert source.count("#pragma omp for") <= 1
    # What they leave each other is of a tile's size, and no tensor but the result is made.
    assert sorted(re.findall(r"alignas\(64\) float \w+\[(\d+)\];", source)) == ["1024", "16", "16"]
    assert source.count("empty_strided_cpu(") == 1


def other_rows(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return x - largest.as_strided(largest.shape, largest.stride()).flip(0)


def all_rows(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return x - largest.as_strided(largest.shape, largest.stride()).sum()


def columns(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return (x / largest.as_strided(largest.shape, largest.stride())).sum(0)


@pytest.mark.parametrize("function", [other_rows, all_rows, columns])
def test_what_minds_other_rows_is_left_as_it_is(function: Callable[[Tensor], Tensor]):
    assert not loops_over_tiles(source_of(function, torch.rand(100, 64) + 1))


def test_others_compile_as_ever():
    with tiled():
        pass
    torch._dynamo.reset()
    with fresh_cache():
        _, (source,) = run_and_get_code(torch.compile(normalized, options=OPTIONS), torch.rand(100, 64) + 1)
    assert not loops_over_tiles(source)


@pytest.mark.parametrize("kind, options", [(FlashAdamW, {}), (FlashSGD, {"momentum": 0.9})])
def test_a_step_computes_its_states_once(
    kind: type[FlashOptimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """They are read where the largest are found, and not again."""
    monkeypatch.setattr(compiled, "_kernels", {})
    optimizer = kind(parameters([(64, 64)]), lr=0.01, **options)
    with fresh_cache():
        _, (source,) = run_and_get_code(train, optimizer, range(1))
    assert len(loops_over_tiles(source)) == 1
    codes = [name for name in re.findall(r"const u?int8_t\* (in_ptr\d+)", source)]
    reads = [len(re.findall(rf"= {name}\[", source)) for name in codes]
    assert reads == [1] * len(codes) and len(codes) == len(optimizer.rule_of(optimizer.param_groups[0]).states) + 1
    assert not re.findall(r"empty_strided_cpu\(\(s\d+", source)  # no memory but of numbers


def test_a_step_that_is_not_in_tiles_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    def run() -> list[Tensor]:
        monkeypatch.setattr(compiled, "_kernels", {})
        with fresh_cache():
            return stored(train(FlashAdamW(parameters([(64, 64), (33, 96)]), lr=0.01), range(2)))

    ours = run()
    monkeypatch.setattr("flashopt_compile.tiles._common_rows", lambda loops: None)
    assert_identical(run(), ours)


def test_kernels_of_other_tiles_are_not_found_in_inductors_cache(monkeypatch: pytest.MonkeyPatch):
    """Its keys are of what it knows itself: without a word of ours, kernels of an older version would be used again."""

    def tag() -> str:
        with tiled():
            return torch.compiler.config.cache_key_tag

    before = tag()
    with torch.compiler.config.patch(cache_key_tag="a user's"):  # pyright: ignore[reportAttributeAccessIssue]
        assert tag() == f"a user's {before}"
    monkeypatch.setattr(tiles, "_version", lambda: "another")
    assert tag() != before
