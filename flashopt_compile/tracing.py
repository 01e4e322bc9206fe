"""Between an optimizer and a graph that a caller compiles: what the graph is given, and what it gives back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from flashopt_compile.distributed import shards
from flashopt_compile.engine.numbers import floats
from flashopt_compile.engine.step import Numbers
from flashopt_compile.engine.step import trace as trace_step
from flashopt_compile.inductor import operator
from flashopt_compile.options import check_gradient, check_state
from flashopt_compile.rule import Rule
from flashopt_compile.stepping import (
    Stepped,
    checked_hyper_of,
    gradient,
    is_skipped,
    is_trained,
    named,
    state_of,
    step_of,
    tensors_of,
)


class Traced(Stepped, Protocol):
    """What tracing needs to know of an optimizer."""

    handle: Tensor
    rules: list[Rule]


def trace(optimizer: Traced, alone: bool) -> None:
    """Step inside a graph that the caller is compiling, of which the step may be all.

    As one operator, which runs our own kernels; that of an `eager` optimizer operation by operation.
    """
    if optimizer.eager:
        rules = list(optimizer.rules)
        numbers = [operator.numbers(optimizer.handle, position, rule) for position, rule in enumerate(rules)]
        with torch.no_grad():
            _trace_through(optimizer, rules, numbers)
    elif alone:
        operator.step(optimizer.handle)
    else:
        grad_mode = torch.is_grad_enabled()
        with torch.no_grad():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            positions = [position for position, parameter in enumerate(parameters) if parameter.grad is not None]
            heads = [shards.local(parameters[position]) for position in positions]
            grads = [gradient(parameters[position]) for position in positions]
            operator.step_given(optimizer.handle, heads, grads, positions, grad_mode)


@contextmanager
def lent(optimizer: Traced, given: Mapping[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have the parameters hold the heads and gradients that a graph gives, for as long as they are stepped.

    A graph may compute a gradient that no parameter has yet, and step a copy of a weight, to be copied back later.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads, memory = [parameter.grad for parameter in parameters], []
    try:
        for position, parameter in enumerate(parameters):
            head, grad = given.get(position, (None, None))
            if head is None or grad is None:
                parameter.grad = None
                continue
            own = shards.local(parameter)
            if not own.is_set_to(head):
                memory.append((own, own.data))
                own.data = head
            held = parameter.grad
            if held is None or not shards.local(held).is_set_to(grad):
                parameter.grad = shards.as_sharded(grad, parameter)
        yield
    finally:
        for own, data in memory:
            own.data = data
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


def drop_gradients(optimizer: Traced, set_to_none: bool) -> None:
    """What `zero_grad` does, for a graph that the caller is compiling."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.zero_()


def _trace_through(optimizer: Traced, rules: Sequence[Rule], of_groups: Sequence[Numbers]) -> None:
    """Step operation by operation. No number of a parameter group is read here, or each would be compiled in."""
    owner = type(optimizer).__name__
    if is_skipped(optimizer):
        return
    for position, group in enumerate(optimizer.param_groups):
        rule, numbers = rules[position], of_groups[position]
        for name, parameter in named(position, group):
            if not is_trained(parameter):
                continue
            state = state_of(optimizer, group, name, parameter)
            if parameter.grad is None:
                continue
            check_gradient(owner, name, parameter)
            step = step_of(optimizer, group, parameter, rule)
            check_state(owner, name, state, step.storage.parts(tuple(parameter.shape)))
            state["step"] += 1
            tensors = tensors_of(step.storage, parameter, gradient(parameter), state)
            places = shards.start(parameter), shards.positions(parameter, parameter.dim())
            trace_step(step, tensors, *places, state["step"], numbers)


def numbers_in_graph(optimizer: Traced, group: int, rule: str) -> list[float]:
    """A group's hyper-parameters, for a graph that has traced `rule`."""
    owner, options = type(optimizer), optimizer.param_groups[group]
    now = optimizer.rules[group] = optimizer.rule_of(options)  # which has the next call traced anew
    if now.name != rule:
        raise RuntimeError(
            f"{owner.__name__}: the options of parameter group {group} ask for {now.name} now, and torch.compile has "
            f"traced {rule}; the next call of the compiled step traces it anew."
        )
    return floats(checked_hyper_of(owner, options).values())
