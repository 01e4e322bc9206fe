"""The worst error of every format: a sympy expression, a number, and a sentence.

Splitting. Rounding to the nearest code, c = ulp(head)/2/L apart, errs by c/2. Forming the fp32 result rounds
once more, by half an fp32 ulp ε; if ε is coarser than the codes, that undoes their error. The tail is itself
computed in fp32, to 2^-24 of at most L codes. The sum is c/2 + min(ε, c)/2 + 2^-25·ulp(head). A dithered move
of less than ulp(head) errs by at most a whole code, and by 2^-23·ulp(head) for intermediate roundings:
c + 2^-23·ulp(head), between the exact sums of head and tail, where ulp(head) is the larger head's.

Companding. Code k decodes to ψ(k/L). Rounding to the nearest code errs by less than ψ's change over half a
code, dither by less than its change over a whole code; the worst k is found by trying all L. fp32 arithmetic
adds a few roundings of 2^-24 of the scale, magnified by ψ's steepest slope.
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

# Roundings in encode (ratio, bend, levels) and decode (levels, inverse bend, scale), with room for two more.
FP32_ROUNDINGS = 8
LEAST_FP32 = 2.0**-149
# A GPU's `rsqrt` is within two ulps (PTX: 2^-22.9; AMD: one ulp).
INVERSE_ROOT = sympy.Rational(1, 2**22)


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
        """The bound as a function of float64 tensors, given by keyword, to check many values at once."""
        symbols = sorted(self.expression.free_symbols, key=str)
        evaluate = sympy.lambdify(symbols, self.expression, modules=[{"Min": torch.minimum}])
        return lambda **values: evaluate(**{str(symbol): values[str(symbol)] for symbol in symbols})


def split_bound(format: Split, rounding: str = "nearest") -> Bound:
    """The bound of a head and tail. With dither it is that of `Split.advance`, whose mean error is zero."""
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
    """The largest change of ψ over `codes` codes next to any code. It is exact, as all codes are tried."""
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


def gpu_distance(format: Grouped) -> sympy.Expr:
    """How many codes a GPU's unrounded code may lie from a CPU's, for the same value and scale.

    A dithered code differs, by one, with no greater probability on average. With ψ(y) = yⁿ and n = 2^k, a GPU takes
    inverse roots, each off by `INVERSE_ROOT`, of which 2k reach the code (halves of some, which later roots leave). All
    other roundings, a CPU's and a GPU's, are of 2^-24 and eleven at most.
    """
    degree = format.compander.inverse.as_base_exp()[1]
    if degree not in (2, 4):
        raise ValueError(f"compander {format.compander.name!r} has the same formulas on a GPU.")
    roots = 2 * sympy.log(degree, 2)
    return format.levels * (roots * INVERSE_ROOT + 11 * sympy.Rational(1, 2**24))


def mean_error() -> sympy.Expr:
    """Derive the mean error of a dithered code: y = n + f becomes n + 1 with probability f, else n.

    The fraction f is first rounded to the noise's bits, so the mean may be off by half of the last bit. This keeps
    whole codes whole, because fp32 arithmetic moves them by less.
    """
    n, f = sympy.symbols("n f", real=True)
    return sympy.simplify((1 - f) * n + f * (n + 1) - (n + f))


def mean_bend(format: Grouped) -> float:
    """The largest error of the mean decoded value if the mean code is right, as a share of the scale.

    It is the largest gap between ψ and its chords, over all pairs of neighbouring codes and points between.
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
    """A text table of every format's derived bound."""
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
