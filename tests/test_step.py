"""The generic step works in place and in bounded memory, with the same bits however a parameter is cut."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planning import Watched, carry_out, eager_of_width, item_of, step_by_blocks, with_calls_of
from torch import Tensor
from torch.nn import Parameter
from training import assert_identical, give_gradients, held, parameters, stored, train

from flashopt_compile import SIGNED8, FlashAdamW, FlashOptimizer, FlashSGD, Moved, rule
from flashopt_compile.engine import planner
from flashopt_compile.engine.kernel import Kernels
from flashopt_compile.engine.layout import Layout
from flashopt_compile.engine.step import Place, Step
from flashopt_compile.engine.storage import storage_of
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor.notes import Compiled
from flashopt_compile.rules.adamw import adamw
from quant import Grouped

SHAPES = [(96, 64), (64, 50), (50, 33), (40, 31), (16, 8, 3, 3), (6, 5, 70), (1, 2049), (77,)]
HYPER = {
    "lr": torch.tensor(0.01),
    "betas": (torch.tensor(0.9), torch.tensor(0.99)),
    "eps": torch.tensor(1e-8),
    "weight_decay": torch.tensor(0.1),
}


def step_for(shape: tuple[int, ...], rounding: str = "dither") -> Step:
    return Step(adamw, storage_of(adamw, torch.bfloat16, shape, 24, True), rounding, maximize=False)


class UncompiledWhole(inductor.WholeKernel):
    """The kernel for whole parameters, without the compiler."""

    def _run(self, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Any) -> None:
        self.step(tensors, t, place, numbers)


def fresh_tensors(one: Step, shape: tuple[int, ...]) -> list[Tensor]:
    """Head, gradient and parts of a parameter after one step, so that no state is zero."""
    (head,) = parameters([shape])
    give_gradients([head], 0)
    assert head.grad is not None
    rest = [torch.zeros(part.shape, dtype=part.dtype) for part in one.storage.parts(shape).values()]
    tensors = [head.detach(), head.grad, *rest]
    step_by_blocks(one, tensors, torch.tensor(1.0), HYPER)
    return tensors


@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("most, small", [(64, 0), (96, 20), (1000, 100), (1000, 10**6)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_give_the_bits_of_the_whole(
    shape: tuple[int, ...], most: int, small: int, groups: int, rounding: str, monkeypatch: pytest.MonkeyPatch
):
    one, t = step_for(shape, rounding), torch.tensor(2.0)
    whole, cut = fresh_tensors(one, shape), fresh_tensors(one, shape)
    step_by_blocks(one, whole, t, HYPER)
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", small)
    monkeypatch.setattr(planner, "PACK_ELEMENTS", most)
    watched = Watched(eager_of_width(groups, most))
    carry_out(watched, [item_of(one, cut, t, HYPER)])
    assert_identical(cut, whole)
    assert all(len(block.shape) == 3 and block.shape[-1] == 32 * groups for block in watched.blocks)
    assert sum(watched.elements) >= whole[0].numel()
    if small < most:
        row = Layout.of(one.storage, shape).columns if Layout.of(one.storage, shape).rows > 1 else 0
        assert max(watched.elements) <= max(most, row) + 64 * groups


@pytest.mark.parametrize("cuts", [[0, 1], [0, 3, 4], [0, 0, 2]], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
def test_shards_of_rows_give_the_bits_of_the_whole(shape: tuple[int, ...], cuts: list[int]):
    """Each rank of a sharded run has its rows, their scales and their positions."""
    one = step_for(shape)
    whole, sharded = fresh_tensors(one, shape), fresh_tensors(one, shape)
    t = torch.tensor(2.0)
    step_by_blocks(one, whole, t, HYPER)
    row_elements = whole[0].numel() // shape[0]
    for first, last in zip(cuts, [*cuts[1:], shape[0]], strict=True):
        own = [tensor[first:last].clone() for tensor in sharded]
        for start, block in one.storage.blocks(tuple(own[0].shape), own):
            one(block, t, Place.at(first * row_elements + start), HYPER)
        for tensor, part in zip(sharded, own, strict=True):
            tensor[first:last] = part
    assert_identical(sharded, whole)


KERNELS: dict[str, Kernels] = {
    "eager": eager_of_width(),
    "eager, two groups": eager_of_width(2),
    "compiled": lambda *kind: inductor.kernel(*kind),
    "whole": lambda step, *_: UncompiledWhole(step, lambda *_: Compiled()),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("small, most", [(1 << 16, 1 << 20), (100, 416), (100, 1 << 20)], ids=str)
@pytest.mark.parametrize("cut", [32, 64, 96], ids=str)
def test_shards_of_columns_give_the_bits_of_the_whole(
    cut: int, small: int, most: int, kernels: str, monkeypatch: pytest.MonkeyPatch
):
    """Each rank of tensor parallelism has its columns, which are contiguous only within a row."""
    shape = 33, 128
    one, t = step_for(shape), torch.tensor(2.0)
    whole, sharded = fresh_tensors(one, shape), fresh_tensors(one, shape)
    step_by_blocks(one, whole, t, HYPER)
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", small)
    monkeypatch.setattr(planner, "PACK_ELEMENTS", most)
    for first, last in ((0, cut), (cut, 128)):
        places = [
            slice(first // 32, last // 32) if is_scale else slice(first, last)
            for is_scale in (False, *one.storage.scales)
        ]
        own = [tensor[:, place].clone() for tensor, place in zip(sharded, places, strict=True)]
        layout = Layout.of(one.storage, own[0].shape, first, torch.arange(33) * 128 + first)
        carry_out(with_calls_of(KERNELS[kernels], most), [item_of(one, own, t, HYPER, layout)])
        for tensor, place, part in zip(sharded, places, own, strict=True):
            tensor[:, place] = part
    assert_identical(sharded, whole)


@pytest.mark.parametrize("kernels", KERNELS)
def test_shards_of_columns_without_groups_give_the_bits_of_the_whole(kernels: str, monkeypatch: pytest.MonkeyPatch):
    """Without groups, columns may be cut anywhere."""
    shape, cut = (33, 128), 45
    one = Step(adamw, storage_of(adamw, torch.bfloat16, shape, 24, False), "dither", maximize=False)
    t = torch.tensor(2.0)
    whole, sharded = fresh_tensors(one, shape), fresh_tensors(one, shape)
    step_by_blocks(one, whole, t, HYPER)
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", 100)
    for first, last in ((0, cut), (cut, 128)):
        own = [tensor[:, first:last].clone() for tensor in sharded]
        layout = Layout.of(one.storage, own[0].shape, first, torch.arange(33) * 128 + first)
        carry_out(with_calls_of(KERNELS[kernels], 416), [item_of(one, own, t, HYPER, layout)])
        for tensor, part in zip(sharded, own, strict=True):
            tensor[:, first:last] = part
    assert_identical(sharded, whole)


@pytest.mark.parametrize("shape", [(100, 64), (64, 50), (64, 33)], ids=str)
def test_strided_parameters_are_stepped_in_bounded_slabs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    (plain,) = parameters([shape])
    strided = Parameter(plain.detach().t().contiguous().t())
    train(one := FlashAdamW([plain], eager=True), range(2))
    monkeypatch.setattr(planner, "STAGED_ELEMENTS", 640)
    monkeypatch.setattr(planner, "SMALL_ELEMENTS", 0)
    train(other := FlashAdamW([strided], eager=True), range(2))
    assert_identical(stored(other), stored(one))
    assert other.plan is not None and other.plan.bytes < 3 * plain.nbytes


def test_draws_differ_between_elements_and_steps():
    """Equal weights with equal updates diverge, differently in each step."""
    p = Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = FlashSGD([p], lr=1e-6, eager=True)
    tails = []
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
        tails.append(optimizer.state[p]["tail"].clone())
    assert 0 < (tails[0] != 0).sum() < p.numel() / 4
    assert not torch.equal(tails[1] != 0, (tails[0] != 0))


def test_nearest_draws_for_variances_alone():
    one = step_for((64, 64), "nearest")
    here, there = fresh_tensors(one, (64, 64)), fresh_tensors(one, (64, 64))
    for tensors, position in ((here, 0), (there, 12345)):
        ((_, block),) = one.storage.blocks((64, 64), tensors)
        one(block, torch.tensor(2.0), Place.at(position), HYPER)
    *_, v_codes, v_scales = here
    assert_identical(here[:-2], there[:-2])
    assert not torch.equal(v_codes, there[-2])
    assert_identical([v_scales], there[-1:])


def test_step_writes_in_place_and_leaves_the_gradient():
    (p,) = parameters([(64, 64)])
    optimizer = train(FlashAdamW([p], eager=True), range(1))
    assert p.grad is not None
    grad, addresses = p.grad.clone(), [p.data_ptr(), *(value.data_ptr() for value in optimizer.state[p].values())]
    optimizer.step()
    assert torch.equal(p.grad, grad)
    assert [p.data_ptr(), *(value.data_ptr() for value in optimizer.state[p].values())] == addresses


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
@pytest.mark.parametrize("bits", [24, 32, None])
def test_returning_w_equals_returning_moved_to_within_one_code(bits: int | None, rounding: str):
    @rule(m=SIGNED8)
    def plain(w, g, m, t, *, lr=0.01):
        m = 0.9 * m + g
        return w - lr * m, m

    @rule(m=SIGNED8)
    def moved(w, g, m, t, *, lr=0.01):
        m = 0.9 * m + g
        return Moved(w, -lr * m), m

    class Plain(FlashOptimizer, rule=plain):
        pass

    class MovedBy(FlashOptimizer, rule=moved):
        pass

    optimizers: list[Any] = [
        kind(parameters([(64, 64)]), master_weight_bits=bits, rounding=rounding, eager=True)
        for kind in (Plain, MovedBy)
    ]
    one, other = (train(optimizer, range(1)) for optimizer in optimizers)
    (p,), (q,) = (optimizer.param_groups[0]["params"] for optimizer in (one, other))
    difference = (held(one, p)["w"] - held(other, q)["w"]).abs()
    format = one.storage(one.param_groups[0], p).weight
    rest = [one.state[p]["tail"]] if bits else []
    fp32_ulp = p.detach().abs().double() * 2.0**-23
    assert (difference <= format.resolution(p.detach(), *rest).double() + fp32_ulp).all()
    assert_identical([one.state[p]["m.codes"]], [other.state[q]["m.codes"]])


def test_a_rule_may_keep_five_states():
    states = dict.fromkeys("abcde", SIGNED8)

    def many(w, g, a, b, c, d, e, t, *, lr=0.1):
        return w - lr * g, a + g, b - g, c + 2 * g, d + g * g, e + 1

    made = rule(**states)(many)

    class Many(FlashOptimizer, rule=made):
        pass

    (p,) = parameters([(64, 64)])
    optimizer = train(Many([p], eager=True), range(1))
    assert p.grad is not None
    g = p.grad.double()
    for name, exact in zip("abcde", (g, -g, 2 * g, g * g, torch.ones_like(g)), strict=True):
        value, scale = held(optimizer, p)[name], exact.abs().max()
        assert isinstance(dict(made.states)[name], Grouped)
        assert (value - exact).abs().max() <= 0.02 * scale


PEAK = """
import sys
import torch
from flashopt_compile import FlashAdamW
from flashopt_compile.stepping import trained

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def peak_of_a_step(rows):
    p = torch.nn.Parameter(torch.ones(rows, 1024, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = FlashAdamW([p])
    list(trained(optimizer))  # makes the states
    for tensor in optimizer.state[p].values():
        tensor.add_(0)  # touched, so that the kernel has given it its memory
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts here
    before = status("VmRSS")
    optimizer.step()
    return status("VmHWM") - before

peak_of_a_step(4096)  # compiles
print(peak_of_a_step(int(sys.argv[1])))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of memory")
def test_peak_memory_of_a_step_is_16_mib_at_most():
    """The parameter is bf16 and has 100 million elements."""
    done = subprocess.run([sys.executable, "-c", PEAK, "97657"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 16 * 2**20, f"{int(done.stdout) / 2**20:.1f} MiB"
