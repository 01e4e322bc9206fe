"""One table: every rule, stored in every way, takes the steps of its float64 oracle.

The oracle starts each step from the stored values. A step may thus err only by its formats' proven bounds and
a few fp32 roundings.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from oracles import TABLE, Row
from torch import Tensor
from training import (
    ALIGNED,
    BIAS,
    RAGGED,
    SHAPES,
    assert_identical,
    give_gradients,
    held,
    parameters,
    scales_of,
    stored,
)

from flashopt_compile import ROOT8, SIGNED8, FlashOptimizer, Moved, debias, rule, unbias
from flashopt_compile.rule import Rule
from quant import Grouped, Raw, Rounded, Split
from quant.bounds import grouped_bound, split_bound

STEPS = 4
# A rule computes in fp32, so its results err by this share of their largest input.
FP32_ERROR = 16 * 2.0**-24
ROUNDINGS = ("nearest", "dither")
STORAGES = [
    {"dtype": dtype, "master_weight_bits": bits, "quantize": quantize, "rounding": rounding}
    for (dtype, bits), quantize, rounding in product(
        [
            *product((torch.bfloat16, torch.float16), (24, 32, None)),
            (torch.float32, 24),
        ],
        (True, False),
        ROUNDINGS,
    )
]
# Few, because each costs a compilation: every rule, dtype, number of bits and rounding, and both kinds of state.
COMPILED = [
    ("adamw", torch.bfloat16, 24, True, "dither", [ALIGNED, RAGGED, BIAS]),
    ("adam", torch.float32, 24, True, "nearest", [ALIGNED]),
    ("lion", torch.float16, 24, True, "dither", [ALIGNED]),
    ("sgd", torch.bfloat16, None, True, "dither", [BIAS]),
    ("sgd momentum", torch.bfloat16, 24, True, "nearest", [ALIGNED]),
    ("sgd dampened", torch.bfloat16, 32, True, "dither", [ALIGNED]),
    ("sgd nesterov", torch.float16, 32, False, "nearest", [ALIGNED]),
    ("sgdw", torch.float32, 24, False, "dither", [ALIGNED]),
    ("sgdw nesterov", torch.bfloat16, None, True, "dither", [ALIGNED]),
]


def name_of(storage: dict[str, Any]) -> str:
    dtype = str(storage["dtype"]).removeprefix("torch.")
    kind = "quantized" if storage["quantize"] else "exact"
    return f"{dtype}-{storage['master_weight_bits']}-{kind}-{storage['rounding']}"


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` around float64 `x`; at a power of two, the larger one."""
    rounded = x.to(dtype)
    above = torch.nextafter(rounded.abs(), torch.full_like(rounded, torch.inf))
    return above.double() - rounded.abs().double()


@cache
def tail_bound(format: Split, rounding: str) -> Callable[..., Tensor]:
    return split_bound(format, rounding).function()


@cache
def state_bound(format: Grouped, rounding: str) -> Callable[..., Tensor]:
    return grouped_bound(format, rounding).function()


def weight_bound(format: Any, rounding: str, w: Tensor) -> Tensor:
    fp32_ulp = spacing(w, torch.float32)
    if isinstance(format, Split):
        return tail_bound(format, rounding)(ulp_head=spacing(w, format.head), ulp_fp32=fp32_ulp)
    if isinstance(format, Rounded):
        return spacing(w, format.head) * (0.5 if rounding == "nearest" else 1.0) + fp32_ulp
    return fp32_ulp / 2


def assert_within(error: Tensor, bound: Tensor | float) -> None:
    excess = (error.abs() - bound).max().item()
    assert excess <= 0, f"the worst error is {error.abs().max().item():.3e}, {excess:.3e} beyond its bound"


def as_fp32(value: Any) -> Any:
    """Hyper-parameters rounded to fp32, as in a step. 1 − β differs between float32 and float64 β."""
    if isinstance(value, tuple):
        return tuple(as_fp32(each) for each in value)
    return value if isinstance(value, bool) else torch.tensor(value, dtype=torch.float32).double()


def assert_step_follows_the_oracle(
    row: Row, optimizer: FlashOptimizer, parameter: Tensor, t: int, old: dict[str, Tensor]
) -> None:
    group = optimizer.param_groups[0]
    storage = optimizer.storage(group, parameter)
    state = {name: value for name, value in old.items() if name != "w"}
    assert parameter.grad is not None
    g = parameter.grad.double()
    hyper = {name: as_fp32(value) for name, value in row.hyper().items()}
    w = row.oracle(old["w"], g, state, t, **hyper)
    new = held(optimizer, parameter)

    slack = FP32_ERROR * (w - old["w"]).abs().max().item()
    bound = weight_bound(storage.weight, group["rounding"], w)
    assert_within(new["w"] - w, bound + slack)
    for name, format in storage.states:
        slack = FP32_ERROR * max(g.abs().max(), state[name].abs().max()).item()
        bound = 0.0
        if isinstance(format, Grouped):
            scale = scales_of(optimizer.state[parameter], name, parameter.shape[-1])
            rounding = group["rounding"] if format.signed else "dither"  # variances are dithered in any case
            bound = state_bound(format, rounding)(scale=scale)
        assert_within(new[name] - state[name], bound + slack)


@pytest.mark.parametrize("storage", STORAGES, ids=name_of)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_steps_err_by_no_more_than_the_formats_bounds(row: Row, storage: dict[str, Any]):
    options = {**storage}
    params = parameters(SHAPES, options.pop("dtype"))
    optimizer = row.optimizer(params, **row.options, **options, eager=True)
    zeros = {name: torch.zeros(()) for name, _ in optimizer.rule_of(optimizer.param_groups[0]).states}
    old = [{"w": p.detach().double(), **{name: torch.zeros(p.shape).double() for name in zeros}} for p in params]
    for t in range(1, STEPS + 1):
        give_gradients(params, t)
        optimizer.step()
        for number, parameter in enumerate(params):
            assert_step_follows_the_oracle(row, optimizer, parameter, t, old[number])
            old[number] = held(optimizer, parameter)


@pytest.mark.parametrize(
    ("name", "dtype", "bits", "quantize", "rounding", "shapes"),
    COMPILED,
    ids=[
        f"{name}-{str(dtype).removeprefix('torch.')}-{bits}-{rounding}"
        for name, dtype, bits, _, rounding, _ in COMPILED
    ],
)
def test_compiled_is_eager_bit_for_bit(name, dtype, bits, quantize, rounding, shapes):
    row = next(row for row in TABLE if row.name == name)
    kept = {"master_weight_bits": bits, "quantize": quantize, "rounding": rounding}
    one, other = (
        row.optimizer(parameters(shapes, dtype), **row.options, **kept, eager=eager) for eager in (True, False)
    )
    for t in range(1, STEPS + 1):
        for optimizer in (one, other):
            give_gradients(optimizer.param_groups[0]["params"], t)
            optimizer.step()
        assert_identical(stored(one), stored(other))


def test_the_table_has_every_rule_and_the_compiled_cases_every_storage():
    from flashopt_compile import optimizers
    from flashopt_compile.rules import adam, adamw, lion, sgd

    rules = {value for module in (adam, adamw, lion, sgd) for value in vars(module).values() if isinstance(value, Rule)}
    assert {row.optimizer.rule_of(row.hyper()) for row in TABLE} == rules
    classes = {
        value for value in vars(optimizers).values() if isinstance(value, type) and issubclass(value, FlashOptimizer)
    }
    assert {row.optimizer for row in TABLE} == classes - {FlashOptimizer}
    assert [case[0] for case in COMPILED] == [row.name for row in TABLE]
    for column, values in ((1, 3), (2, 3), (3, 2), (4, 2)):
        assert len({case[column] for case in COMPILED}) == values


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("t", [1, 2, 1000, 10**6])
def test_unbias_divides_by_the_weight_gathered(beta: float, t: int):
    beta32 = torch.tensor(beta)
    exact = 1 / (1 - beta32.item() ** t)
    assert unbias(torch.ones(()), beta32, torch.tensor(float(t))).item() == pytest.approx(exact, rel=1e-7)
    assert debias(beta32, torch.tensor(float(t)), torch.ones(3), power=0.5).item() == pytest.approx(
        exact**0.5, rel=1e-7
    )


def test_rules_that_return_w_or_moved_are_equivalent():
    @rule(m=Raw())
    def plain(w, g, m, t, *, lr=0.1):
        m = m + g
        return w - lr * m, m

    @rule(m=Raw())
    def moved(w, g, m, t, *, lr=0.1):
        m = m + g
        return Moved(w, -lr * m), m

    w, g, m, t = torch.randn(8), torch.randn(8), torch.randn(8), torch.tensor(1.0)
    (one, _), (two, _) = plain(w, g, m, t, lr=0.1), moved(w, g, m, t, lr=0.1)
    torch.testing.assert_close(one, two.w + two.by)


def test_rule_names_what_is_wrong_with_its_function():
    with pytest.raises(TypeError, match=r"'f' takes \(w, m, g, t\); it must take \(w, g, m, t\)"):
        rule(m=SIGNED8)(_named("f", lambda w, m, g, t, *, lr=1.0: (w, m)))
    with pytest.raises(TypeError, match=r"needs a keyword with a default .* beta lacks it"):
        rule(m=SIGNED8)(_named("f", lambda w, g, m, t, *, beta, lr=1.0: (w, m)))
    with pytest.raises(TypeError, match="lr lacks it"):
        rule()(_named("f", lambda w, g, t, *, rate=1.0: (w,)))
    with pytest.raises(TypeError, match=r"groups of \[32, 64\]; all must be of one size"):
        rule(m=Grouped(group_size=64), v=ROOT8)(_named("f", lambda w, g, m, v, t, *, lr=1.0: (w, m, v)))
    with pytest.raises(TypeError, match="has 6 states; allowed are at most 5"):
        states = dict.fromkeys("abcdef", SIGNED8)
        rule(**states)(_named("f", lambda w, g, a, b, c, d, e, f, t, *, lr=1.0: (w, a, b, c, d, e, f)))


def _named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function
