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


class Owner(Protocol):
    """An optimizer whose steps can be operators."""

    def step_in_graph(self, given: "Given | None") -> None: ...


# The parameters to be stepped, by their positions among all of the optimizer's: head and gradient of each.
Given = dict[int, tuple[Tensor, Tensor]]

_owners: "WeakValueDictionary[int, Owner]" = WeakValueDictionary()
_handles = count(1)
_roots: set[CodeType] = set()

# What reads numbers from the host cannot be replayed by a CUDA graph.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
_LIBRARY = torch.library.Library("flashopt_compile", "FRAGMENT")
# The handle is said to change, for compilers to keep steps, and to keep them in order.
_LIBRARY.define("step(Tensor(a!) handle) -> ()", tags=_TAGS)
_LIBRARY.define("step_given(Tensor(a!) handle, Tensor(b!)[] heads, Tensor[] grads, int[] positions) -> ()", tags=_TAGS)


def new_handle(owner: Owner) -> Tensor:
    """The number by which graphs know an optimizer, in a tensor, so that one graph serves several. No two are alike."""
    number = next(_handles)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def register_root(function: Any) -> None:
    """Have `is_alone` know a function of which a graph may consist."""
    _roots.add(function.__code__)


@torch.compiler.assume_constant_result
def is_alone() -> bool:
    """Whether the graph that Dynamo is tracing is a step and nothing else: one of the roots is its outermost frame.

    Where Dynamo does not tell, no: a step among other operations is right everywhere.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        frame: Any = InstructionTranslator.current_tx()
        while frame.parent is not None:
            frame = frame.parent
        return frame.f_code in _roots
    except (ImportError, AttributeError):
        return False


def _owner(handle: Tensor) -> Owner:
    owner = _owners.get(int(handle))
    if owner is None:
        raise RuntimeError("flashopt_compile: a compiled graph steps an optimizer that does not exist any more.")
    return owner


def _step(handle: Tensor) -> None:
    _owner(handle).step_in_graph(None)


def _step_given(handle: Tensor, heads: Sequence[Tensor], grads: Sequence[Tensor], positions: Sequence[int]) -> None:
    pairs = zip(heads, grads, strict=True)
    _owner(handle).step_in_graph(dict(zip(positions, pairs, strict=True)))


def _nothing(*_: Any) -> None:
    """What the operators do to tensors without values: nothing that a graph sees."""


for _name, _function in (("step", _step), ("step_given", _step_given)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashopt_compile::{_name}", _nothing, lib=_LIBRARY)


def step(handle: Tensor) -> None:
    """Add a step to the graph, by the gradients that the optimizer's parameters have when it runs."""
    torch.ops.flashopt_compile.step(handle)


def step_given(handle: Tensor, heads: Sequence[Tensor], grads: Sequence[Tensor], positions: Sequence[int]) -> None:
    """Add a step to the graph, of the parameters at these positions, by gradients that the graph may compute."""
    torch.ops.flashopt_compile.step_given(handle, heads, grads, positions)
