"""A step as one operator in a graph that a caller compiles: a closed box, in which our own kernels run.

Traced operation by operation, a step would be compiled without our options, and anew for each learning rate, as Dynamo
guards every number that it sees. The operator reads the numbers when it runs.
"""

from collections.abc import Sequence
from itertools import count
from types import CodeType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flashopt_compile.inductor import probes


class Owner(Protocol):
    """An optimizer whose steps can be operators."""

    def step_in_graph(self, given: "Given | None") -> None: ...

    def prepare_to_trace(self) -> None: ...

    def numbers_in_graph(self, group: int, rule: str) -> Sequence[float]: ...


# The parameters to be stepped, by their positions among all of the optimizer's: head and gradient of each.
Given = dict[int, tuple[Tensor, Tensor]]

_owners: "WeakValueDictionary[int, Owner]" = WeakValueDictionary()
_handles = count(1)
_roots: set[CodeType] = set()

# What reads numbers from the host cannot be replayed by a CUDA graph.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
_LIBRARY = torch.library.Library("flashopt_compile", "FRAGMENT")
_LIBRARY.define("numbers(Tensor handle, int group, str rule, int count) -> Tensor", tags=_TAGS)
# Declaring the handle mutated makes compilers keep steps, and keep them in order.
_LIBRARY.define("step(Tensor(a!) handle) -> ()", tags=_TAGS)
_LIBRARY.define(
    "step_given(Tensor(a!) handle, Tensor(b!)[] heads, Tensor[] grads, int[] positions, bool grad_mode) -> ()",
    tags=_TAGS,
)


def new_handle(owner: Owner) -> Tensor:
    """The number by which graphs know an optimizer, in a tensor, so that one graph serves several. No two are alike."""
    # Not when this module is imported, as that would import Dynamo; torch.optim does when an optimizer is made.
    for function in (is_alone, prepare):
        torch.compiler.assume_constant_result(function)
    number = next(_handles)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def register_root(function: Any) -> None:
    """Register a function that `is_alone` recognises as a whole graph."""
    _roots.add(function.__code__)


def is_alone() -> bool:
    """Whether the graph that Dynamo is tracing is a step and nothing else: one of the roots is its outermost frame.

    Where Dynamo does not tell, no: a step among other operations is right everywhere.
    """
    if not probes.FRAMES.is_open():
        return False
    try:
        frame: Any = probes.FRAMES.needs[0].find()()
        while frame.parent is not None:
            frame = frame.parent
        return frame.f_code in _roots
    except AttributeError as error:
        probes.FRAMES.close(str(error))
        return False


def prepare(handle_name: str) -> None:
    """Have an optimizer make its states while its step is traced: a graph that makes them serves only once.

    The name is the handle's number as a string, which Dynamo takes as it is.
    """
    owner = _owners.get(int(handle_name))
    if owner is not None:
        owner.prepare_to_trace()


def _owner(handle: Tensor) -> Owner:
    owner = _owners.get(int(handle))
    if owner is None:
        raise RuntimeError("flashopt_compile: a compiled graph steps an optimizer that does not exist any more.")
    return owner


def _numbers(handle: Tensor, group: int, rule: str, count: int) -> Tensor:
    values = _owner(handle).numbers_in_graph(group, rule)
    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(count)


def _numbers_shape(handle: Tensor, group: int, rule: str, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device="cpu")


def _step(handle: Tensor) -> None:
    _owner(handle).step_in_graph(None)


def _step_given(
    handle: Tensor, heads: Sequence[Tensor], grads: Sequence[Tensor], positions: Sequence[int], grad_mode: bool
) -> None:
    try:
        pairs = zip(heads, grads, strict=True)
        _owner(handle).step_in_graph(dict(zip(positions, pairs, strict=True)))
    except BaseException:
        torch.set_grad_enabled(grad_mode)  # a graph that ends here would leave it as it is within a step
        raise


def _nothing(*_: Any) -> None:
    """The operators' effect on fake tensors: none."""


for _name, _function, _fake in (
    ("numbers", _numbers, _numbers_shape),
    ("step", _step, _nothing),
    ("step_given", _step_given, _nothing),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashopt_compile::{_name}", _fake, lib=_LIBRARY)


def numbers(handle: Tensor, group: int, rule: Any) -> dict[str, Any]:
    """Add a parameter group's hyper-parameters to the graph, with the values that they have when it runs.

    0-dim tensors and tuples of such, as the rule takes them.
    """
    counts = {name: len(default) if isinstance(default, tuple) else 1 for name, default in rule.hyper}
    values = torch.ops.flashopt_compile.numbers(handle, group, rule.name, sum(counts.values()))
    found, first = {}, 0
    for name, default in rule.hyper:
        own = [values[position] for position in range(first, first + counts[name])]
        found[name] = tuple(own) if isinstance(default, tuple) else own[0]
        first += counts[name]
    return found


def step(handle: Tensor) -> None:
    """Add a step to the graph, by the gradients that the optimizer's parameters have when it runs."""
    torch.ops.flashopt_compile.step(handle)


def step_given(
    handle: Tensor, heads: Sequence[Tensor], grads: Sequence[Tensor], positions: Sequence[int], grad_mode: bool
) -> None:
    """Add a step to the graph, of the parameters at these positions, by gradients that the graph may compute.

    `grad_mode` is whether autograd is on around the step, in which it is off.
    """
    torch.ops.flashopt_compile.step_given(handle, heads, grads, positions, grad_mode)
