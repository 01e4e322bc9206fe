"""The calls of a step: blocks in place, and non-contiguous parameters in copies."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from flashopt_compile.engine.kernel import Bound, Copying, Kernel, Operation, run_at_once


class Call(Protocol):
    """A part of a step."""

    @property
    def bound(self) -> Sequence[Bound]:
        """What it is carried out by."""
        ...

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        """The operations of the call, given all heads and gradients of the step."""
        ...


class InPlace:
    """Steps a block where it lies in its parameter, from the element `offset` on."""

    def __init__(self, run: Bound, index: int, offset: int) -> None:
        self.bound = (run,)
        self._run, self._index, self._offset = run.run, index, offset

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        head, grad = heads[self._index], grads[self._index]
        if self._offset:
            head, grad = (tensor.view(-1)[self._offset :] for tensor in (head, grad))
        return self._run(head, grad)


class Staged:
    """Steps some slices of a parameter in contiguous copies, because its head or gradient is not contiguous."""

    def __init__(
        self,
        calls: Sequence[Call],
        index: int,
        slices: slice,
        copied: tuple[Tensor | None, Tensor | None],
        kernel: Kernel,
    ) -> None:
        self._calls, self._index, self._slices = calls, index, slices
        self._head, self._grad = copied  # in the shape of the slices; None of what is contiguous
        self._kernel = kernel
        self.bound = [bound for call in calls for bound in call.bound]
        self._is_deferred = all(bound.is_deferred for bound in self.bound)
        self._is_at_once = any(bound.is_at_once for bound in self.bound)
        self._strides: Any = None  # of head and gradient, which these copy
        self._copyings: Sequence[Copying] = ()

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        head, grad = heads[self._index][self._slices], grads[self._index][self._slices]
        before, after = [], []
        copy_head, copy_back, copy_grad = self._copyings_of(head, grad)
        if self._head is not None:
            before += copy_head(self._head, head)
            after += copy_back(head, self._head)
        if self._grad is not None:
            before += copy_grad(self._grad, grad)
        if not self._is_deferred:
            run_at_once(before)
            before = []
        given = [head if self._head is None else self._head], [grad if self._grad is None else self._grad]
        inner: list[Operation] = []
        for call in self._calls:
            inner += call.operations(*given)
            if self._is_at_once:  # the copies are overwritten by those of the next slices
                run_at_once(inner)
                inner = []
        if self._is_at_once:
            run_at_once(after)
            return []
        return [*before, *inner, *after]

    def _copyings_of(self, head: Tensor, grad: Tensor) -> Sequence[Copying]:
        """The copies of head, head back, and gradient, worked out anew when their strides change."""
        strides = head.stride(), grad.stride()
        if strides != self._strides:
            own_head, own_grad = head if self._head is None else self._head, grad if self._grad is None else self._grad
            pairs = (own_head, head), (head, own_head), (own_grad, grad)
            self._copyings = [self._kernel.copying(target, source) for target, source in pairs]
            self._strides = strides
        return self._copyings
