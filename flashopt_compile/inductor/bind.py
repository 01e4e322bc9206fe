"""Binds a compiled step to its C++ function, past all that Dynamo, AOTAutograd and Inductor do around it in each call.

That takes longer than the rest of a step. Blocks differ in their sizes and addresses alone, and the function takes no
more of a tensor than its address: given those, it can be called directly. Where that is not plain to see, or gives
other bits than the compiled step, there is no binding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.engine.kernel import Bound, Operation
from flashopt_compile.engine.layout import Block
from flashopt_compile.engine.numbers import flat
from flashopt_compile.engine.step import Numbers, Place

PREFIX = "cpp_fused"  # of the names that Inductor gives to its C++ functions


class Unbound(Exception):
    """Why a compiled step cannot be bound."""


class NotCompiled(Unbound):
    """torch.compile has run the step without compiling it."""


class Noting:
    """A backend for torch.compile: Inductor, recording the graphs it compiles.

    No more is noted than what belongs to the function that this backend was given to. `seen` is given each graph before
    it is first run.
    """

    def __init__(self, options: Mapping[str, Any], seen: Callable[[Any], None] = lambda graph: None) -> None:
        self._options, self._seen = dict(options), seen
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def note(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_fx_inner(*args, **kwargs)
            self._seen(compiled)
            self.graphs.append(compiled)
            return compiled

        # A graph from AOTAutograd's cache would not be noted; Inductor has a cache of its own.
        with config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=note, config_patches=self._options)


@dataclass(frozen=True)
class Found:
    """The C++ function of a compiled step, and the meaning of each argument.

    Arguments are the number of a leaf of the call, the name of a size, or None: a number that the function computes for
    itself, and needs memory for.
    """

    function: Callable[..., None]
    arguments: Sequence[int | str | None]

    def bind(self, block: Block, t: Tensor, numbers: Numbers) -> Bound:
        """The function with all arguments but head and gradient."""
        rows, count, _ = block.shape
        sizes = {"rows": rows, "count": count, "stride": block.stride, "scale_stride": block.scale_stride}
        memory = iter(torch.empty(self.arguments.count(None), dtype=torch.float32, device="cpu").unbind())
        leaves: list[Any] = leaves_of([None, None, *block.rest], t, block.place, numbers)
        given = [
            sizes[each] if isinstance(each, str) else next(memory) if each is None else leaves[each]
            for each in self.arguments
        ]
        heads = [place for place, each in enumerate(self.arguments) if each == 0]
        (grad_place,) = (place for place, each in enumerate(self.arguments) if each == 1)
        function = self.function

        def run(head: Tensor, grad: Tensor) -> list[Operation]:
            arguments = given.copy()
            for place in heads:
                arguments[place] = head
            arguments[grad_place] = grad
            return [partial(function, *arguments)]

        return Bound(run)


def leaves_of(tensors: Sequence[Any], t: Any, place: Place, numbers: Numbers) -> list[Any]:
    """All tensors of a call, in one order."""
    return [*tensors, t, place.start, *(place.table or ()), *flat(numbers)]


def find(
    compiled: Callable[..., None],
    noting: Noting,
    sizes: Mapping[str, int],
    tensors: Sequence[Tensor],
    t: Tensor,
    place: Place,
    numbers: Numbers,
) -> Found:
    """Call a compiled step, and find the C++ function that it comes to.

    The sizes of the example must all differ, as arguments are told by them.
    """
    function, arguments = only_call(noting, lambda: compiled(tensors, t, place, numbers))
    leaves = {id(leaf): number for number, leaf in enumerate(leaves_of(tensors, t, place, numbers))}
    by_size = {value: name for name, value in sizes.items()}
    in_use = {tensor.untyped_storage().data_ptr() for tensor in leaves_of(tensors, t, place, numbers)}
    found: list[int | str | None] = []
    for each in arguments:
        if id(each) in leaves:
            found.append(leaves[id(each)])
        elif isinstance(each, int) and each in by_size:
            found.append(by_size[each])
        elif isinstance(each, Tensor) and _is_own_number(each, in_use):
            found.append(None)
        else:
            raise Unbound(f"its C++ function takes {type(each).__name__} that is none of its inputs")
    if found.count(1) != 1 or 0 not in found:
        raise Unbound("its C++ function does not take head and gradient once")
    if not {"rows", "count", "stride"} <= set(found):
        raise Unbound("its C++ function is for blocks of one size")
    return Found(function, found)


def only_call(noting: Noting, run: Callable[[], Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Run a compiled function twice: the one C++ function that it calls, and with which arguments."""
    run()
    if not noting.graphs:
        raise NotCompiled("torch.compile did not compile, as under a stance that forbids it")
    if len(noting.graphs) != 1:
        raise Unbound(f"torch.compile made {len(noting.graphs)} graphs of it")
    (graph,) = noting.graphs
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    real = graph.current_callable
    graph.current_callable = partial(_run_noting, real, calls)
    try:
        run()
    finally:
        graph.current_callable = real
    if len(calls) != 1:
        raise Unbound(f"it consists of {len(calls)} C++ functions")
    ((function, arguments),) = calls
    if not isinstance(function, BuiltinFunctionType):
        raise Unbound(f"its C++ function is a {type(function).__name__}")
    return function, arguments


def _is_own_number(tensor: Tensor, in_use: set[int]) -> bool:
    """Whether the tensor is a single number that the function computes for itself."""
    return tensor.dim() == 0 and tensor.element_size() == 4 and tensor.untyped_storage().data_ptr() not in in_use


def _run_noting(real: Any, calls: list[tuple[Any, tuple[Any, ...]]], inputs: Any) -> Any:
    """Run a copy of Inductor's Python wrapper that records each call of a C++ function."""
    function = getattr(real, "__func__", real)
    own = {
        name: _noting(each, calls) if name.startswith(PREFIX) else each for name, each in function.__globals__.items()
    }
    copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    return copy(*([real.__self__] if function is not real else []), inputs)


def _noting(function: Callable[..., None], calls: list[tuple[Any, tuple[Any, ...]]]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        calls.append((function, arguments))
        function(*arguments)

    return run
