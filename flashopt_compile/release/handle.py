"""Gradient release: hooks that step each parameter during backward, as soon as its gradient is complete."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flashopt_compile.distributed import shards
from flashopt_compile.inductor import backward
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.release import checks
from flashopt_compile.release.checks import OWNER
from flashopt_compile.release.clipping import Clipping
from flashopt_compile.release.round import PreStep, Round, free
from flashopt_compile.release.scaling import Scaling
from flashopt_compile.release.selection import Selections
from flashopt_compile.release.watch import Watch

Use = Literal["step", "measure", "add"]

# The most elements of gradients that wait for others, 1 MiB in bf16: parameters with more are used at once.
GATHERED_ELEMENTS = 1 << 19


@dataclass
class _Waiting:
    """Parameters whose gradients wait to be used together."""

    parameters: list[Tensor]
    elements: int


def enable_gradient_release(
    model: nn.Module,
    optimizer: FlashOptimizer,
    *,
    grad_scaler: Any = None,
    pre_step: PreStep | None = None,
    clip_norm: float | None = None,
    clip_mode: str = "previous",
    clip_value: float | None = None,
    clip_param_norm: float | None = None,
) -> "GradientReleaseHandle":
    """Step each parameter during backward, as soon as its gradient is complete, and free the gradient.

    `optimizer.step()` and `zero_grad()` may stay where they are. `clip_norm` clips by the norm of all gradients: that
    of the step before (`clip_mode="previous"`), or exactly as `clip_grad_norm_` does ("exact"; call
    `handle.backward(loss)`). `clip_value` and `clip_param_norm` clip each parameter by itself. With `grad_scaler`, call
    `handle.backward(scaler.scale(loss))`. `pre_step(parameter, group)` may return False to skip a parameter, which
    then keeps its gradient.
    """
    rules = Clipping(clip_value, clip_param_norm, clip_norm, clip_mode)
    rules.check(OWNER)
    scaling = Scaling(OWNER, optimizer, grad_scaler)
    others = {id(parameter) for handle in _active for parameter in handle.parameters}
    two_passes = rules.is_exact or scaling.is_on
    parameters = checks.released(model, optimizer, pre_step, two_passes, lambda parameter: id(parameter) in others)
    return GradientReleaseHandle(optimizer, parameters, Round(parameters, optimizer, rules, scaling, pre_step))


class GradientReleaseHandle:
    """Gradients are released until `remove()` is called, or to the end of a `with` block."""

    def __init__(self, optimizer: FlashOptimizer, parameters: Sequence[Tensor], round: Round) -> None:
        self._optimizer, self.parameters, self._round = optimizer, parameters, round
        self._watch = Watch(parameters[0], type(optimizer).__name__) if not round.clips_by_norm else None
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._waiting: dict[int, _Waiting] = {}  # by the backward pass that they belong to
        self._pass: Use | None = None  # what a pass of `backward` is for
        self._accumulates = False
        self._is_checked = False
        self._hooks: list[Any] = []
        hook = partial(_arrived, weakref.ref(self))
        try:
            for each in parameters:
                self._hooks.append(each.register_post_accumulate_grad_hook(hook))
        except BaseException:
            self._unhook()
            raise
        optimizer.plan = None  # its memory is free for the plans of fewer parameters
        optimizer.release = self
        _active.add(self)

    @property
    def active(self) -> bool:
        """Whether gradients are released."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Let `optimizer.step()` step all parameters again. What has been accumulated becomes their gradients."""
        with self._lock, torch.no_grad():
            if self._hooks:
                self._unhook()
                _active.discard(self)
                self._end_watch()
                self._round.complete(self._round.sums.begun)
                self._optimizer.release = None
                self._optimizer.selections = Selections(self._optimizer)

    def __enter__(self) -> "GradientReleaseHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Do what `loss.backward()` does, in two passes if all gradients must be seen before the first step.

        The first pass frees each gradient once its norm is known, and retains the graph for the second.
        """
        if not (self._hooks and self._round.takes_two_passes) or self._accumulates:
            loss.backward(gradient, retain_graph=retain_graph)
        elif self._round.sums.begun:
            with self._passing("add"):
                loss.backward(gradient, retain_graph=retain_graph)
            with torch.no_grad():
                self._round.finish()
        elif self._measured(loss, gradient):
            with self._passing("step"):
                loss.backward(gradient, retain_graph=retain_graph)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Have backward passes inside add to sums, which the first pass outside of it, or `step()`, completes.

        Inside, `optimizer.step()` and `zero_grad()` do nothing.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    # What the optimizer calls.

    def step(self) -> None:
        """What is left for `optimizer.step()` to do."""
        with self._lock:
            if not self._accumulates:
                self._end_watch()
                self._waiting.clear()  # of backward passes that have failed: the gradients are where all others are
                self._round.end()

    def zero_grad(self) -> bool:
        """Drop sums. Return whether gradients may be dropped as well: not while they accumulate."""
        if not self._accumulates:
            self._round.drop()
        return not self._accumulates

    @property
    def bytes(self) -> int:
        """What is kept between steps, beside states and plans."""
        return self._round.sums.bytes

    def check_finished(self, what: str) -> None:
        """Raise RuntimeError if `what` would lose gradients that have been accumulated."""
        begun = len(self._round.sums.begun)
        if begun:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}: {what} would lose the gradients accumulated for {begun} "
                "parameters; finish them with a backward pass outside of handle.accumulate() or with step(), or drop "
                "them with zero_grad()."
            )

    # Gradients arrive.

    def arrived(self, parameter: Tensor) -> None:
        """Use the gradient of a parameter, which is complete: at once, or if it is small, together with others."""
        with self._lock, torch.no_grad():
            if not self._is_checked:
                checks.check_replicas(self.parameters)
                self._is_checked = True
            use, task = self._use_now(), backward.running()
            elements = shards.local(parameter).numel()
            if task is None or elements > GATHERED_ELEMENTS:
                self._take([parameter], use)
                return
            waiting = self._waiting.get(task)
            if waiting is None:
                waiting = self._waiting[task] = _Waiting([], 0)
                backward.at_end(partial(self._end, task, use))
            elif waiting.elements + elements > GATHERED_ELEMENTS:
                self._take(waiting.parameters, use)
                waiting = self._waiting[task] = _Waiting([], 0)
            waiting.parameters.append(parameter)
            waiting.elements += elements

    def _end(self, task: int, use: Use) -> None:
        """Use the gradients that wait for others: the backward pass ends."""
        with self._lock, torch.no_grad():
            if task in self._waiting:
                self._take(self._waiting.pop(task).parameters, use)
            if use == "step" and self._watch is not None:
                self._watch.begin()

    def _use_now(self) -> Use:
        """What gradients are used for."""
        if self._accumulates:
            return "add"
        if self._pass is not None:
            return self._pass
        if not self._round.takes_two_passes:
            return "step"
        if self._round.sums.begun:
            return "add"
        raise RuntimeError(
            f"{type(self._optimizer).__name__}: clip_mode='exact' and grad_scaler take two passes over released "
            "gradients; call handle.backward(loss) in place of loss.backward()."
        )

    def _take(self, parameters: Sequence[Tensor], use: Use) -> None:
        own = [each for each in parameters if each.grad is not None]
        if own:
            {"step": self._round.step, "measure": self._round.measure, "add": self._round.add}[use](own)

    def _measured(self, loss: Tensor, gradient: Tensor | None) -> bool:
        """Look at all gradients in a first pass; return whether there is to be a second."""
        self._round.forget_measures()
        left = self._round.left = {id(each): each.grad for each in self.parameters if each.grad is not None}
        is_sharded = shards.any_sharded(self.parameters)
        try:
            free(self.parameters)
            with self._passing("measure"):
                # All other tensors get their gradients in the second pass. FSDP2's parameters are no leaves of a graph.
                inputs = None if is_sharded else [each for each in self.parameters if each.requires_grad]
                loss.backward(gradient, retain_graph=True, inputs=inputs)
        finally:
            for each in self.parameters:
                each.grad = left.get(id(each))
            self._round.left = {}
        with torch.no_grad():
            return self._round.decide()

    @contextmanager
    def _passing(self, use: Use) -> Iterator[None]:
        self._pass = use
        try:
            yield
        finally:
            self._pass = None

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _unhook(self) -> None:
        for each in self._hooks:
            each.remove()
        self._hooks.clear()


_active: "weakref.WeakSet[GradientReleaseHandle]" = weakref.WeakSet()


def _arrived(handle: "weakref.ref[GradientReleaseHandle]", parameter: Tensor) -> None:
    release = handle()
    if release is not None and parameter.grad is not None:
        release.arrived(parameter)
