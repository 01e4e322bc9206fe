"""The kernel for parameters on a GPU, which are stepped whole: one launch each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashopt_compile.engine.kernel import BindWhole, Bound, Copying, Operation, copied_by_torch
from flashopt_compile.engine.layout import Block
from flashopt_compile.engine.step import Numbers, Place, Step
from flashopt_compile.inductor import launch, notes

# Elements that one call takes: enough to hide what a call costs.
CALL_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class WholeKernel:
    """Steps whole parameters in place, by the kernel for their form, which is compiled when it is first needed.

    On a GPU, by launches bound to their blocks. Where one cannot be bound, by calls of the compiled step, at once.
    """

    step: Step
    # Given a step, the first block of a form, its place, and the form.
    compiled: Callable[[Step, Sequence[Tensor], Place, tuple[Any, ...]], notes.Compiled]
    is_launched: bool = False  # by launches that are bound
    most_elements: int = CALL_ELEMENTS
    common: dict[Any, launch.Common] = field(default_factory=dict, compare=False)  # by what launches share

    @property
    def width(self) -> int:
        return self.step.storage.group_size

    @property
    def whole(self) -> BindWhole:
        return self._bind_whole

    def _bind_whole(self, tensors: Sequence[Tensor], start: int, t: Tensor, numbers: Numbers) -> Bound:
        shape, (head, grad, *rest) = tuple(tensors[0].shape), (each.detach() for each in tensors)
        cut = self.step.storage.blocks(shape, [head, grad, *rest])
        blocks = [(block, Place.at(start + first)) for first, block in cut]
        bound = [self._launch(block, t, place, numbers) for block, place in blocks]
        offsets = [block[0].storage_offset() - head.storage_offset() for block, _ in blocks]

        def launched(head: Tensor, grad: Tensor) -> list[Operation]:
            operations: list[Operation] = []
            for each, offset in zip(bound, offsets, strict=True):
                given = (tensor.view(-1)[offset:] if offset else tensor for tensor in (head, grad))
                operations += each.run(*given) if each else ()
            return operations

        def called(head: Tensor, grad: Tensor) -> list[Operation]:
            tensors = [head.detach(), grad, *rest]  # compilers mind what a tensor is a view of
            for first, block in self.step.storage.blocks(shape, tensors):
                self._run(block, t, Place.at(start + first), numbers)
            return []

        deferred = [each.is_deferred for each in bound if each]
        if len(deferred) < len(blocks):
            return Bound(called, is_deferred=False, is_at_once=True)
        if len(bound) == 1 and bound[0] is not None:
            return bound[0]
        return Bound(launched, all(deferred), not all(deferred))

    def bind(self, block: Block, t: Tensor, numbers: Numbers, like: tuple[Tensor, Tensor]) -> Bound:
        tensors = [block.view(like[0].detach()), block.view(like[1]), *block.rest]
        bound = self._launch(tensors, t, block.place, numbers)
        if bound is not None:
            return bound

        def run(head: Tensor, grad: Tensor) -> list[Any]:
            self._run([block.view(head.detach()), block.view(grad), *block.rest], t, block.place, numbers)
            return []

        return Bound(run, is_deferred=False, is_at_once=True)

    def look_up(self) -> None:
        for each in self.common.values():
            each.look_up()

    def copying(self, target: Tensor, source: Tensor) -> Copying:
        return copied_by_torch

    def _launch(self, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> Bound | None:
        """The launch of a block; None if it cannot be bound."""
        if not self.is_launched:
            return None
        return launch.try_to_bind(self._compiled(tensors, t, place), tensors, t, place, numbers, self.common)

    def _run(self, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers) -> None:
        self._compiled(tensors, t, place).run([tensors], t, [place], numbers)

    def _compiled(self, tensors: Sequence[Tensor], t: Tensor, place: Place) -> notes.Compiled:
        head, grad, *rest = tensors
        # A kernel may be written for tensors that are aligned; others would be copied to and fro.
        aligned = tuple(each.data_ptr() % launch.ALIGNMENT == 0 for each in (head, *rest))
        dims = head.dim(), head.shape[-1] if head.dim() > 1 else None
        return self.compiled(
            self.step, tensors, place, (grad.dtype, head.device, *dims, place.table is None, t.device, aligned)
        )
