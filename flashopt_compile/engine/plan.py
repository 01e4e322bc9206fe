"""The plan: all that the next step can reuse, for as long as nothing that it depends on has changed."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flashopt_compile.engine.counts import CapturableCounts, Counts
from flashopt_compile.engine.kernel import Kernels, Operation, run_at_once
from flashopt_compile.engine.layout import Layout, Part
from flashopt_compile.engine.numbers import CapturableNumbers, KeptNumbers, leaves
from flashopt_compile.engine.planner import Item, Planner, Workspace
from flashopt_compile.engine.step import Step
from flashopt_compile.rule import Rule

_dtype_of, _device_of, _layout_of = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
_requires_grad = attrgetter("requires_grad")


class Options(NamedTuple):
    """What a group says: `fixed` options, which a plan depends on, and numbers, which may follow a schedule."""

    fixed: Any
    values: tuple[Any, ...]  # of the hyper-parameters, as the group has them
    hyper: Callable[[], Mapping[str, Any]]  # the same, checked, as the rule takes them
    is_capturable: bool = False  # numbers and counts lie on the parameters' device, and the host does not read them

    @property
    def rule(self) -> Rule:
        """The rule that the group is stepped by: the first of the fixed options."""
        return self.fixed[0]


class Given(NamedTuple):
    """What a step is given. `heads` and `grads` are of those parameters that have a gradient.

    Of sharded parameters they are what this process has; of others, the parameters and gradients themselves.
    """

    parameters: Sequence[Tensor]  # all of them
    kinds: Sequence[type]  # of their gradients, which may be missing
    idle: Sequence[Tensor]  # those without a gradient
    heads: Sequence[Tensor]
    grads: Sequence[Tensor]
    stored: Sequence[Tensor]  # all tensors of the optimizer's state


class Work(NamedTuple):
    """One parameter to be stepped: its count, all that is stored beside it, and how it is laid out and stepped."""

    count: Tensor
    parts: Sequence[Part]
    layout: Layout
    step: Step
    group: int  # which of the groups it is in


def depends_on(given: Given, options: Sequence[Options]) -> tuple[Any, ...]:
    """All that a plan depends on, to be compared with what it was.

    By identity, address and form, never by value. A plan holds what it knows the address of, or is held by what has it,
    so that no other tensor can have come to lie there; a head's address may be another's, its dtype and shape may not.
    """
    _, kinds, idle, heads, grads, stored = given
    return (
        torch.get_num_threads(),  # Inductor writes code for so many
        [each.fixed for each in options],
        list(map(id, given.parameters)),
        list(map(_requires_grad, idle)),  # one that is thawed gets a state
        kinds,
        list(map(Tensor.data_ptr, heads)),
        list(map(Tensor.size, heads)),
        list(map(Tensor.stride, heads)),
        list(map(_dtype_of, heads)),
        list(map(_layout_of, grads)),
        list(map(_dtype_of, grads)),
        list(map(_device_of, grads)),
        list(map(Tensor.size, grads)),
        list(map(Tensor.is_contiguous, grads)),
        list(map(Tensor.data_ptr, stored)),
    )


class Plan:
    """A step worked out once and taken again for as long as nothing it depends on changes."""

    def __init__(
        self,
        given: Given,
        options: Sequence[Options],
        work: Sequence[Work],
        kernels: Kernels,
        workspace: Workspace | None = None,
    ) -> None:
        self._parameters = given.parameters  # kept, so that no other can get their ids
        devices = {each.group: head.device for each, head in zip(work, given.heads, strict=True)}
        self._numbers = [_kept_numbers(each, devices.get(group)) for group, each in enumerate(options)]
        self._values = [_steady_values(each) for each in options]
        self._counts, places = _counts_of(work, options, devices)
        items = []
        for (counts, place), each, head, grad in zip(places, work, given.heads, given.grads, strict=True):
            t, taken, numbers = counts.next[place], counts.taken[place], self._numbers[each.group].numbers
            items.append(Item(each.step, each.layout, head, grad, each.parts, t, taken, numbers))
        planner = Planner(kernels, items, workspace)
        self._stages = [(stage, self._counting([places[index] for index in stage.done])) for stage in planner.stages()]
        self._in_place = sorted(planner.in_place)
        self.bytes = planner.bytes  # that it alone keeps between steps, beside the optimizer's state
        for counts in self._counts:
            counts.settle()
        self._known = depends_on(given, options)

    def take(self, given: Given, options: Sequence[Options], may_step: Callable[[], bool] | None = None) -> bool:
        """Step with the current hyper-parameters; return false if the plan no longer holds.

        `may_step` is asked first, where it is for the gradients' values to decide.
        """
        if depends_on(given, options) != self._known or not all(each.are_known() for each in self._counts):
            return False
        self._follow(options)
        if may_step is None or may_step():
            self._run(given)
        return True

    def _follow(self, options: Sequence[Options]) -> None:
        for number, each in enumerate(options):
            if self._values[number] is None or each.values != self._values[number]:
                self._numbers[number].set(each.hyper())
                self._values[number] = _steady_values(each)

    def _run(self, given: Given) -> None:
        """Step the parameters by their gradients. Of each stage, all happens or nothing does."""
        for counts in self._counts:
            counts.advance()
        heads, grads = given.heads, given.grads
        for index in self._in_place:
            if grads[index].data_ptr() == heads[index].data_ptr():  # it would change while it is read
                grads = [*grads[:index], grads[index].clone(), *grads[index + 1 :]]
        # Autograd then notices that tensors it may have saved have changed.
        increment_version([heads[index] for index in self._in_place if not heads[index].is_inference()])
        for stage, count in self._stages:
            operations: list[Operation] = []
            for call in stage.calls:
                operations += call.operations(heads, grads)
            run_at_once([*operations, *count])
        for counts in self._counts:
            counts.finish()

    def _counting(self, done: Sequence[tuple[Counts, int]]) -> list[Operation]:
        """Count the step of some parameters."""
        return [
            operation
            for counts in self._counts
            for operation in counts.storing([place for owner, place in done if owner is counts])
        ]


def _kept_numbers(options: Options, device: torch.device | None) -> KeptNumbers | CapturableNumbers:
    values = options.hyper()
    if not options.is_capturable:
        return KeptNumbers(values)
    tensors = (each for each in leaves(values.values()) if isinstance(each, Tensor))
    return CapturableNumbers(values, device or next((each.device for each in tensors), torch.device("cpu")))


def _counts_of(
    work: Sequence[Work], options: Sequence[Options], devices: Mapping[int, torch.device]
) -> tuple[list[Counts], list[tuple[Counts, int]]]:
    """The counts of all parameters: those of one device beside each other, and where each parameter's is."""
    kinds: dict[torch.device | None, list[int]] = {}
    for index, each in enumerate(work):
        kind = devices[each.group] if options[each.group].is_capturable else None
        kinds.setdefault(kind, []).append(index)
    places: dict[int, tuple[Counts, int]] = {}
    for device, indices in kinds.items():
        own = [work[index].count for index in indices]
        counts = Counts(own) if device is None else CapturableCounts(own, device)
        places |= {index: (counts, place) for place, index in enumerate(indices)}
    return list({id(counts): counts for counts, _ in places.values()}.values()), [places[n] for n in range(len(work))]


def _steady_values(options: Options) -> tuple[Any, ...] | None:
    """A group's values; None if one is a tensor or list, which may change unnoticed."""
    return options.values if all(map(_is_steady, options.values)) else None


def _is_steady(value: Any) -> bool:
    return all(map(_is_steady, value)) if isinstance(value, tuple) else isinstance(value, int | float)
