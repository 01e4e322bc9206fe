"""How often we compile: one graph per step, for all numbers, sizes and schedules."""

import re
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import CppTorchOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.optim.lr_scheduler import OneCycleLR
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, rule
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor import gcc

BF16 = torch.bfloat16
# 15 shapes of whole groups, used for 40 tensors. One is a single group, some have three or four dims.
ALIGNED_SHAPES = [
    *[(32, 32), (64, 32), (32, 64), (48, 96), (1, 1024), (1024, 32), (20, 128), (33, 160), (7, 320), (130, 32)],
    *[(4, 8, 64), (3, 5, 2, 64), (16, 32, 2, 2), (12, 96), (40, 64)],
]
# Rows of one whole group and of several; short groups of one element and of several; rows without a whole group.
RAGGED_SHAPES = [(64, 48), (64, 100), (40, 33), (45, 97), (100, 31), (64, 64), (16, 8, 3, 3), (9, 5, 70), (1, 1025)]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kernels of earlier tests, so that every graph is counted."""
    forget_kernels(monkeypatch)


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())


def test_one_graph_serves_a_model_under_every_schedule(start_afresh: None):
    """15 shapes, 40 tensors, 200 steps of OneCycleLR with cycled momentum, and schedules of decay and eps."""
    assert len(set(ALIGNED_SHAPES)) == 15
    params = parameters(list(islice(cycle(ALIGNED_SHAPES), 40)))
    optimizer = FlashAdamW(params, lr=1e-3)
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=201, cycle_momentum=True)
    give_gradients(params, 0)
    before = graphs()
    for step in range(200):
        optimizer.step()
        scheduler.step()
        (group,) = optimizer.param_groups
        group["weight_decay"] = 0.1 * (1 - step / 200)
        group["eps"] = 1e-8 * (1 + step)
    assert graphs() - before == 1


def test_other_types_of_numbers_make_no_new_graph(start_afresh: None):
    params = parameters([(64, 64), (128, 64)])
    optimizer = FlashAdamW(params, lr=1e-3)
    train(optimizer, range(1))
    before = graphs()
    for lr in (0.0, 1, 1e-3, torch.tensor(1e-3), torch.tensor([1e-3]), torch.tensor(1e-3, dtype=torch.float64)):
        optimizer.param_groups[0].update(lr=lr, betas=(0.5, 0.0), weight_decay=0, eps=0.0)
        train(optimizer, range(1))
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.999)
    train(optimizer, range(1))
    assert graphs() == before


def test_a_new_optimizer_of_the_same_kind_makes_no_new_graph(start_afresh: None):
    train(FlashAdamW(parameters([(64, 64)])), range(1))
    before = graphs()
    train(FlashAdamW(parameters([(96, 32), (32, 320)]), lr=0.5, weight_decay=0.0), range(2))
    assert graphs() == before


def test_biases_of_all_sizes_share_one_graph(start_afresh: None):
    before = graphs()
    train(FlashAdamW(parameters([(77,), (5,), (1,), (), (0,), (4096,), (31, 31), (2, 3, 4)])), range(2))
    assert graphs() - before == 1


def test_rows_that_end_in_short_groups_share_the_graph_of_whole_ones(start_afresh: None):
    before = graphs()
    train(FlashAdamW(parameters([*RAGGED_SHAPES, (300, 1000), (64, 64), (1024, 1024)])), range(2))
    assert graphs() - before == 1


def test_more_than_eight_steps_each_have_a_graph_of_their_own(start_afresh: None):
    """Dynamo limits the graphs of a code object to eight. If steps shared one, the ninth would fail."""
    before = graphs()
    for number in range(10):

        def scaled(w, g, t, *, lr=0.5, factor=number):
            return (w - lr * factor * g,)

        class Scaled(FlashOptimizer, rule=rule()(scaled)):
            pass

        (p,), (start,) = parameters([(64,)], torch.float32), parameters([(64,)], torch.float32)
        train(Scaled([p]), range(2))
        random = parameters([(64,)], torch.float32)
        moved = torch.zeros(64)
        for step in range(2):
            give_gradients(random, step)
            assert random[0].grad is not None
            moved += 0.5 * number * random[0].grad
        torch.testing.assert_close(p.detach(), start.detach() - moved)
    assert graphs() - before == 10


def test_eager_compiles_nothing():
    before = graphs()
    train(FlashSGD(parameters(), lr=0.123, momentum=0.9, maximize=True, eager=True), range(2))
    assert graphs() == before


def test_gcc_is_told_to_use_vectors_as_wide_as_inductors():
    """With narrower vectors, the many casts between floats and bits in a step would go through memory in halves."""
    isa = pick_vec_isa()
    with inductor_config.patch(gcc.wide_vectors()):
        flags = " ".join(CppTorchOptions(vec_isa=isa).get_cflags())
    assert ("-mprefer-vector-width=512" in flags) == (isa.bit_width() == 512)
    assert "ffp-contract=off" in flags


needs_gcc = pytest.mark.skipif(not gcc.loops_for_gcc(), reason="only gcc on Linux vectorizes our loops")


def check_eager_bits(kind: Any, options: dict[str, Any], dtype: torch.dtype = BF16) -> None:
    """Compare parameters with even and odd numbers of groups, and with rows that end in short groups."""
    shapes = [(64, 64), (33, 32), (40, 75)]
    ours, theirs = (kind(parameters(shapes, dtype), lr=0.05, eager=eager, **options) for eager in (False, True))
    for number in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer.param_groups[0]["params"], number)
            optimizer.step()
        assert_identical(stored(ours), stored(theirs))


@needs_gcc
@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (FlashAdamW, {}, BF16),
        (FlashAdamW, {"rounding": "nearest"}, BF16),
        (FlashSGD, {"momentum": 0.9, "weight_decay": 0.1}, BF16),
        (FlashSGD, {"momentum": 0.9, "master_weight_bits": 32}, BF16),
        (FlashLion, {}, BF16),
        (FlashLion, {"master_weight_bits": None}, BF16),
        (FlashLion, {}, torch.float16),
        (FlashSGD, {"momentum": 0.9, "master_weight_bits": 32}, torch.float16),
    ],
)
def test_gcc_vectorizes_every_loop_to_the_eager_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, options: dict[str, Any], dtype: torch.dtype, bits: int
):
    """Pieces have one group or two. A loop that is not vectorized would take ten times as long."""
    report, options_for_gcc = tmp_path / "loops", gcc.loops_for_gcc()
    march = f"{options_for_gcc['cpp.march']} -fopt-info-vec-optimized={report}"
    monkeypatch.setattr(gcc, "loops_for_gcc", lambda: {**options_for_gcc, "cpp.march": march})
    monkeypatch.setattr(gcc, "_vector_bits", lambda: bits)
    forget_kernels(monkeypatch)
    check_eager_bits(kind, options, dtype)
    found = re.findall(r"^(.*):(\d+):\d+: optimized: loop vectorized", report.read_text(), re.MULTILINE)
    source = Path(found[0][0]).read_text()
    depths = [len(indent) for indent in re.findall(r"^( *)for\(", source, re.MULTILINE)]
    innermost = sum(depth >= following for depth, following in zip(depths, [*depths[1:], 0], strict=True))
    assert len({line for _, line in found}) == innermost > 3 and "at::vec" not in source
    assert f"x2<static_cast<int64_t>({bits // 8}L)" in source


@needs_gcc
@pytest.mark.skipif(pick_vec_isa().bit_width() != 512, reason="needs vectors of 512 bits")
def test_gcc_uses_whole_vectors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Loops over the elements of two groups use vectors of 64 bytes, not of 32."""
    report, options_for_gcc = tmp_path / "loops", gcc.loops_for_gcc()
    march = f"{options_for_gcc['cpp.march']} -fopt-info-vec-optimized={report}"
    monkeypatch.setattr(gcc, "loops_for_gcc", lambda: {**options_for_gcc, "cpp.march": march})
    forget_kernels(monkeypatch)
    FlashAdamW(parameters([(64, 64)]), betas=(0.8, 0.9)).warmup(verbose=False)
    pattern = r"^(.*):(\d+):\d+: optimized: loop vectorized using (\d+) byte vectors"
    widths = set()
    for path, line, width in re.findall(pattern, report.read_text(), re.MULTILINE):
        if "x2<static_cast<int64_t>(64L)" in Path(path).read_text().splitlines()[int(line) - 1]:
            widths.add(int(width))
    assert widths == {64}


@needs_gcc
def test_loops_are_left_to_gcc_when_dynamo_compiles_again(start_afresh: None):
    """Dynamo recompiles when the number of threads changes. The loops must be the same."""
    optimizer, threads = FlashLion(parameters([(64, 64)])), torch.get_num_threads()
    loops = []
    try:
        for count in (threads, threads + 1):
            torch.set_num_threads(count)
            with fresh_cache():
                _, (source,) = run_and_get_code(train, optimizer, range(1))
            loops.append(sorted(re.findall(r"for\(int64_t .*", source)))
    finally:
        torch.set_num_threads(threads)
    assert loops[0] == loops[1] and len(loops[0]) > len(set(loops[0])) > 1


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autograd_notices_that_a_step_changed_a_saved_tensor(dtype: torch.dtype):
    """This holds for a parameter stepped in place and for a small one stepped in a pack."""
    for shape in ((512, 256), (64, 64)):
        (p,) = parameters([shape], dtype)
        optimizer = train(FlashAdamW([p]), range(1))
        loss = (p * p).sum()
        before = p._version
        train(optimizer, range(1))
        assert p._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inductors_own_vectors_give_the_eager_bits(monkeypatch: pytest.MonkeyPatch):
    """Inductor's own vectors are used if the compiler is not gcc."""
    monkeypatch.setattr(gcc, "loops_for_gcc", dict)
    forget_kernels(monkeypatch)
    with pytest.warns(RuntimeWarning, match="called through Dynamo"):  # temporaries prevent a single function
        check_eager_bits(FlashAdamW, {})
