"""What becomes of gradients that are complete: they are summed up, measured, or stepped by, and then freed."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from flashopt_compile import stepping
from flashopt_compile.distributed import shards
from flashopt_compile.inspection import numerics
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.release import clipping
from flashopt_compile.release.clipping import Clipping
from flashopt_compile.release.scaling import Scaling
from flashopt_compile.release.sums import Sums

PreStep = Callable[[Tensor, dict[str, Any]], bool]


class Round:
    """The gradients of the released parameters, from one `optimizer.step()` to the next."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: FlashOptimizer,
        rules: Clipping,
        scaling: Scaling,
        pre_step: PreStep | None,
    ) -> None:
        self._optimizer, self._rules, self._scaling, self._pre_step = optimizer, rules, scaling, pre_step
        self._order = {id(each): place for place, each in enumerate(parameters)}  # the model's
        self._groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._is_sharded = [each for each in parameters if shards.is_sharded(each)]
        self._device = shards.local(parameters[0]).device
        self.sums = Sums(parameters, optimizer.eager)
        self.left: dict[int, Tensor] = {}  # gradients that pre_step has left, while new ones are measured
        self._skipped: set[int] = set()  # parameters with such gradients
        self._stepped: set[int] = set()
        self._repeats = 0  # backward passes that have stepped again what had been stepped
        self._has_told = False
        self._norms: dict[int, Tensor] = {}
        self._factor: Tensor | None = None  # that gradients are multiplied by, once it is known
        self._found = False  # that a gradient is Inf or NaN

    @property
    def takes_two_passes(self) -> bool:
        """Whether all gradients must be seen before the first parameter is stepped."""
        return self._rules.is_exact or self._scaling.is_on

    @property
    def clips_by_norm(self) -> bool:
        """Whether the norm of all gradients is clipped."""
        return self._rules.norm is not None

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add gradients to sums, and free them."""
        self.sums.add(parameters)
        free(parameters)

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Step parameters by their gradients, and free these."""
        self._optimizer._opt_called = True  # or LR schedulers warn  # pyright: ignore[reportPrivateUsage]
        keys = set(map(id, parameters))
        if keys & self._stepped:
            self._repeats += 1
            self._close()
        self._skipped -= keys
        self.complete(parameters)
        if self._pre_step is not None:
            parameters = [each for each in parameters if self._pre_step(each, self._group(each))]
            self._skipped |= keys - set(map(id, parameters))
            if not parameters:
                return
        self._prepare(parameters)
        if self._rules.norm is not None:
            grads = _grads(parameters)
            if not self._rules.is_exact:
                self._norms |= zip(map(id, parameters), clipping.norms(grads), strict=True)
            factor = self._factor_now() if self._factor is None else self._factor
            clipping.scale(list(map(shards.local, grads)), factor)
        self._optimizer.selections.step(parameters)
        self._stepped |= keys
        free(parameters)

    def complete(self, parameters: Sequence[Tensor]) -> None:
        """Give parameters that have a sum the gradient of all their micro-batches."""
        begun = [each for each in parameters if self.sums.has(each)]
        if begun:
            self._total_up(begun)
            self.sums.drop(begun)

    def _total_up(self, begun: Sequence[Tensor]) -> None:
        late = [each for each in begun if each.grad is not None]
        if late:
            self.add(late)
        for each in begun:
            each.grad = self.sums.total(each)

    def _prepare(self, parameters: Sequence[Tensor]) -> None:
        """Unscale and clip each gradient, as far as that takes no other."""
        if self._scaling.is_on:
            self._scaling.unscale(parameters)
        self._rules.alone(_grads(parameters))

    # All gradients are seen before the first step.

    def measure(self, parameters: Sequence[Tensor]) -> None:
        """Note what must be known of gradients, and free them."""
        for each in parameters:
            if each.grad is not None and id(each) in self.left:
                each.grad = self.left[id(each)] + each.grad
        self._prepare(parameters)
        asking = [each for each in parameters if self._scaling.is_on or self._group(each)["skip_nonfinite"]]
        self._found = self._found or numerics.has_nonfinite(list(map(stepping.gradient, asking)))
        if self._rules.norm is not None:
            self._norms |= zip(map(id, parameters), clipping.norms(_grads(parameters)), strict=True)
        free(parameters)

    def decide(self) -> bool:
        """Whether what has been measured allows a step; and by which factor to clip. All processes must call."""
        found = shards.any_process(self._found, self._is_sharded)
        if self._scaling.is_on:
            self._scaling.record(found, self._device)
        if self._norms:
            self._factor = self._factor_now()
        self._norms.clear()
        return not found

    def forget_measures(self) -> None:
        """Forget what a pass has measured, which may have failed."""
        self._norms.clear()
        self._found = False
        self._factor = None

    def finish(self) -> None:
        """Step the parameters that have sums."""
        begun = self.sums.begun
        if self.takes_two_passes:
            self.forget_measures()
            for each in begun:
                self._total_up([each])
                self.measure([each])
            if not self.decide():
                self.sums.drop(begun)
                return
        for each in begun:
            self.step([each])

    # From step() to step().

    def end(self) -> None:
        """What is left for `optimizer.step()`: sums, and parameters that have a gradient still, are stepped."""
        if self.sums.begun:
            self.finish()
        left = [
            each
            for group in self._optimizer.param_groups
            for each in group["params"]
            if each.grad is not None and id(each) not in self._skipped
        ]
        if left:
            self._optimizer.selections.step(left)
        if self._repeats and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{type(self._optimizer).__name__}: {self._repeats + 1} backward passes since the last step() have "
                "each stepped the parameters, as gradients are released; run all but the last in handle.accumulate() "
                "to add up their gradients.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._repeats = 0
        self._close()

    def drop(self) -> None:
        """Drop all sums; gradients that pre_step has left are about to be dropped too."""
        self.sums.drop(self.sums.begun)
        self._skipped.clear()

    def _close(self) -> None:
        """Have all that comes next belong to another step."""
        if self._norms and not self._rules.is_exact:
            self._factor = self._factor_now()
        self._norms.clear()
        self._stepped.clear()

    def _factor_now(self) -> Tensor:
        """What the norm of the gradients known so far asks for."""
        assert self._rules.norm is not None
        known = sorted(self._norms, key=self._order.__getitem__)  # sums depend on the order
        return clipping.factor(self._rules.norm, clipping.total([self._norms[key] for key in known]))

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return self._optimizer.param_groups[self._groups[id(parameter)]]


def _grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def free(parameters: Iterable[Tensor]) -> None:
    """Free gradients."""
    for each in parameters:
        each.grad = None
