"""Companders: the derived inverse undoes each, generated functions equal the expression, bad ones are refused."""

import copy
import pickle

import numpy as np
import pytest
import sympy
import torch

from quant.compand import (
    FOURTH_ROOT,
    LINEAR,
    SIGNED_ROOT,
    SOFTSIGN,
    SQUARE_ROOT,
    Compander,
    X,
    Y,
    mu_law,
    rational,
    root,
)
from quant.grouped import SLACK, Grouped

OWN = Compander("own", "5*x / (1 + 4*Abs(x))")
HYPERBOLIC = Compander("hyperbolic", "asinh(10*x) / asinh(10)")
CUBIC = Compander("cubic", "(x + x**3) / 2")
ODD = [
    LINEAR,
    SOFTSIGN,
    SIGNED_ROOT,
    Compander("signed fourth root", "sign(x) * Abs(x)**(1/4)"),
    rational(3),
    rational(sympy.Rational(1, 2)),
    rational(100),
    mu_law(),
    mu_law(15),
    OWN,
]
ROOTS = [SQUARE_ROOT, root(3), FOURTH_ROOT, root(5), root(8)]
each = pytest.mark.parametrize("compander", [*ODD, HYPERBOLIC, CUBIC, *ROOTS], ids=lambda compander: compander.name)


@each
def test_inverse_undoes_the_compander_to_40_digits(compander: Compander):
    for n in range(1, 41):
        y = sympy.Rational(n, 40)
        x = compander.inverse.subs(Y, y)
        assert abs(sympy.N(compander.expression.subs(X, x) - y, 40)) < sympy.Float("1e-35")


@each
def test_compander_maps_zero_to_zero_one_to_one_and_rises(compander: Compander):
    phi = sympy.lambdify(X, compander.expression, "numpy")
    values = phi(np.linspace(0, 1, 10_001))
    assert values[0] == 0 and values[-1] == pytest.approx(1, abs=1e-15)
    assert (np.diff(values) > 0).all()


@each
@pytest.mark.parametrize("levels", [127, 255])
def test_torch_functions_are_the_expression(compander: Compander, levels: int):
    """Compare with sympy's own numpy printer, in float64, for all magnitudes that a group's scale may have."""
    phi, psi = (sympy.lambdify(symbol, e, "numpy") for symbol, e in ((X, compander.expression), (Y, compander.inverse)))
    ratio = np.linspace(-1 if compander.odd else 0, 1, 2001)
    codes = np.arange(-levels if compander.odd else 0, levels + 1)
    for scale in (1.0, 3.7e-30, 2.0**-118, 2.0**127):
        scale_tensor = torch.tensor(scale, dtype=torch.float64)
        compressed = compander.compressor(levels)(torch.from_numpy(ratio * scale), scale_tensor)
        np.testing.assert_allclose(compressed.numpy(), levels * phi(ratio * scale / scale), rtol=1e-12, atol=1e-12)
        expanded = compander.expander(levels)(torch.from_numpy(codes.astype(float)), scale_tensor)
        expected = scale * np.sign(codes) * psi(np.maximum(np.abs(codes), 1e-300) / levels) * (codes != 0)
        np.testing.assert_allclose(expanded.numpy(), expected, rtol=1e-12, atol=0)


@each
@pytest.mark.parametrize("levels", [127, 255])
def test_torch_functions_depend_on_the_ratio_alone_in_fp32_at_every_scale(compander: Compander, levels: int):
    """Nothing overflows or vanishes between the smallest scale and the largest that the compander admits."""
    codes = torch.arange(-levels if compander.odd else 0, levels + 1).float()
    compress, expand, largest = (
        compander.compressor(levels),
        compander.expander(levels),
        compander.largest_scale(levels),
    )
    at_one = expand(codes, torch.ones(()))
    for scale in [*(2.0**exponent for exponent in range(-118, 128) if 2.0**exponent <= largest), largest]:
        values = expand(codes, torch.tensor(scale))
        assert torch.allclose(values / scale, at_one, rtol=1e-5, atol=2.0**-149 / scale)
        held = at_one[at_one.abs() * scale >= 2.0**-126].clamp(-1, 1)
        assert torch.allclose(compress(held * scale, torch.tensor(scale)), compress(held, torch.ones(())), rtol=1e-5)
    assert largest >= 2.0**112
    assert not expand(torch.zeros(3), torch.tensor([0.0, 2.0**-118, 1.0])).any()


@each
@pytest.mark.parametrize("levels", [127, 255])
def test_top_code_is_the_scale_itself(compander: Compander, levels: int):
    """The encoder's SLACK must cover the difference for every bf16 scale, or scales would creep up at each encoding.

    Fractions are exact; powers and others are off by their rounding."""
    scales = 1 + torch.arange(128) / 128
    top = compander.expander(levels)(torch.full((128,), float(levels)), scales)
    assert ((top - scales).abs() < SLACK * scales).all()
    is_fraction = compander.inverse.is_rational_function(Y) and sympy.fraction(compander.inverse)[1].has(Y)
    assert torch.equal(top, scales) or not is_fraction


def test_shipped_formats_admit_1e38():
    assert SOFTSIGN.largest_scale(127) > 1e38
    assert min(compander.largest_scale(255) for compander in ROOTS) > 3e38


@each
def test_odd_companders_are_recognized(compander: Compander):
    assert compander.odd == (compander not in ROOTS)


def test_own_compander_takes_one_line():
    assert sympy.simplify(Compander("gentle", "3*x / (1 + 2*Abs(x))").inverse - Y / (3 - 2 * Y)) == 0


def test_rational_family_holds_linear_and_softsign():
    assert sympy.simplify(rational(0).expression - LINEAR.expression) == 0
    assert sympy.simplify(rational(1).expression - SOFTSIGN.expression) == 0


@each
def test_companders_compare_by_value(compander: Compander):
    for twin in (
        Compander(compander.name, compander.expression),
        pickle.loads(pickle.dumps(compander)),
        copy.deepcopy(compander),
    ):
        assert twin == compander and hash(twin) == hash(compander) and repr(twin) == repr(compander)
        codes, scale = torch.arange(0.0, 128), torch.tensor(2.0)
        assert torch.equal(twin.expander(127)(codes, scale), compander.expander(127)(codes, scale))
    assert compander != Compander("another name", compander.expression)


@pytest.mark.parametrize("signed", [True, False])
def test_formats_compare_by_value(signed: bool):
    format = Grouped(SOFTSIGN, signed, 64)
    for twin in (Grouped(SOFTSIGN, signed, 64), pickle.loads(pickle.dumps(format)), copy.deepcopy(format)):
        assert twin == format and hash(twin) == hash(format)
    assert format != Grouped(SOFTSIGN, signed, 32)


@pytest.mark.parametrize(
    "expression, reason",
    [
        ("x + 1", "must map 0 to 0 and 1 to 1"),
        ("2*x", "must map 0 to 0 and 1 to 1"),
        ("1 - x", "must map 0 to 0 and 1 to 1"),
        ("4*x - 3*x**2", "must rise from 0 to 1 without a fall"),
        ("x**3 - x**2 + x - 20*x**2*(1 - x)", "must rise from 0 to 1 without a fall"),
        ("x*(2*x - 1)", "must rise from 0 to 1 without a fall"),
        ("(x + sin(x)/sin(1)) / 2", "cannot be inverted in a real closed form"),
        ("besselj(1, x) / besselj(1, 1)", "cannot be inverted in a real closed form"),
        ("LambertW(x) / LambertW(1)", "uses a function that torch does not have"),
        ("x*k", "must be an expression in x alone"),
        ("1", "must be an expression in x alone"),
    ],
)
def test_bad_compander_gets_one_clear_sentence(expression: str, reason: str):
    with pytest.raises(ValueError, match=reason) as raised:
        Compander("bad", expression)
    message = str(raised.value)
    assert message.startswith("compander 'bad' = ") and message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("text", ["x +", "import os", "2 x", "x**"])
def test_text_that_is_not_an_expression_is_quoted(text: str):
    with pytest.raises(ValueError) as raised:
        Compander("bad", text)
    assert str(raised.value) == f"compander 'bad' = {text} is not an expression that sympy can read."


@pytest.mark.parametrize("compander", ROOTS, ids=lambda compander: compander.name)
def test_compander_that_is_not_odd_is_refused_for_signed_codes(compander: Compander):
    with pytest.raises(ValueError, match=rf"compander '{compander.name}' = .* is not odd; signed codes need") as raised:
        Grouped(compander, signed=True)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
