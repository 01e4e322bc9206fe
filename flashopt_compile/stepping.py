"""Between an optimizer and its plan: collect what a step is given, check it, and make a new plan when needed."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from types import NoneType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from flashopt_compile import scaling
from flashopt_compile.distributed import shards
from flashopt_compile.engine.kernel import Kernel, eager
from flashopt_compile.engine.layout import Layout, Part
from flashopt_compile.engine.numbers import as_numbers, is_capturing
from flashopt_compile.engine.plan import Given, Options, Plan, Work
from flashopt_compile.engine.planner import Workspace
from flashopt_compile.engine.step import Numbers, Step
from flashopt_compile.engine.storage import Storage
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inspection import numerics
from flashopt_compile.inspection.patience import patience
from flashopt_compile.options import (
    STORAGE_OPTIONS,
    check_capturable,
    check_dtype,
    check_gradient,
    check_options,
    check_parameter,
    check_replaced,
    check_shards,
    check_state,
    unread,
)
from flashopt_compile.rule import Rule, unscaling

Group = dict[str, Any]
PLAIN = {Tensor, torch.nn.Parameter}  # what parameters are unless they are sharded
_fixed_of = itemgetter(*STORAGE_OPTIONS)


class Stepped(Protocol):
    """What stepping needs to know of an optimizer."""

    param_groups: list[Group]
    state: Any
    eager: bool
    plan: Plan | None
    workspace: Workspace | None  # if its plan shares one with others
    dtypes: dict[Tensor, torch.dtype]
    hyper: ClassVar[dict[str, Any]]

    @classmethod
    def rule_of(cls, group: Group) -> Rule: ...

    def storage(self, group: Group, parameter: Tensor, rule: Rule | None = None) -> Storage: ...

    def new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]: ...


class Trained(NamedTuple):
    """A parameter to be trained: its group, name and state."""

    group: Group
    name: str
    parameter: Tensor
    state: dict[str, Any]


def is_trained(parameter: Tensor) -> bool:
    """Whether a parameter may be stepped. All others are never touched."""
    return parameter.requires_grad or parameter.grad is not None


def named(position: int, group: Group) -> list[tuple[str, Tensor]]:
    """The parameters of a group and their names."""
    names = group.get("param_names") or [f"{position}.{number}" for number in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def trained(optimizer: Stepped, make: bool = True) -> list[Trained]:
    """Every parameter to be trained, its state made if need be."""
    found = [
        (group, name, parameter)
        for position, group in enumerate(optimizer.param_groups)
        for name, parameter in named(position, group)
        if is_trained(parameter)
    ]
    if make:
        _make_states(optimizer, [each for each in found if not optimizer.state.get(each[2])])
    return [Trained(*each, optimizer.state.get(each[2], {})) for each in found]


def _make_states(optimizer: Stepped, new: Sequence[tuple[Group, str, Tensor]]) -> None:
    """Make the states of parameters, which may have taken the place of those that the constructor checked."""
    owner = type(optimizer).__name__
    for group, name, parameter in new:
        check_parameter(owner, name, parameter)
        check_shards(owner, name, parameter, optimizer.storage(group, parameter))
    if shards.any_sharded(parameter for _, _, parameter in new):
        check_replaced(owner, optimizer.param_groups, optimizer.state)
    for group, _, parameter in new:
        optimizer.state[parameter] = optimizer.new_state(group, parameter)


def gradient(parameter: Tensor) -> Tensor:
    """This rank's gradient, detached. The parameter must have one."""
    grad = shards.part_of(parameter.grad, parameter) if shards.is_sharded(parameter) else parameter.grad
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad


def checked_hyper_of(optimizer: type[Stepped], group: Group) -> dict[str, Any]:
    """`hyper_of` a group whose options may have changed."""
    check_options(optimizer.__name__, unread(group) if group["replayable"] else group, optimizer.hyper)
    return hyper_of(optimizer, group)


def hyper_of(optimizer: type[Stepped], group: Group) -> dict[str, Any]:
    """A group's hyper-parameters as its rule takes them."""
    hyper = {name: group[name] for name, _ in optimizer.rule_of(group).hyper}
    if "weight_decay" in hyper:
        hyper["weight_decay"] = scaled_decay(group, hyper["weight_decay"])
    return hyper


def scaled_decay(group: Group, weight_decay: Any) -> Any:
    """A group's weight decay as its rule takes it: rules multiply it by lr, `decouple_lr` wants lr/initial_lr."""
    initial = group["initial_lr"] if group["decouple_lr"] else None
    if group["replayable"] and isinstance(initial, Tensor):  # whose value the host does not read
        return weight_decay / torch.where(initial == 0, 1.0, initial)
    return weight_decay / initial if initial else weight_decay


def step_of(optimizer: Stepped, group: Group, parameter: Tensor, rule: Rule | None = None) -> Step:
    """The step of a parameter, by `rule` or else by the one that its group follows now."""
    rule = rule or optimizer.rule_of(group)
    return Step(rule, optimizer.storage(group, parameter, rule), group["rounding"], group["maximize"])


def tensors_of(storage: Storage, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """Head, gradient and the rest in the storage's order, apart from autograd, which minds views of a leaf."""
    head = shards.local(parameter).detach()
    return [head, grad, *(shards.local(state[key]) for key in storage.parts(tuple(head.shape)))]


def take(optimizer: Stepped) -> None:
    """Step, by gradients that may be of a scaled loss."""
    if scaling.is_scaled(optimizer):
        scaling.take(optimizer, partial(_take, optimizer))
    else:
        _take(optimizer)


def _take(optimizer: Stepped, inverse_scale: float | None = None) -> None:
    """Step by the plan, or by a new one if it no longer holds."""
    is_captured = is_capturing()
    if is_captured:
        _check_captured(optimizer)
    given = _given(optimizer)
    options = [_options(optimizer, group, inverse_scale) for group in optimizer.param_groups]
    is_asked = any(group["skip_nonfinite"] or group["check_numerics"] for group in optimizer.param_groups)
    may_step = partial(_may_step, optimizer, options) if is_asked else None
    if optimizer.plan is not None and optimizer.plan.take(given, options, may_step):
        return
    if is_captured:
        raise RuntimeError(
            f"{type(optimizer).__name__}: a CUDA graph is being captured, and the step is not like the last one, so "
            "that it would have to be worked out anew; take a step like it before the capture."
        )
    optimizer.plan = None  # what it holds is free for the next one
    with nullcontext() if optimizer.eager else patience(type(optimizer).__name__):
        optimizer.plan = _take_new_plan(optimizer, options, may_step)


def _take_new_plan(optimizer: Stepped, options: list[Options], may_step: Callable[[], bool] | None) -> Plan | None:
    """Step by a new plan and return it; None if it does not hold even now."""
    with torch.inference_mode(False), torch.no_grad():  # what is made here outlives a mode that the step is in
        work = [each for each in trained(optimizer) if each.parameter.grad is not None]
        _check(optimizer, work)
        if not work:
            return None
        plan = _new_plan(optimizer, work, options)
    return plan if plan.take(_given(optimizer), options, may_step) else None


def count_device(group: Group, parameter: Tensor) -> torch.device:
    """Where a parameter's step count is kept."""
    return shards.local(parameter).device if group["replayable"] else torch.device("cpu")


def _check_captured(optimizer: Stepped) -> None:
    """Raise RuntimeError if a CUDA graph cannot repeat a step."""
    for position, group in enumerate(optimizer.param_groups):
        if not group["replayable"]:
            raise RuntimeError(
                f"{type(optimizer).__name__}: a CUDA graph is being captured, and capturable is False in parameter "
                f"group {position}, so that the graph would repeat the step with this learning rate and step count; "
                "set capturable=True."
            )


def _given(optimizer: Stepped) -> Given:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads: list[Any] = [parameter.grad for parameter in parameters]
    kinds = list(map(type, grads))
    heads, stored = parameters, [tensor for state in optimizer.state.values() for tensor in state.values()]
    idle: list[Any] = []
    if NoneType in kinds:
        idle = [head for head, grad in zip(parameters, grads, strict=True) if grad is None]
        heads = [head for head, grad in zip(parameters, grads, strict=True) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    if not PLAIN.issuperset(map(type, parameters)) and shards.any_sharded(parameters):
        grads = list(map(gradient, heads))
        heads, stored = list(map(shards.local, heads)), list(map(shards.local, stored))
    return Given(parameters, kinds, idle, heads, grads, stored)


def _options(optimizer: Stepped, group: Group, inverse_scale: float | None) -> Options:
    rule = optimizer.rule_of(group)
    values = tuple(group[name] for name, _ in rule.hyper)
    if group["decouple_lr"]:
        values = *values, group.get("initial_lr")
    hyper = partial(checked_hyper_of, type(optimizer), group)
    if inverse_scale is not None:
        rule, values = unscaling(rule), (*values, inverse_scale)
        hyper = partial(_with_inverse_scale, hyper, inverse_scale)
    return Options((rule, *_fixed_of(group)), values, hyper, group["replayable"])


def _with_inverse_scale(hyper: Callable[[], dict[str, Any]], inverse_scale: float) -> dict[str, Any]:
    return {**hyper(), "inverse_scale": inverse_scale}


def _check(optimizer: Stepped, work: list[Trained]) -> None:
    """Raise if anything is wrong with what a step is given; nothing has changed then."""
    owner = type(optimizer).__name__
    for group in optimizer.param_groups:
        check_options(owner, group, optimizer.hyper)
        if group["replayable"]:
            check_capturable(owner, group, optimizer.hyper)
    for group, name, parameter, state in work:
        check_parameter(owner, name, parameter)
        check_gradient(owner, name, parameter)
        check_dtype(owner, name, parameter, optimizer.dtypes.setdefault(parameter, parameter.dtype))
        check_state(owner, name, state, optimizer.storage(group, parameter).parts(tuple(parameter.shape)))


def _may_step(optimizer: Stepped, options: list[Options]) -> bool:
    """Whether all gradients allow a step. Raise NumericsError if a group would lose its updates."""
    if is_skipped(optimizer.param_groups):
        return False
    positions = _positions(optimizer)
    for group, name, parameter, state in trained(optimizer):
        if group["check_numerics"] and parameter.grad is not None:
            own = options[positions[id(group)]]
            step, numbers = step_of(optimizer, group, parameter, own.rule), as_numbers(own.hyper())
            tensors = tensors_of(step.storage, parameter, gradient(parameter), state)
            numerics.check_numerics(name, step, tensors, state["step"] + 1, numbers)
    return True


def is_skipped(groups: Sequence[Group]) -> bool:
    """Whether a group with `skip_nonfinite` has a gradient that is not finite, on any process."""
    asking = [
        parameter
        for group in groups
        if group["skip_nonfinite"]
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    return bool(asking) and shards.any_process(numerics.has_nonfinite(list(map(gradient, asking))), asking)


def _new_plan(optimizer: Stepped, work: list[Trained], options: list[Options]) -> Plan:
    """Work out how to step."""
    positions = _positions(optimizer)
    items = []
    for group, _, parameter, state in work:
        position, own = positions[id(group)], shards.local(parameter)
        step = step_of(optimizer, group, parameter, options[position].rule)
        state["step"] = state["step"].to(count_device(group, parameter))  # elsewhere if `capturable` has changed
        keys = step.storage.parts(tuple(own.shape))
        parts = [
            Part(_contiguous(shards.local(state[key])), is_scale)
            for key, is_scale in zip(keys, step.storage.scales[1:], strict=True)
        ]
        places = shards.start(parameter), shards.row_starts(parameter, step.storage)
        layout = Layout.of(step.storage, own.shape, *places)
        items.append(Work(state["step"], parts, layout, step, position))
    kernels = _uncompiled if optimizer.eager else inductor.kernel
    return Plan(_given(optimizer), options, items, kernels, optimizer.workspace)


def _positions(optimizer: Stepped) -> dict[int, int]:
    return {id(group): position for position, group in enumerate(optimizer.param_groups)}


def _contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, made contiguous in place if a user has replaced it by one that is not."""
    if not tensor.is_contiguous():
        tensor.data = tensor.contiguous()
    return tensor


def _uncompiled(step: Step, *_: Any) -> Kernel:
    return eager(step)


def samples(optimizer: Stepped, group: Group) -> Iterator[tuple[Step, list[Tensor], Tensor, Numbers]]:
    """The parameters of a group that have a state, each as its step takes it; without a gradient, one of zeros."""
    numbers = as_numbers(hyper_of(type(optimizer), group))
    for owner, _, parameter, state in trained(optimizer, make=False):
        if owner is group and state:
            step = step_of(optimizer, group, parameter)
            own = shards.local(parameter)
            grad = torch.zeros_like(own) if parameter.grad is None else gradient(parameter)
            yield step, tensors_of(step.storage, parameter, grad, state), state["step"].to("cpu"), numbers


def warmup(optimizer: Stepped, verbose: bool) -> None:
    """Compile what the first step would compile, for gradients of the parameters' dtypes."""
    kinds: dict[Any, tuple[Step, Group, Tensor]] = {}
    for group, _, parameter, _ in trained(optimizer, make=False):
        step, own = step_of(optimizer, group, parameter), shards.local(parameter)
        if own.numel():
            kinds[inductor.kind_of(step, own)] = step, group, own
    for number, (step, group, parameter) in enumerate(kinds.values(), start=1):
        begin = time.perf_counter()
        numbers = as_numbers(hyper_of(type(optimizer), group), count_device(group, parameter))
        if inductor.prepare(step, parameter, numbers) and verbose:
            took = f"{time.perf_counter() - begin:.1f} s"
            print(f"{type(optimizer).__name__}: compiled {number} of {len(kinds)}, {step}: {took}", file=sys.stderr)
