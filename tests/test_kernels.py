"""Inductor's GPU kernels, tested without a GPU: their number, memory traffic, resources and computed bits."""

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from kernel_cases import CASES, Case, every_number, hyper_of, run_eager
from torch import Tensor

from flashopt_compile.engine.step import Step
from flashopt_compile.engine.storage import Storage
from flashopt_compile.kernels import TARGETS, Emitted, compile_offline, emit, interpret, traffic
from flashopt_compile.kernels.emit import emit_step
from flashopt_compile.rules import lion, sgd
from quant import SIGNED8, Split
from quant.rows import Rows
from quant.ulp import spacing

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
SQUARE = (512, 128)  # 65,536 elements
NVIDIA = ("sm_90", "sm_80", "sm_100")


def differences(emitted: Emitted, shape: tuple[int, ...], t: int = 7) -> dict[str, int]:
    """Count per part the elements whose bits differ between emitted kernels and the eager step by GPU formulas."""
    step = emitted.step
    ours = every_number(step, shape, emitted.grad_dtype)
    theirs = [tensor.clone() for tensor in ours]
    before = [tensor.clone() for tensor in ours]
    run_eager(step, ours, t)
    interpret(emitted, [theirs], t, **hyper_of(step))
    names = ("head", "gradient", *step.storage.parts(shape))
    assert any(not same(old, new).all() for old, new in zip(before, theirs, strict=True)), "nothing was stepped"
    # Bits without a meaning: tails of non-finite weights, and codes whose scale is NaN. They are never used.
    meant = {"tail": ours[0].isfinite()}
    for codes, scales in ((name, f"{name.removesuffix('codes')}scales") for name in names if name.endswith("codes")):
        rows = Rows(shape, 32)
        scale = ours[names.index(scales)].view(rows.count, -1).repeat_interleave(32, 1)[:, : rows.columns]
        meant[codes] = ~scale.isnan().view(shape)
    return {
        name: int((~same(one, other))[meant.get(name, ...)].sum())
        for name, one, other in zip(names, ours, theirs, strict=True)
    }


def same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | ((one != one) & (other != other))


@pytest.mark.parametrize("targets", [NVIDIA, ("gfx942",)], ids=["NVIDIA", "AMD"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_one_kernel_of_least_traffic_that_spills_nothing_and_computes_the_eager_bits(
    case: Case, targets: tuple[str, ...]
):
    emitted = case.emit(targets[0])
    moved = traffic(emitted)
    assert (moved.launches, moved.temporaries) == (1, 0)
    assert abs(moved.excess) <= 0.01
    assert not any(differences(emitted, SQUARE).values())
    for target in targets:
        (machine,) = compile_offline(replace(emitted, target=TARGETS[target]))
        assert machine.spills == 0, f"{target}, {machine.configuration}"
        assert machine.widest_load_bits >= 64


def test_nvidia_sources_differ_only_in_device_properties():
    """Source emitted for one NVIDIA target can thus be compiled for all."""
    sources = []
    for target in NVIDIA:
        (kernel,) = Case("lion", "bf16+8", True).emit(target).kernels.values()
        sources.append(re.sub(r"DeviceProperties\([^)]*\)|offline-\w+", "", kernel))
    assert sources[0] == sources[1] == sources[2]


@pytest.mark.parametrize("combo_kernels, launches", [(False, 2), (True, 1)])
def test_ragged_rows_take_two_kernels_or_one_combined(combo_kernels: bool, launches: int):
    moved = traffic(Case("lion", "bf16+8", True).emit("sm_90", shapes=[(1000, 1000)], combo_kernels=combo_kernels))
    assert (moved.launches, moved.temporaries) == (launches, 0)
    assert abs(moved.excess) <= 0.01


@pytest.mark.parametrize("combo_kernels, launches", [(False, 20), (True, 1)])
def test_twenty_parameters_in_one_graph_take_a_launch_each_or_one_in_total(combo_kernels: bool, launches: int):
    shapes = [(64 * number, 256) for number in range(1, 21)]
    moved = traffic(emit(sgd.sgd, "sm_90", dtype=torch.float32, shapes=shapes, combo_kernels=combo_kernels))
    assert (moved.launches, moved.temporaries) == (launches, 0)


@pytest.mark.parametrize(
    "shape, rounding",
    [
        ((1024, 64), "nearest"),
        ((31, 1057), "dither"),
        ((1, 4099), "dither"),
        ((700, 47), "nearest"),
        ((3, 5, 7, 33), "dither"),
    ],
    ids=str,
)
def test_ragged_and_whole_rows_are_computed_to_the_eager_bits(shape: tuple[int, ...], rounding: str):
    emitted = Case("lion", "bf16+8", True).emit("sm_90", shapes=[shape], rounding=rounding)
    assert not any(differences(emitted, shape).values())


@pytest.mark.parametrize("elements", [32, 64, 65536 + 32])
def test_one_emitted_kernel_serves_every_number_of_rows(elements: int):
    emitted = adamw_on_sm_90()
    assert not any(differences(emitted, (elements // 32, 32)).values())


@cache
def adamw_on_sm_90() -> Emitted:
    return Case("adamw", "bf16+8", True).emit("sm_90")


@dataclass(frozen=True)
class CastAndBack(Split):
    """A wrong split that casts to the head and back, which Inductor folds away."""

    def advance(self, head: Tensor, tail: Tensor, by: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        w = self.decode(head, tail) + by
        new_head = w.to(self.head)
        rest = w - new_head.to(torch.float32)
        codes = rest / spacing(w, self.narrow) * (2 * self.levels)
        return new_head, codes.round().clamp(-self.levels, self.levels).to(self.tail)


def test_a_split_that_casts_and_back_is_caught():
    step = Step(lion.lion, Storage(CastAndBack(), (("m", SIGNED8),)), "nearest", False)
    found = differences(emit_step(step, "sm_90", [SQUARE], torch.bfloat16), SQUARE)
    assert found["tail"] > 1000
    assert found["m.codes"] == found["head"] == 0


@pytest.mark.parametrize(
    "shape, changes, hyper, sentence",
    [
        ((8, 48), {}, {}, r"has shape \(8, 48\); the code is for rows like those of \(4096, 4096\)"),
        ((8, 64), {2: torch.int16}, {}, r"a parameter of shape \(8, 64\) has the tensors .* expected are"),
        (
            (8, 64),
            {},
            {"momentum": 0.9},
            "momentum is not a hyper-parameter of adamw; it has lr, betas, eps, weight_decay",
        ),
    ],
)
def test_tensors_and_options_that_do_not_fit_the_kernel_are_refused(
    shape: tuple[int, ...], changes: dict[int, torch.dtype], hyper: dict[str, float], sentence: str
):
    emitted = adamw_on_sm_90()
    tensors = emitted.step.storage.zeros(shape, torch.bfloat16)
    tensors = [tensor.to(changes.get(number, tensor.dtype)) for number, tensor in enumerate(tensors)]
    with pytest.raises(ValueError, match=sentence):
        interpret(emitted, [tensors], 1, **hyper)
    with pytest.raises(ValueError, match="2 parameters are given; the code is for 1"):
        interpret(emitted, [tensors, tensors], 1)


def test_hyper_parameters_go_by_name_and_default_to_the_rules():
    emitted = adamw_on_sm_90()
    runs = []
    for hyper in ({"eps": 1e-3, "lr": 0.5}, {"lr": 0.5, "eps": 1e-3, "betas": (0.9, 0.999), "weight_decay": 1e-2}, {}):
        tensors = every_number(emitted.step, (64, 64), torch.bfloat16)
        interpret(emitted, [tensors], 3, **hyper)
        runs.append(tensors)
    assert all(same(one, other).all() for one, other in zip(runs[0], runs[1], strict=True))
    assert not same(runs[0][0], runs[2][0]).all()
