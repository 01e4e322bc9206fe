"""Loops in tiles: the C++ that Inductor writes for them, and the code that stays without tiles."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashOptimizer, FlashSGD
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor import gcc, probes, tiles
from flashopt_compile.inductor.tiles import TILE_ELEMENTS, InTiles

pytestmark = pytest.mark.skipif(not gcc.loops_for_gcc(), reason="only what gcc vectorizes is in tiles")
OPTIONS: dict[str, Any] = {"cpp.simdlen": 1, "inplace_buffers": False}
IN_TILES = {**OPTIONS, "_pre_fusion_custom_pass": InTiles()}


def source_of(function: Callable[..., Any], *arguments: Tensor, options: dict[str, Any] = IN_TILES) -> str:
    """Inductor's C++ for blocks (rows, n, width). Its results are checked too."""
    expected = function(*arguments)
    torch._dynamo.reset()
    for tensor in arguments:
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 1)
    with fresh_cache():
        found, (source,) = run_and_get_code(torch.compile(function, fullgraph=True, options=options), *arguments)
    torch.testing.assert_close(found, expected)
    return source


def loops_over_tiles(source: str) -> list[str]:
    return re.findall(r"for\(int64_t tile=.*", source)


def normalized(x: Tensor) -> Tensor:
    """Three loops: the maximum of each piece, a factor for each, and the quotients."""
    y = x * x
    y = y.as_strided(y.shape, y.stride())
    factor = 1 / y.amax(-1, keepdim=True)
    return y * factor.as_strided(factor.shape, factor.stride())


@pytest.mark.parametrize("rows, pieces", [(2, 15), (3, 16), (5, 17), (7, 1000), (1000, 2)])
def test_loops_over_the_same_pieces_are_in_one_over_tiles(rows: int, pieces: int):
    source = source_of(normalized, torch.rand(rows, pieces, 64) + 1)
    (over_tiles,) = loops_over_tiles(source)
    assert f"tile+=static_cast<int64_t>({TILE_ELEMENTS // 64}L)" in over_tiles
    assert source.count("for(int64_t row=") == 1
    assert source.count("#pragma omp for") <= 1
    # The loops' temporaries have a tile's size, and the result is the only new tensor.
    assert sorted(re.findall(r"alignas\(64\) float \w+\[(\d+)\];", source)) == ["1024", "16", "16"]
    assert source.count("empty_strided_cpu(") == 1


def test_rows_may_lie_apart():
    """The whole groups of a parameter's rows lie apart if short groups in between are stepped elsewhere."""
    whole = torch.rand(6, 37 * 64 + 8) + 1
    source = source_of(normalized, whole[:, : 37 * 64].unflatten(1, (37, 64)))
    assert len(loops_over_tiles(source)) == 1


def other_rows(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return x - largest.as_strided(largest.shape, largest.stride()).flip(0)


def other_pieces(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return x - largest.as_strided(largest.shape, largest.stride()).flip(1)


def all_rows(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return x - largest.as_strided(largest.shape, largest.stride()).sum()


def columns(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return (x / largest.as_strided(largest.shape, largest.stride())).sum((0, 1))


@pytest.mark.parametrize("function", [other_rows, other_pieces, all_rows, columns])
def test_loops_that_read_other_pieces_get_no_tiles(function: Callable[[Tensor], Tensor]):
    assert not loops_over_tiles(source_of(function, torch.rand(5, 20, 64) + 1))


def test_other_code_compiles_without_tiles():
    """Tiles are an option of a single compilation, so other compilations before and after ours have none."""
    block = torch.rand(5, 20, 64) + 1
    assert not loops_over_tiles(source_of(normalized, block, options=OPTIONS))
    assert loops_over_tiles(source_of(normalized, block))
    assert not loops_over_tiles(source_of(normalized, block, options=OPTIONS))


def test_a_compile_in_another_thread_has_no_tiles(monkeypatch: pytest.MonkeyPatch):
    """The other compilation starts once ours has reached its loops."""
    real, sources, errors = InTiles.__call__, [], []

    def other() -> None:
        try:
            torch.compile(normalized, fullgraph=True, options=OPTIONS)(torch.rand(5, 20, 64) + 1)
        except Exception as error:
            errors.append(error)

    def meanwhile(self: InTiles, nodes: list[Any]) -> list[Any]:
        found = real(self, nodes)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(2)  # until it is done or waits for the compile lock
        threads.append(thread)
        return found

    threads: list[threading.Thread] = []
    monkeypatch.setattr(InTiles, "__call__", meanwhile)
    torch._dynamo.reset()
    block = torch.rand(5, 20, 64) + 1
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(block, dim)

    def both() -> Tensor:
        result = torch.compile(lambda x: normalized(x) + 1, fullgraph=True, options=IN_TILES)(block)
        for thread in threads:
            thread.join(120)
        return result

    with fresh_cache():
        result, sources = run_and_get_code(both)
    torch.testing.assert_close(result, normalized(block) + 1)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert sorted(bool(loops_over_tiles(source)) for source in sources) == [False, True]


@pytest.mark.parametrize("kind, options", [(FlashAdamW, {}), (FlashSGD, {"momentum": 0.9})])
def test_a_step_computes_its_states_once(
    kind: type[FlashOptimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """States are read once, in the loop that finds the maxima."""
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())
    optimizer = kind(parameters([(64, 64)]), lr=0.01, **options)
    with fresh_cache():
        _, (source,) = run_and_get_code(train, optimizer, range(1))
    assert len(loops_over_tiles(source)) == 1
    codes = [name for name in re.findall(r"const u?int8_t\* (in_ptr\d+)", source)]
    reads = [len(re.findall(rf"= {name}\[", source)) for name in codes]
    assert reads == [1] * len(codes) and len(codes) == len(optimizer.rule_of(optimizer.param_groups[0]).states) + 1
    assert not re.findall(r"empty_strided_cpu\(\(s\d+", source)  # no temporaries that grow with the parameter


def test_a_step_that_is_not_in_tiles_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    def run() -> list[Tensor]:
        monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())
        with fresh_cache():
            return stored(train(FlashAdamW(parameters([(64, 64), (33, 96)]), lr=0.01), range(2)))

    ours = run()
    monkeypatch.setattr("flashopt_compile.inductor.tiles._common_loops", lambda loops: None)
    monkeypatch.setattr(probes, "_told", set())
    with pytest.warns(RuntimeWarning, match="none of its inputs"):  # the loops' temporaries
        assert_identical(run(), ours)


def test_kernels_of_other_tiles_are_not_found_in_inductors_cache(monkeypatch: pytest.MonkeyPatch):
    """Inductor's keys cover only its own code. Without our uuid, kernels of an older version would be reused."""
    before = InTiles().uuid()
    assert InTiles().uuid() == before
    assert isinstance(before, str) and before
    monkeypatch.setattr(tiles, "_version", lambda: "another")
    assert InTiles().uuid() != before
