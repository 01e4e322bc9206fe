"""The error bounds: every format has one, its three forms agree, and brute force confirms that it is tight."""

import math
import re

import numpy as np
import pytest
import sympy
import torch

from quant import ROOT8, SIGNED8, Grouped
from quant.bounds import GROUPS, SPLITS, Bound, all_bounds, grouped_bound, mean_bend, mean_error, split_bound, table
from quant.compand import LINEAR, SOFTSIGN, Y, mu_law

BOUNDS = all_bounds()
OTHERS = (Grouped(LINEAR, signed=False), Grouped(SOFTSIGN, signed=False), Grouped(mu_law(15)))
ROUNDINGS = ("nearest", "dither")


def name(bound: Bound) -> str:
    return f"{bound.format} {bound.rounding}"


def values_of(bound: Bound) -> dict[str, float]:
    return (
        {"ulp_head": 2.0**-7, "ulp_fp32": 2.0**-23}
        if "ulp_head" in map(str, bound.expression.free_symbols)
        else {"scale": 3.0}
    )


def test_table_lists_every_format_with_both_roundings():
    lines = table().splitlines()
    for bound in BOUNDS:
        (line,) = [
            line for line in lines if line.startswith(bound.format) and line.split("  ")[1:] and bound.rounding in line
        ]
        assert bound.sentence in line
    assert len(BOUNDS) == 2 * (len(SPLITS) + len(GROUPS))
    assert {SIGNED8, ROOT8} <= set(GROUPS)
    assert len({(split.head, split.tail) for split in SPLITS}) == 4


def test_table_prints_the_number_of_the_expression():
    for line, bound in zip(table().splitlines()[2:], BOUNDS, strict=False):
        shown = float(re.search(r"([\d.e-]+) (?:ulp\(head\)|scale)", line)[1])  # pyright: ignore
        unit = (
            {"scale": 1.0} if "scale" in map(str, bound.expression.free_symbols) else {"ulp_head": 1.0, "ulp_fp32": 0.0}
        )
        assert shown == pytest.approx(bound.number(**unit), rel=1e-3)


@pytest.mark.parametrize("bound", BOUNDS, ids=name)
def test_expression_number_and_function_agree(bound: Bound):
    values = values_of(bound)
    assert isinstance(bound.expression, sympy.Expr) and bound.expression.free_symbols
    number = bound.number(**values)
    assert 0 < number < math.inf
    tensors = {key: torch.tensor([value, 2 * value], dtype=torch.float64) for key, value in values.items()}
    at_values, at_twice = bound.function()(**tensors).tolist()
    assert at_values == pytest.approx(number, rel=1e-12)
    assert at_twice == pytest.approx(2 * number, rel=1e-12)  # bounds scale with their units


@pytest.mark.parametrize("bound", BOUNDS, ids=name)
def test_sentence_says_the_number(bound: Bound):
    if percent := re.fullmatch(r"at most ([\d.]+)% of the group's scale", bound.sentence):
        assert float(percent[1]) / 100 == pytest.approx(bound.number(scale=1.0), abs=6e-5)
    else:
        share = re.match(r"at most 1/(\d+) of the (bfloat16|float16) spacing", bound.sentence)
        assert share and 1 / int(share[1]) == pytest.approx(bound.number(ulp_head=1.0, ulp_fp32=0.0), rel=0.01)
        assert bound.sentence.endswith(", and half an fp32 ulp") == bound.expression.has(
            sympy.Symbol("ulp_fp32", positive=True)
        )


@pytest.mark.parametrize("format", SPLITS, ids=str)
def test_split_bound_counts_bytes_and_codes(format):
    bound = split_bound(format)
    assert bound.bytes == format.head.itemsize + format.tail.itemsize
    code = 1 / (2 * format.levels)
    # Half a code where fp32 is far finer than the codes; a rounding to fp32 is added where it is as coarse as the head.
    assert bound.number(ulp_head=1.0, ulp_fp32=0.0) == pytest.approx(code / 2, rel=0.01)
    assert bound.number(ulp_head=1.0, ulp_fp32=1.0) == pytest.approx(code, rel=0.01)
    assert split_bound(format, "dither").number(ulp_head=1.0) == pytest.approx(code, rel=0.01)


@pytest.mark.parametrize("format", [*GROUPS, *OTHERS], ids=lambda format: f"{format.compander.name} {format.signed}")
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_grouped_bound_is_the_largest_error_that_brute_force_finds(format: Grouped, rounding: str):
    """Check all ratios of a fine grid in float64, rounded to the nearest code or to the farther of two neighbours."""
    psi = sympy.lambdify(Y, format.compander.inverse, "numpy")
    values = np.concatenate([[0.0], psi(np.arange(1, format.levels + 1) / format.levels)])
    y = np.linspace(1e-12, 1, 1_000_003)
    ratio = psi(y)
    low = np.floor(y * format.levels).clip(0, format.levels - 1).astype(int)
    if rounding == "nearest":
        code = np.rint(y * format.levels).astype(int)
        worst = abs(ratio - values[code if format.signed else code.clip(1)]).max()
    else:
        worst = np.maximum(ratio - values[low], values[low + 1] - ratio).max()
    limit = grouped_bound(format, rounding).number(scale=1.0)
    assert 0.999 * limit < worst <= limit
    assert grouped_bound(format, rounding).bytes == 1 + 2 / 32


@pytest.mark.parametrize("format", [*GROUPS, *OTHERS], ids=lambda format: f"{format.compander.name} {format.signed}")
def test_mean_bend_is_the_largest_gap_to_the_chords(format: Grouped):
    psi = sympy.lambdify(Y, format.compander.inverse, "numpy")
    values = np.concatenate([[0.0], psi(np.arange(1, format.levels + 1) / format.levels)])
    f = np.linspace(0.0, 1.0, 65)[1:-1, None]
    between = psi((np.arange(format.levels) + f) / format.levels)
    gap = abs((1 - f) * values[:-1] + f * values[1:] - between).max()
    assert gap <= mean_bend(format) * 1.02 + 1e-12
    assert mean_bend(format) <= gap + 1e-12
    assert mean_bend(format) < 0.05 * grouped_bound(format, "dither").number(scale=1.0)


def test_mean_error_of_dither_is_zero():
    assert mean_error() == 0
    assert "Mean error of" in table() and "dither" in table().splitlines()[-1]


@pytest.mark.parametrize(
    "bound, values, message",
    [
        (split_bound(SPLITS[0]), {}, "the bound of bfloat16 + int8 needs ulp_fp32 and ulp_head."),
        (split_bound(SPLITS[0]), {"ulp_head": 1.0}, "the bound of bfloat16 + int8 needs ulp_fp32."),
        (split_bound(SPLITS[0], "dither"), {"scale": 1.0}, "the bound of bfloat16 + int8 needs ulp_head."),
        (grouped_bound(GROUPS[0]), {}, "the bound of signed root, int8/32 needs scale."),
    ],
)
def test_missing_symbol_is_named(bound: Bound, values: dict[str, float], message: str):
    with pytest.raises(ValueError) as raised:
        bound.number(**values)
    assert str(raised.value) == message
