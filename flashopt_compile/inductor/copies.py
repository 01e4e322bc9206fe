"""Copies between memory orders: the C++ function that Inductor writes for one, found, checked and called directly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Copying, Operation, run_at_once
from flashopt_compile.inductor import bind, probes

TARGET, SOURCE = 0, 1  # arguments of the C++ function that are no sizes


class Form(Protocol):
    """A copy's sizes and strides, by name, and the views of both tensors that they make."""

    @property
    def way(self) -> "Way": ...

    def view_target(self, tensor: Tensor) -> Tensor: ...

    def view_source(self, tensor: Tensor) -> Tensor: ...

    def _asdict(self) -> dict[str, int]: ...


class Way(Protocol):
    """A way to copy, for which Inductor writes one C++ function. Forms differ in their sizes and strides alone."""

    @property
    def path(self) -> probes.FastPath: ...

    @property
    def examples(self) -> Sequence[Form]:
        """Forms to check the function with. It is compiled for the first, whose sizes all differ."""
        ...

    @property
    def dynamic_dims(self) -> Sequence[int]: ...

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """What the elements are for the compiler: perhaps integers of the same size."""
        ...

    def options(self) -> Mapping[str, Any] | None:
        """Inductor's options; None if they need a compiler that is not there."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """What is compiled."""
        ...


@dataclass(frozen=True)
class Copier:
    """The C++ function of a copy; each of its arguments is TARGET, SOURCE or the name of one of a form's fields."""

    function: Callable[..., None]
    arguments: tuple[int | str, ...]

    def bind(self, form: Form) -> Copying:
        """The function with all arguments but target and source."""
        given: list[Any] = [getattr(form, each) if isinstance(each, str) else None for each in self.arguments]
        target_place, source_place = map(self.arguments.index, (TARGET, SOURCE))
        function = self.function

        def run(target: Tensor, source: Tensor) -> list[Operation]:
            arguments = given.copy()
            arguments[target_place], arguments[source_place] = target, source
            return [partial(function, *arguments)]

        return run


def find(way: Way, compiled: Callable[..., None], noting: bind.Noting, dtype: torch.dtype) -> Copier:
    """Find the C++ function of a way's compiled copy; Unbound if it cannot be, or copies wrongly."""
    form, *_ = way.examples
    target, source = _example(form, dtype)
    for tensor in (target, source):
        for dim in way.dynamic_dims:
            probes.mark_dynamic(tensor, dim)
    function, arguments = bind.only_call(noting, lambda: compiled(target, source))
    names = {id(target): TARGET, id(source): SOURCE}
    sizes = {value: name for name, value in form._asdict().items()}
    found = Copier(function, tuple(_name(each, names, sizes) for each in arguments))
    if any(found.arguments.count(each) != 1 for each in (TARGET, SOURCE)):
        raise bind.Unbound("its C++ function does not take target and source once")
    for each in way.examples:
        _check(found, each, dtype)
    return found


def _name(argument: Any, names: dict[int, int], sizes: dict[int, str]) -> int | str:
    if id(argument) in names:
        return names[id(argument)]
    if isinstance(argument, int) and argument in sizes:
        return sizes[argument]
    raise bind.Unbound(f"its C++ function takes {type(argument).__name__} that is none of its inputs")


def _example(form: Form, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A target of zeros and a source of random numbers."""
    random = torch.Generator("cpu").manual_seed(0)
    views = form.view_target, form.view_source
    target, source = (view(torch.zeros(_extent(view), dtype=dtype, device="cpu")) for view in views)
    source.copy_(torch.randint(-30000, 30000, source.shape, generator=random, dtype=torch.int32, device="cpu"))
    return target, source


def _extent(view: Callable[[Tensor], Tensor]) -> int:
    """How many elements the memory of a view has, and some more, which a copy is to leave as they are."""
    like = view(torch.empty(1 << 40, device="meta"))
    return sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 100


def _check(found: Copier, form: Form, dtype: torch.dtype) -> None:
    """Raise Unbound unless the function copies each element to its place, and writes nowhere else."""
    target, source = _example(form, dtype)
    run_at_once(found.bind(form)(target, source))
    expected = torch.zeros(target.untyped_storage().nbytes() // target.itemsize, dtype=dtype, device="cpu")
    form.view_target(expected).copy_(source)
    written = torch.empty(0, dtype=dtype, device="cpu").set_(target.untyped_storage())
    if not torch.equal(written, expected):
        raise bind.Unbound("its C++ function, called directly, copies elements to other places")
