"""A rule is an optimizer's mathematics: a pure fp32 function of weight, gradient, states and time.

It declares a format for each state, and knows nothing of bytes, groups, devices, shards or compilers.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant.dither import STREAMS
from quant.format import Format
from quant.grouped import Grouped
from quant.ulp import once


class Moved(NamedTuple):
    """The unevaluated sum w + by. The storage rounds it once, to its own grid instead of fp32's."""

    w: Tensor
    by: Tensor


@dataclass(frozen=True, eq=False)
class Rule:
    """One optimizer's mathematics: `function(w, g, *states, t, **hyper)` → (new w, *new states)."""

    name: str
    function: Callable[..., tuple[Any, ...]]
    states: tuple[tuple[str, Format], ...]
    hyper: tuple[tuple[str, Any], ...]

    def __call__(self, w: Tensor, g: Tensor, *rest: Tensor, **hyper: Any) -> tuple[Any, ...]:
        return self.function(w, g, *rest, **hyper)


def rule(**states: Format) -> Callable[[Callable[..., tuple[Any, ...]]], Rule]:
    """Make a `Rule` of a function. The keywords give each state's format.

    The function takes `w, g`, the states in the order named here, and `t` (the step, from 1), all 0-dim or
    of the same shape, then its hyper-parameters as keywords with defaults. Numbers arrive as 0-dim tensors,
    so changing them never recompiles. The function returns the new `w` (or `Moved(w, by)`, which keeps
    updates that fp32 would round away) and the new states.

    >>> from quant import Raw
    >>> @rule(m=Raw())
    ... def heavy_ball(w, g, m, t, *, lr=1e-3, momentum=0.9):
    ...     m = momentum * m + g
    ...     return w - lr * m, m
    >>> heavy_ball.hyper
    (('lr', 0.001), ('momentum', 0.9))
    """

    def make(function: Callable[..., tuple[Any, ...]]) -> Rule:
        name = getattr(function, "__name__", "rule")
        parameters = inspect.signature(function).parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        keywords = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        expected = ["w", "g", *states, "t"]
        if positional != expected:
            raise TypeError(f"rule {name!r} takes ({', '.join(positional)}); it must take ({', '.join(expected)}).")
        required = [key for key, default in keywords.items() if default is inspect.Parameter.empty]
        if required or "lr" not in keywords:
            lacking = ", ".join(required) or "lr"
            raise TypeError(
                f"rule {name!r} needs a keyword with a default for each hyper-parameter: {lacking} lacks it."
            )
        if len(states) >= len(STREAMS):
            raise TypeError(f"rule {name!r} has {len(states)} states; allowed are at most {len(STREAMS) - 1}.")
        sizes = {format.group_size for format in states.values() if isinstance(format, Grouped)}
        if len(sizes) > 1:
            raise TypeError(f"rule {name!r} has states in groups of {sorted(sizes)}; all must be of one size.")
        return Rule(name, function, tuple(states.items()), tuple(keywords.items()))

    return make


@cache
def unscaling(rule: Rule) -> Rule:
    """The same rule for gradients of a scaled loss: one more number, `inverse_scale`, unscales them in fp32."""

    def function(w: Tensor, g: Tensor, *rest: Tensor, inverse_scale: Tensor, **hyper: Any) -> tuple[Any, ...]:
        return rule(w, g * inverse_scale, *rest, **hyper)

    return Rule(f"{rule.name}_unscaling", function, rule.states, (*rule.hyper, ("inverse_scale", 1.0)))


def ema(average: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    """The exponential average β·average + (1 − β)·x."""
    return average + number(1 - beta, average) * (x - average)


def number(x: Any, by: Tensor) -> Tensor:
    """x, made of hyper-parameters, computed once per call instead of once per element of `by`, which uses it."""
    return once(x, by)


def unbias(average: Tensor, beta: Tensor, t: Tensor) -> Tensor:
    """An exponential average started at zero, divided by the weight 1 − β^t it has gathered by step t."""
    return average * debias(beta, t, average)


def debias(beta: Tensor, t: Tensor, by: Tensor, power: float = 1.0) -> Tensor:
    """1/(1 − β^t) to the `power`, a number: the correction at step t of an exponential average started at zero.

    It uses −expm1(t·log β) in double precision, as 1 − β**t in fp32 is off by 2e-5. `by` is the tensor that uses it.
    """
    if by.device != t.device:
        return torch.ops.flashopt_compile.debias(beta, t, power)
    gathered = -torch.expm1(t.double() * beta.double().log())
    return number((gathered**-power).float(), by)


# For GPUs. As an operator of its own it is computed once per call, from two numbers on the CPU. Written out, as it is
# for numbers on the device, the logarithm is taken by every thread.
_LIBRARY = torch.library.Library("flashopt_compile", "DEF")
_LIBRARY.define("debias(Tensor beta, Tensor t, float power) -> Tensor")


def _debias(beta: Tensor, t: Tensor, power: float) -> Tensor:
    b = beta.item()
    gathered = -math.expm1(t.item() * math.log(b)) if b else 1.0
    return torch.tensor(gathered**-power, dtype=torch.float32, device=t.device)


def _debias_shape(beta: Tensor, t: Tensor, power: float) -> Tensor:
    return torch.empty_like(t, dtype=torch.float32)


_LIBRARY.impl("debias", _debias, "CompositeExplicitAutograd")
torch.library.register_fake("flashopt_compile::debias", _debias_shape)
