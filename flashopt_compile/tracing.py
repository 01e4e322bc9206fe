"""Between an optimizer and a graph that a caller compiles: what the graph is given, and what it gives back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashopt_compile import scaling
from flashopt_compile.distributed import shards
from flashopt_compile.engine.numbers import as_number, as_numbers, floats, leaves
from flashopt_compile.engine.step import Numbers
from flashopt_compile.engine.step import trace as trace_step
from flashopt_compile.inductor import operator
from flashopt_compile.options import check_gradient, check_state
from flashopt_compile.rule import Rule
from flashopt_compile.stepping import (
    Group,
    Stepped,
    checked_hyper_of,
    count_device,
    gradient,
    hyper_of,
    is_skipped,
    named,
    scaled_decay,
    step_of,
    tensors_of,
)


class Traced(Stepped, Protocol):
    """What tracing needs to know of an optimizer."""

    handle: Tensor
    handle_name: str
    known: list["Known"]
    is_traced: (
        bool  # operation by operation; in an attribute of its own, as Dynamo would guard all of a group's options
    )


class Known(NamedTuple):
    """What the host has last seen of a parameter group: its rule, and which hyper-parameters are inputs of a graph.

    Tracing takes the group from here. Where it reads `param_groups`, Dynamo guards all numbers of all groups.
    """

    group: Group
    rule: Rule
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, optimizer: type[Stepped], group: Group) -> "Known":
        rule = optimizer.rule_of(group)
        names = [name for name, _ in rule.hyper] if group["replayable"] else []
        return cls(
            group, rule, tuple(name for name in names if all(isinstance(x, Tensor) for x in leaves([group[name]])))
        )


def trace(optimizer: Traced, alone: bool) -> None:
    """Step inside a graph that the caller is compiling, of which the step may be all.

    As one operator, which runs our own kernels. Operation by operation if the optimizer is `eager`, and if a group is
    capturable: a CUDA graph cannot repeat what our operators look up on the host.
    """
    if (optimizer.is_traced or not alone) and scaling.is_scaled(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__}: torch.amp.GradScaler leaves fp16 gradients to the step, which torch.compile "
            "can only trace alone and with eager=False, capturable=False; leave scaler.step(opt) out of what you "
            "compile, and compile opt.step."
        )
    if optimizer.is_traced:
        operator.prepare(optimizer.handle_name)
        # Outside of no_grad: a graph that ends here, by what the operator raises, would leave autograd off.
        numbers = [_traced_numbers(optimizer, each) for each in range(len(optimizer.known))]
        with torch.no_grad():
            _trace_through(optimizer, numbers)
    elif alone:
        operator.step(optimizer.handle)
    else:
        grad_mode = torch.is_grad_enabled()
        with torch.no_grad():
            parameters = [parameter for each in optimizer.known for parameter in each.group["params"]]
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
    for each in optimizer.known:
        for parameter in each.group["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.zero_()


def _traced_numbers(optimizer: Traced, position: int) -> tuple[Rule, Numbers]:
    """A group's rule and hyper-parameters, which an operator that torch keeps out of CUDA graphs looks up on the host.

    Tensors of a capturable group are inputs of the graph instead. No Python number is read, or it would be compiled in.
    """
    group, rule, inputs = optimizer.known[position]
    inputs = [name for name in inputs if all([isinstance(each, Tensor) for each in leaves([group[name]])])]
    if not group["replayable"]:
        return rule, operator.numbers(optimizer.handle, position, rule)
    device = count_device(group, group["params"][0])
    if len(inputs) == len(rule.hyper):
        rule = optimizer.rule_of(group)
        return rule, as_numbers(hyper_of(type(optimizer), group), device)
    numbers: Numbers = {}
    for name, number in operator.numbers(optimizer.handle, position, rule).items():
        if name in inputs:
            value = scaled_decay(group, group[name]) if name == "weight_decay" else group[name]
            numbers[name] = as_number(value, device)
        else:
            numbers[name] = (
                tuple([each.to(device) for each in number]) if isinstance(number, tuple) else number.to(device)
            )
    return rule, numbers


def _trace_through(optimizer: Traced, of_groups: Sequence[tuple[Rule, Numbers]]) -> None:
    """Step operation by operation. No number of a parameter group is read here, or each would be compiled in."""
    owner = type(optimizer).__name__
    if is_skipped([each.group for each in optimizer.known]):
        return
    # All gradients before the first state: Dynamo knows a tensor by where it has seen it first. Seen as a key of
    # `state`, a parameter would be a constant to it, and so would its gradient.
    work = [
        (position, name, parameter)
        for position, each in enumerate(optimizer.known)
        for name, parameter in named(position, each.group)
        if parameter.grad is not None
    ]
    for position, name, parameter in work:
        group, (rule, numbers) = optimizer.known[position].group, of_groups[position]
        state = optimizer.state[parameter]
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
    now = Known.of(owner, options)
    if now[1:] != optimizer.known[group][1:]:
        optimizer.known[group] = now  # which has the next call traced anew
    if now.rule.name != rule:
        raise RuntimeError(
            f"{owner.__name__}: the options of parameter group {group} ask for {now.rule.name} now, and torch.compile "
            f"has traced {rule}; the next call of the compiled step traces it anew."
        )
    return floats(checked_hyper_of(owner, options).values())
