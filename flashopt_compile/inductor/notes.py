"""Notes the launches of Triton kernels that a compiled step makes, instead of carrying them out."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashopt_compile.engine.step import Numbers, Place
from flashopt_compile.inductor import probes
from flashopt_compile.inductor.bind import Unbound

_here = threading.local()


class Launch(NamedTuple):
    """A launch of a Triton kernel, as Inductor's code makes it."""

    kernel: Any
    arguments: tuple[Any, ...]
    stream: Any


class Tap:
    """Stands before a Triton kernel in Inductor's module. It passes launches on, or notes them within `noted()`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, *arguments: Any, stream: Any, **more: Any) -> Any:
        launches = getattr(_here, "launches", None)
        if launches is None:
            return self.kernel.run(*arguments, stream=stream, **more)
        launches.append(Launch(self.kernel, arguments, stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Note the launches of this thread instead of carrying them out."""
    before = getattr(_here, "launches", None)
    _here.launches = launches = []
    try:
        yield launches
    finally:
        _here.launches = before


def tap(graph: Any) -> None:
    """Put a `Tap` before each kernel that a graph launches. Raises Unbound if it has none."""
    kernel_type = probes.LAUNCHES.needs[0].find()
    found = 0
    for space in _namespaces(graph.current_callable):
        for name, value in list(space.items()):
            if isinstance(value, kernel_type):
                space[name] = Tap(value)
            found += isinstance(value, (kernel_type, Tap))
    if not found:
        raise Unbound("its code has no Triton kernel")


def _namespaces(function: Any) -> list[dict[str, Any]]:
    """The globals of a function and of those that it wraps."""
    found: list[dict[str, Any]] = []
    to_see, seen = [function], set()
    while to_see:
        function = to_see.pop()
        function = getattr(function, "__func__", function)
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, partial):
            to_see += [function.func, *function.args]
        elif isinstance(function, FunctionType):
            found.append(function.__globals__)
            to_see += [cell.cell_contents for cell in function.__closure__ or ()]
    return found


@dataclass
class Compiled:
    """A compiled step of blocks of one form. `graphs` are what Inductor made of it, for one size or another."""

    run: Callable[..., None] = field(default=lambda *_: None)
    graphs: Sequence[Any] = ()
    is_learned: bool = False  # whether a launch has been bound on an example
    untapped: str = ""  # why launches of a graph cannot be noted

    def see(self, graph: Any) -> None:
        """Prepare a new graph for noting, before it is first run."""
        try:
            tap(graph)
        except Exception as error:
            self.untapped = probes.reason_of(error)
            if getattr(_here, "launches", None) is not None:
                raise  # or it would be carried out


def noted_call(
    compiled: Compiled, tensors: Sequence[Tensor], t: Tensor, place: Place, numbers: Numbers
) -> tuple[Launch, Callable[..., Any], list[Any]]:
    """The launch of a plain call, which is not carried out; and what was called for it, with which inputs."""
    if compiled.untapped:
        raise Unbound(compiled.untapped)
    calls: list[tuple[Callable[..., Any], list[Any]]] = []

    def note(real: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        calls.append((real, list(inputs)))
        return real(inputs)

    graphs = [(graph, graph.current_callable) for graph in compiled.graphs]
    try:
        for graph, real in graphs:
            graph.current_callable = partial(note, real)
        with torch.compiler.set_stance("fail_on_recompile"), noted() as launches:
            compiled.run([tensors], t, [place], numbers)
    finally:
        for graph, real in graphs:
            graph.current_callable = real
    if len(launches) != 1 or len(calls) != 1:
        raise Unbound(f"a block takes {len(launches)} launches")
    return launches[0], *calls[0]
