"""The worst error of every format: a sympy expression, a number, and a sentence.

Splitting. Rounding to the nearest of codes c = ulp(head)/2/L errs by c/2; forming the fp32 result rounds once
more, by half an fp32 ulp ε, unless that is coarser than the codes, when it undoes their error; and the tail
is itself computed in fp32, to 2^-24 of at most L codes:  c/2 + min(ε, c)/2 + 2^-25·ulp(head). A dithered
move of less than ulp(head) errs by a whole code at most, and by 2^-23·ulp(head) for the roundings on the way:
c + 2^-23·ulp(head), between the exact sums of head and tail, whichever of the two heads is the larger.

Companding. Codes lie where ψ(k/L) does. A value rounded to the nearest code errs by less than ψ changes over
half a code, a dithered one by less than over a whole one; the worst k is found by trying all L. fp32
arithmetic adds a few roundings of 2^-24 of the scale, magnified by ψ's steepest slope.
"""

from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch

from quant.compand import (
    FOURTH_ROOT,
    LINEAR,
    SIGNED_ROOT,
    SOFTSIGN,
    SQUARE_ROOT,
    Compander,
    Y,
    mu_law,
    rational,
    root,
)
from quant.grouped import Grouped
from quant.split import Split

HEAD_ULP = sympy.Symbol("ulp_head", positive=True)
FP32_ULP = sympy.Symbol("ulp_fp32", positive=True)
SCALE = sympy.Symbol("scale", positive=True)
LEVELS = sympy.Symbol("L", positive=True, integer=True)

# Roundings on the way there and back (ratio, bend, levels; levels, inverse bend, scale), with room for two more.
FP32_ROUNDINGS = 8
LEAST_FP32 = 2.0**-149


@dataclass(frozen=True)
class Bound:
    """The worst |decode(encode(x)) − x| of one format under one rounding."""

    format: str
    rounding: str
    bytes: float
    expression: sympy.Expr
    sentence: str

    def number(self, **values: float) -> float:
        """The bound for given `ulp_head` and `ulp_fp32`, or for a given `scale`."""
        symbols = self.expression.free_symbols
        missing = {str(symbol) for symbol in symbols} - values.keys()
        if missing:
            raise ValueError(f"the bound of {self.format} needs {' and '.join(sorted(missing))}.")
        return float(self.expression.subs({symbol: values[str(symbol)] for symbol in symbols}))

    def function(self) -> Callable[..., torch.Tensor]:
        """The bound as a function of float64 tensors, by keyword, for checking many values at once."""
        symbols = sorted(self.expression.free_symbols, key=str)
        evaluate = sympy.lambdify(symbols, self.expression, modules=[{"Min": torch.minimum}])
        return lambda **values: evaluate(**{str(symbol): values[str(symbol)] for symbol in symbols})


def split_bound(format: Split, rounding: str = "nearest") -> Bound:
    """The bound of a head and tail; with dither, of `Split.advance`, whose mean error is zero."""
    code = HEAD_ULP / (2 * format.levels)
    head, tail = str(format.head).removeprefix("torch."), str(format.tail).removeprefix("torch.")
    if rounding == "nearest":
        share = 4 * format.levels
        expression = code / 2 + sympy.Min(FP32_ULP, code) / 2 + HEAD_ULP * sympy.Rational(1, 2**25)
    else:
        share = 2 * format.levels
        expression = code + HEAD_ULP * sympy.Rational(1, 2**23) + LEAST_FP32
    return Bound(
        format=f"{head} + {tail}",
        rounding=rounding,
        bytes=format.head.itemsize + format.tail.itemsize,
        expression=expression,
        sentence=f"at most 1/{share} of the {head} spacing"
        + (", and half an fp32 ulp" if rounding == "nearest" else ""),
    )


def worst_step(compander: Compander, levels: int, codes: sympy.Expr) -> sympy.Expr:
    """The largest change of ψ over `codes` codes beside any code: exact, by trying every one of them."""
    fast = sympy.lambdify(Y, compander.inverse, modules="math")
    reach = float(codes.evalf())

    def change(k: int, side: int) -> float:
        return abs(fast(min(max(k + side * reach, 0), levels) / levels) - fast(k / levels))

    k, side = max(((k, side) for k in range(levels + 1) for side in (-1, 1)), key=lambda pair: change(*pair))
    at = LEVELS if k == levels else sympy.Integer(k)
    here, there = (compander.inverse.subs(Y, code / LEVELS) for code in (at, at + side * codes))
    return sympy.simplify(-side * (here - there))


def grouped_bound(format: Grouped, rounding: str = "nearest") -> Bound:
    """The bound of companded codes, as a share of the stored scale."""
    codes = sympy.Rational(1, 2) if rounding == "nearest" else sympy.Integer(1)
    step = worst_step(format.compander, format.levels, codes).subs(LEVELS, format.levels)
    if not format.signed:  # a value above zero gets code 1, however small it is
        step = sympy.Max(step, format.compander.inverse.subs(Y, sympy.Rational(1, format.levels)))
    slope = sympy.Max(*(sympy.diff(format.compander.inverse, Y).subs(Y, at) for at in (sympy.Rational(1, 256), 1)))
    arithmetic = FP32_ROUNDINGS * (1 + slope) * sympy.Rational(1, 2**24)
    kind = "int8" if format.signed else "uint8"
    return Bound(
        format=f"{format.compander.name}, {kind}/{format.group_size}",
        rounding=rounding,
        bytes=1 + 2 / format.group_size,
        expression=SCALE * (step + arithmetic) + LEAST_FP32,
        sentence=f"at most {float(step):.2%} of the group's scale",
    )


def mean_error() -> sympy.Expr:
    """The mean error of a dithered code, derived: y = n + f becomes n + 1 with odds f, else n.

    The fraction f is first rounded to as many bits as the noise has, half of the last of which is the most that the
    mean can be off: it keeps whole codes whole, which fp32 arithmetic moves by less.
    """
    n, f = sympy.symbols("n f", real=True)
    return sympy.simplify((1 - f) * n + f * (n + 1) - (n + f))


def mean_bend(format: Grouped) -> float:
    """How far the mean decoded value may lie from x when the mean code is right, as a share of the scale.

    A bent ψ lies off its chords: the largest gap, over all pairs of neighbouring codes and points between.
    """
    psi = sympy.lambdify(Y, format.compander.inverse, modules="math")
    levels = format.levels
    return max(
        abs((1 - f) * psi(k / levels) + f * psi((k + 1) / levels) - psi((k + f) / levels))
        for k in range(levels)
        for f in (0.25, 0.5, 0.75)
    )


SPLITS = tuple(Split(head, tail) for head in (torch.bfloat16, torch.float16) for tail in (torch.int8, torch.int16))
GROUPS = (
    *(Grouped(compander) for compander in (SIGNED_ROOT, SOFTSIGN, LINEAR, rational(3), mu_law())),
    *(Grouped(compander, signed=False) for compander in (SQUARE_ROOT, root(3), FOURTH_ROOT)),
)


def all_bounds() -> list[Bound]:
    return [
        *(split_bound(format, rounding) for format in SPLITS for rounding in ("nearest", "dither")),
        *(grouped_bound(format, rounding) for format in GROUPS for rounding in ("nearest", "dither")),
    ]


def table() -> str:
    """Every format with its derived bound, as text."""
    rows = [("format", "rounding", "bytes", "worst error, derived", "in words")]
    for bound in all_bounds():
        number = bound.number(ulp_head=1.0, ulp_fp32=0.0) if bound.expression.has(HEAD_ULP) else bound.number(scale=1.0)
        unit = "ulp(head)" if bound.expression.has(HEAD_ULP) else "scale"
        rows.append((bound.format, bound.rounding, f"{bound.bytes:.4g}", f"{number:.4g} {unit}", bound.sentence))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append(f"\nMean error of a dithered code: {mean_error()}.")
    return "\n".join(lines)
