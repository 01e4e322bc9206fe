"""The calls of a step: blocks in place, non-contiguous parameters in copies, whole parameters on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from flashopt_compile.engine.kernel import Bound, Copying, Kernel, Operation, run_at_once


class Call(Protocol):
    """A part of a step."""

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        """The operations of the call, given all heads and gradients of the step."""
        ...


class InPlace:
    """Steps a block where it lies in its parameter, from the element `offset` on."""

    def __init__(self, run: Bound, index: int, offset: int) -> None:
        self._run, self._index, self._offset = run, index, offset

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
        if not self._kernel.is_deferred:
            run_at_once(before)
            before = []
        given = [head if self._head is None else self._head], [grad if self._grad is None else self._grad]
        inner = [operation for call in self._calls for operation in call.operations(*given)]
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


class Whole:
    """Steps a whole parameter as soon as its operations are asked for: GPU kernels take all of it."""

    def __init__(self, step: Callable[[Tensor, Tensor], None], index: int) -> None:
        self._step, self._index = step, index

    def operations(self, heads: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Operation]:
        self._step(heads[self._index], grads[self._index])
        return []
