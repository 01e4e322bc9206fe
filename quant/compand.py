"""Companders as sympy expressions, which bend a group's values into codes and back.

A compander φ maps [0, 1] onto itself and rises; an odd φ also serves signed values. Its inverse ψ, the torch
functions of both and (in `quant.bounds`) the worst error are all derived from the expression.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import sympy
import torch
from sympy.printing.pycode import PythonCodePrinter
from torch import Tensor

from quant.ulp import fourth_root, inverse_root, inverse_root_of_size, on_gpu, once, spread, sqrt, with_sign

X = sympy.Symbol("x", real=True)
Y = sympy.Symbol("y", positive=True)
# Stand-ins for the tensors in generated functions. No function name contains their names.
VALUE = sympy.Symbol("VALUE", positive=True)
SCALE = sympy.Symbol("scale", positive=True)
LEVELS = (127, 255)  # codes above zero of int8 and uint8
TorchFunction = Callable[[Tensor, Tensor], Tensor]
_PROBES = tuple(sympy.Rational(n, 17) for n in range(1, 17))


@dataclass(frozen=True)
class Compander:
    """φ as a sympy expression (or text) in `x`, checked and inverted once.

    >>> Compander("gentle", "3*x / (1 + 2*Abs(x))").inverse
    -y/(2*y - 3)
    >>> Compander("dented", "4*x - 3*x**2")
    Traceback (most recent call last):
        ...
    ValueError: compander 'dented' = -3*x**2 + 4*x must rise from 0 to 1 without a fall.
    """

    name: str
    expression: sympy.Expr
    inverse: sympy.Expr = field(init=False)
    odd: bool = field(init=False, repr=False, compare=False)
    _functions: dict[int, tuple[TorchFunction, TorchFunction]] = field(init=False, repr=False, compare=False)
    _largest_scales: dict[int, float] = field(init=False, repr=False, compare=False)

    def __init__(self, name: str, expression: sympy.Expr | str) -> None:
        try:
            parsed = sympy.sympify(expression, locals={"x": X})  # pyright: ignore[reportCallIssue]
        except (sympy.SympifyError, SyntaxError, TypeError) as error:
            raise ValueError(f"compander {name!r} = {expression} is not an expression that sympy can read.") from error
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "expression", parsed)
        if parsed.free_symbols != {X}:
            raise ValueError(f"compander {name!r} = {parsed} must be an expression in x alone.")
        object.__setattr__(self, "inverse", self._invert())
        # Do all of sympy's work here: users may compile the methods below, and Dynamo cannot trace sympy.
        object.__setattr__(self, "odd", sympy.simplify(parsed + parsed.subs(X, -X)) == 0)
        try:
            functions = {levels: (self._compressor(levels), self._expander(levels)) for levels in LEVELS}
        except (NameError, TypeError, NotImplementedError) as error:
            raise self._fails("uses a function that torch does not have") from error
        largest = {levels: self._find_largest_scale(levels, *pair) for levels, pair in functions.items()}
        object.__setattr__(self, "_functions", functions)
        object.__setattr__(self, "_largest_scales", largest)

    def __reduce__(self) -> tuple[type, tuple[str, sympy.Expr]]:
        return Compander, (self.name, self.expression)

    def _fails(self, reason: str) -> ValueError:
        return ValueError(f"compander {self.name!r} = {self.expression} {reason}.")

    def _invert(self) -> sympy.Expr:
        phi = sympy.simplify(self.expression.subs(X, VALUE))
        if sympy.limit(phi, VALUE, 0, "+") != 0 or sympy.simplify(phi.subs(VALUE, 1) - 1) != 0:
            raise self._fails("must map 0 to 0 and 1 to 1")
        rising = [phi.subs(VALUE, probe).evalf() for probe in (*_PROBES, 1)]
        if not all(value.is_real for value in rising) or any(
            low >= high for low, high in zip([0, *rising], rising, strict=False)
        ):
            raise self._fails("must rise from 0 to 1 without a fall")
        try:
            candidates = sympy.solve(sympy.Eq(phi, Y), VALUE)
        except NotImplementedError:
            candidates = []
        for psi in candidates:
            undone = [(psi.subs(Y, phi.subs(VALUE, probe)) - probe).evalf() for probe in _PROBES]
            if all(abs(difference) < 1e-9 for difference in undone) and psi.free_symbols <= {Y}:
                return sympy.simplify(psi)
        raise self._fails("cannot be inverted in a real closed form")

    def compressor(self, levels: int) -> TorchFunction:
        """The torch function (values, scale) → levels · φ(values / scale), not yet rounded."""
        return self._functions[levels][0]

    def expander(self, levels: int) -> TorchFunction:
        """The torch function (codes, scale) → scale · ψ(codes / levels)."""
        return self._functions[levels][1]

    def largest_scale(self, levels: int) -> float:
        """The largest scale at which no intermediate result of either function overflows."""
        return self._largest_scales[levels]

    @property
    def _degree(self) -> int | None:
        """n if ψ(y) = yⁿ and the n-th root is a chain of square roots, else None."""
        base, exponent = self.inverse.as_base_exp()
        return int(exponent) if base == Y and exponent in (2, 4, 8) else None

    def _compressor(self, levels: int) -> TorchFunction:
        if not self._degree:
            return self._quotient(levels)
        on_cpu, squares = self._quotient(levels), int(self._degree).bit_length() - 1

        def compress(value: Tensor, scale: Tensor) -> Tensor:
            if not on_gpu(value):
                return on_cpu(value, scale)
            for _ in range(squares - 1):
                scale = scale * inverse_root_of_size(scale)
            if self.odd:
                for _ in range(squares):
                    value = value * inverse_root_of_size(value)
            else:
                for _ in range(squares // 2):
                    value = fourth_root(value)
                value = sqrt(value) if squares % 2 else value
            return value * spread(inverse_root(scale) * levels, value)

        return compress

    def _quotient(self, levels: int) -> TorchFunction:
        phi = levels * sympy.simplify(self.expression.subs(X, VALUE))
        merged = _torch_function(phi.subs(VALUE, VALUE / SCALE), self.odd)
        exponents = [sympy.fraction(power.exp) for power in phi.atoms(sympy.Pow)]
        exact_roots = all(below.is_Integer and int(below).bit_count() == 1 for _, below in exponents)
        if exact_roots and all(_compresses(merged, scale) for scale in _ORDINARY_SCALES):
            return merged
        of_ratio = _torch_function(phi, self.odd)  # powers of scale and value would overflow, or round badly
        return lambda value, scale: of_ratio(value / spread(scale, value), scale)

    def _expander(self, levels: int) -> TorchFunction:
        if self._degree:
            return self._power(levels, int(self._degree).bit_length() - 1)
        merged = _torch_function(SCALE * self.inverse.subs(Y, VALUE / levels), self.odd)
        if sympy.fraction(self.inverse)[1].has(Y) and all(
            _expands(merged, levels, scale) for scale in _ORDINARY_SCALES
        ):
            return merged
        # Without a denominator to absorb `levels`, divide the codes by it: levels^-4 would underflow the scale.
        return _torch_function(SCALE * self.inverse.subs(Y, VALUE), self.odd, unit=1 / levels)

    def _power(self, levels: int, squares: int) -> TorchFunction:
        """scale · (codes / levels)^n as a power of one product, which contains the scale's root."""

        def expand(codes: Tensor, scale: Tensor) -> Tensor:
            if on_gpu(codes):
                return expand_on_gpu(codes, scale)
            root = scale
            for _ in range(squares):
                root = sqrt(root)
            y = power = codes * spread(once(root * (1 / levels)), codes)
            if self.odd and squares == 1:
                return y * y.abs()
            for _ in range(squares):
                power = torch.square(power)
            return with_sign(power, y) if self.odd else power

        def expand_on_gpu(codes: Tensor, scale: Tensor) -> Tensor:
            # The first square is exact, and takes in the levels: one root of the scale less.
            for _ in range(squares - 1):
                scale = scale * inverse_root_of_size(scale)
            square = codes * codes.abs() if self.odd else torch.square(codes)
            power = square * spread(scale * levels**-2, codes)
            for _ in range(squares - 1):
                power = power * power.abs() if self.odd else torch.square(power)
            return power

        return expand

    def _find_largest_scale(self, levels: int, compress: TorchFunction, expand: TorchFunction) -> float:
        for exponent in range(127, 0, -1):
            scale = (2 - 2.0**-7) * 2.0**exponent  # the largest bf16 of the binade
            if _compresses(compress, scale) and _expands(expand, levels, scale):
                return scale
        raise self._fails("cannot be computed in fp32")


_ORDINARY_SCALES = (2.0**-118, 2.0**100)
_SHARES = torch.arange(1, 9, dtype=torch.float32, device="cpu") / 8


def _compresses(function: TorchFunction, scale: float) -> bool:
    """True if `function` depends only on the ratio at this scale too: nothing overflows or vanishes."""
    one, scale_tensor = torch.ones_like(_SHARES), torch.full_like(_SHARES, scale)
    return torch.allclose(function(_SHARES * scale, scale_tensor), function(_SHARES, one), rtol=1e-6)


def _expands(function: TorchFunction, levels: int, scale: float) -> bool:
    one, scale_tensor = torch.ones_like(_SHARES), torch.full_like(_SHARES, scale)
    return torch.allclose(function(_SHARES * levels, scale_tensor) / scale, function(_SHARES * levels, one), rtol=1e-6)


def _torch_function(expression: sympy.Expr, odd: bool, unit: float = 1.0) -> TorchFunction:
    """Turn `expression` in VALUE ≥ 0 and SCALE into a function of tensors, extended to negative values if `odd`."""
    merged = sympy.cancel(sympy.together(expression.rewrite(sympy.exp)))  # one division where there were two
    numerator, denominator = sympy.fraction(merged)
    if denominator.subs(VALUE, 0).is_negative:
        numerator, denominator = -numerator, -denominator
    # Compute factors that depend only on the scale once per group, not once per element.
    group_top, top = numerator.as_independent(VALUE, as_Add=False)
    group_bottom, bottom = denominator.as_independent(VALUE, as_Add=False)
    text = _TorchPrinter().doprint
    group = text(group_top / group_bottom)
    element = f"({text(top)})"
    signed = False
    if odd:
        slope = sympy.cancel(top / VALUE)
        signed = top.is_Pow and not slope.subs(VALUE, 0).is_finite  # a root, which is exactly 0 at 0
        if not signed:
            finite = slope.subs(VALUE, 0).is_finite
            element = "value" if slope == 1 else f"value * ({text(slope)})" if finite else f"value.sign() * {element}"
    if bottom != 1:
        element += f" / ({text(bottom)})"
    element = element.replace("scale", "spread(scale, value)")
    if "scale" in group:
        group = f"spread({group if group == 'scale' else f'once({group})'}, value)"
    if signed:
        body = f"with_sign({group} * {element}, value)"
    else:
        body = element if group == "1.0" else f"({group}) * ({element})"
    body = body.replace(str(VALUE), "value.abs()" if odd else "value")
    if unit != 1:
        body = body.replace("value", f"(value * {unit!r})")
    names = {"sqrt": sqrt, "square": torch.square, "with_sign": with_sign, "once": once, "spread": spread}
    return eval(f"lambda value, scale: {body}", names)


class _TorchPrinter(PythonCodePrinter):
    """sympy → Python source on tensors: roots by repeated square roots, small powers by products."""

    def _print(self, expr: sympy.Basic, **settings: object) -> str:
        if isinstance(expr, sympy.Expr) and expr.is_number:
            return repr(float(expr))
        if isinstance(expr, sympy.Function) and hasattr(Tensor, expr.func.__name__):
            return f"({self._print(expr.args[0])}).{expr.func.__name__}()"
        return super()._print(expr, **settings)

    def _print_Pow(self, expr: sympy.Pow, **_: object) -> str:
        base, exponent = self._print(expr.base), expr.exp
        if exponent.is_Rational and exponent > 0:
            for power, function in ((exponent, "square"), (1 / exponent, "sqrt")):
                if power.is_Integer and int(power).bit_count() == 1:
                    return f"{function}(" * (int(power).bit_length() - 1) + base + ")" * (int(power).bit_length() - 1)
        if exponent.is_Integer and 0 < exponent < 8:
            return "(" + " * ".join([f"({base})"] * int(exponent)) + ")"
        if exponent.is_negative:
            return f"(1.0 / ({self._print(1 / expr)}))"
        return f"(({base}) ** {self._print(exponent)})"


@cache
def root(degree: int) -> Compander:
    """x^(1/degree), for variances. With a higher degree, a value may lie further below its neighbours."""
    return Compander(
        {2: "square root", 3: "cube root", 4: "fourth root"}.get(degree, f"root {degree}"),
        X ** sympy.Rational(1, degree),
    )


@cache
def rational(k: int | sympy.Rational) -> Compander:
    """(1+k)·x / (1+k·|x|): linear at k = 0, softsign at k = 1, finer about zero as k grows."""
    return Compander(f"rational k={k}", (1 + k) * X / (1 + k * sympy.Abs(X)))


@cache
def mu_law(mu: int = 255) -> Compander:
    """sign(x)·log(1+μ|x|)/log(1+μ): nearly the same relative error at every magnitude above 1/μ."""
    return Compander(f"mu-law {mu}", sympy.sign(X) * sympy.log(1 + mu * sympy.Abs(X)) / sympy.log(1 + mu))


LINEAR = Compander("linear", X)
SOFTSIGN = Compander("softsign", 2 * X / (1 + sympy.Abs(X)))
SIGNED_ROOT = Compander("signed root", sympy.sign(X) * sympy.sqrt(sympy.Abs(X)))
SQUARE_ROOT = root(2)
FOURTH_ROOT = root(4)
