"""GPU arithmetic that the interpreter lacks: fused multiply-adds and inexact roots and quotients change little."""

from functools import cache

import pytest
import torch
from kernel_cases import Case, hyper_of, of_a_training, run_eager
from torch import Tensor

from flashopt_compile.kernels import Emitted, contracted, interpret, rough
from quant import Split

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
SHAPE = (512, 128)
LAST = 9
# A GPU's inverse roots are within two ulps, and FMAs are its compiler's choice.
STRAYS = {
    "FMA": contracted,
    "roots up an ulp": lambda emitted: rough(emitted, 1),
    "roots down an ulp": lambda emitted: rough(emitted, -1),
    "FMA, roots up two ulps": lambda emitted: rough(contracted(emitted), 2),
    "FMA, roots down two ulps": lambda emitted: rough(contracted(emitted), -2),
}


@cache
def emitted() -> Emitted:
    return Case("adamw", "bf16+8", True).emit("sm_90")


def exact_weight(head: Tensor, tail: Tensor) -> Tensor:
    value, correction = Split()._terms(head, tail)
    return value.double() + correction.double()


@pytest.mark.parametrize("name", STRAYS)
def test_stray_arithmetic_moves_weights_and_states_by_a_code_at_most(name: str):
    stray, step = STRAYS[name](emitted()), emitted().step
    assert stray.source != emitted().source
    before = of_a_training(step, SHAPE, torch.bfloat16, steps=LAST - 1)
    ours, theirs = ([tensor.clone() for tensor in before] for _ in range(2))
    run_eager(step, ours, LAST, like_a_gpu=False)
    interpret(stray, [theirs], LAST, **hyper_of(step))

    (head, _, tail, *states), (stray_head, _, stray_tail, *stray_states) = ours, theirs
    weight = exact_weight(head, tail)
    # The largest, as a decoded momentum's error is no smaller where the gradient cancels most of it.
    update = (weight - exact_weight(before[0], before[2])).abs().max()
    code = Split().resolution(head, tail).double()
    # Allow a code and some ulps of the update. The ulps exceed a code if the update takes the weight through zero. The
    # update has five inverse roots of 2^-22, three for the root of v and two for the quotient, and a dozen roundings of
    # 2^-24.
    apart = (exact_weight(stray_head, stray_tail) - weight).abs()
    assert (apart <= code + (5 * 4 + 12) * 2.0**-24 * update).all()
    assert (apart > 0).double().mean() < 0.005
    # A different head is correct too, if the weight lies midway between both, within the same error.
    other = head != stray_head
    assert (127 - tail[other].abs() <= 1 + (apart / code)[other]).all()
    assert other.double().mean() < 1e-4
    for one, another in zip(states, stray_states, strict=True):
        off = (one.double() - another.double()).abs()
        assert (off > 0).double().mean() < 0.001
        assert off.max() <= (1 if not one.is_floating_point() else one.double().abs().max() * 2.0**-7)


def test_ulps_beyond_a_gpus_are_refused():
    with pytest.raises(ValueError, match="ulps is 3; allowed is −2 to 2"):
        rough(emitted(), 3)
