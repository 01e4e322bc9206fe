"""A step like the last one: its calls once more, for as long as nothing that they follow from has changed.

Whatever else has used the caches since the last step, its data and the code for it come from main memory: each look
takes a microsecond, of some 300 that a kernel takes for a million elements. Hence few and plain looks, in one place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads
from torch.autograd import profiler
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from flashopt_compile.batch import Call
from flashopt_compile.count import Count
from flashopt_compile.options import STORAGE_OPTIONS
from flashopt_compile.step import Numbers

Group = dict[str, Any]
States = Mapping[Tensor, Mapping[str, Tensor]]
STRIDED = torch.strided


class FollowedParameter(NamedTuple):
    """A parameter, and what its calls follow from if it is stepped."""

    parameter: Tensor
    pointer: int | None = None
    strides: tuple[int, ...] | None = None  # unless it is contiguous
    shape: torch.Size | None = None
    device: torch.device | None = None  # unless it is the CPU
    grad_dtype: torch.dtype | None = None
    grad_is_contiguous: bool = False

    @classmethod
    def of(cls, parameter: Tensor) -> "FollowedParameter":
        grad = parameter.grad
        if grad is None or not parameter.requires_grad:
            return cls(parameter)
        strides = None if parameter.is_contiguous() else parameter.stride()
        device = None if parameter.is_cpu else parameter.device
        return cls(parameter, parameter.data_ptr(), strides, parameter.shape, device, grad.dtype, grad.is_contiguous())


@dataclass
class FollowedGroup:
    """A group's options and parameters, as they were."""

    values_of: "itemgetter[Any]"
    values: tuple[Any, ...]
    numbers_of: Callable[[Group], Numbers]
    numbers: Numbers
    parameters: Sequence[FollowedParameter]

    @classmethod
    def of(cls, group: Group, hyper: Iterable[str], numbers_of: Callable[[Group], Numbers]) -> "FollowedGroup | None":
        """None if each step has to look at values: gradients, results, or numbers that may change unnoticed."""
        numbers = numbers_of(group)
        if group["check_numerics"] or group["skip_nonfinite"] or numbers_of(group) is not numbers:
            return None
        initial = ("initial_lr",) if group["decouple_lr"] else ()
        values_of = itemgetter(*hyper, *initial, *STORAGE_OPTIONS)
        return cls(values_of, values_of(group), numbers_of, numbers, list(map(FollowedParameter.of, group["params"])))

    def follow(self, group: Group) -> bool:
        """Whether no more has changed than what may follow a schedule; the numbers are brought up to date."""
        values, fixed = self.values_of(group), len(STORAGE_OPTIONS)
        if values[-fixed:] != self.values[-fixed:] or self.numbers_of(group) is not self.numbers:
            return False
        self.values = values
        return True


class Routine:
    """The calls of a step, for as long as nothing that they follow from has changed but the values of numbers."""

    @classmethod
    def of(
        cls, options: Sequence[FollowedGroup | None], states: States, calls: Sequence[Call], count: Count
    ) -> "Routine | None":
        """Of the step just taken; None if the next has to look at values."""
        steady = [each for each in options if each is not None]
        return cls(steady, states, calls, count) if len(steady) == len(options) else None

    def __init__(self, options: Sequence[FollowedGroup], states: States, calls: Sequence[Call], count: Count) -> None:
        self._options = options
        self._states = [tuple(state.values()) for state in states.values()]
        self._calls = calls
        self._count = count
        # Parameters are stepped in one call if their counts are the same.
        self._taken = count.taken() if any(len(numbers) > 1 for _, numbers in calls) else None
        self._threads = get_num_threads()  # for which kernels are compiled

    def again(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, if all is as it was; or else do nothing."""
        groups, states = optimizer.param_groups, optimizer.state
        if len(groups) != len(self._options) or len(states) != len(self._states) or get_num_threads() != self._threads:
            return False
        grads: list[Tensor] = []
        for number, group in enumerate(groups):
            options, parameters = self._options[number], group["params"]
            if options.values_of(group) != options.values and not options.follow(group):
                return False
            if len(parameters) != len(options.parameters):
                return False
            for place, parameter in enumerate(parameters):
                known, pointer, strides, shape, device, grad_dtype, grad_is_contiguous = options.parameters[place]
                grad = parameter.grad
                if parameter is not known:
                    return False
                if grad is None or not parameter.requires_grad:
                    if pointer is None:
                        continue
                    return False
                if (
                    type(grad) is not Tensor
                    or grad.layout is not STRIDED
                    or grad.dtype is not grad_dtype
                    or grad.is_contiguous() is not grad_is_contiguous
                    or grad.shape != shape
                    or (not grad.is_cpu if device is None else grad.device != device)
                    or grad.requires_grad
                    or parameter.data_ptr() != pointer
                    or parameter.shape != shape
                    or not (parameter.is_contiguous() if strides is None else parameter.stride() == strides)
                ):
                    return False
                grads.append(grad)
        for number, state in enumerate(states.values()):
            tensors = self._states[number]
            if len(state) != len(tensors):
                return False
            for place, tensor in enumerate(state.values()):
                if tensor is not tensors[place]:
                    return False
        if self._taken is not None and self._count.taken() != self._taken:
            return False
        if not self._count.up():
            return False
        if self._taken is not None:
            self._taken = self._count.taken()
        for run, numbers in self._calls:
            if len(numbers) == 1:
                run(grads[numbers[0]])
            else:
                run(*[grads[number] for number in numbers])
        return True


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook or a profiler is to know of a step."""
    return bool(
        profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
