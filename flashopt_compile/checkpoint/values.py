"""A parameter's state as plain fp32 numbers. Every foreign format is converted to ours through it."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from flashopt_compile.engine.storage import Storage, keys_of
from flashopt_compile.options import one_line
from quant.grouped import Grouped, dequantize, quantize

Group = dict[str, Any]
State = Mapping[str, Any]


class Values(NamedTuple):
    """A parameter's states in fp32 by the rule's letters, and the tail if it has one."""

    step: float
    states: dict[str, Tensor]
    tail: Tensor | None = None


class Keeper(Protocol):
    """The interface of an optimizer for saving and loading."""

    param_groups: list[Group]
    state: Any
    hyper: ClassVar[dict[str, Any]]
    torch_names: ClassVar[dict[str, str]]
    namesake: ClassVar[type[Any] | None]

    @classmethod
    def kind(cls) -> str:
        """The name under which the class was declared with a rule."""
        ...

    def storage(self, group: Group, parameter: Tensor) -> Storage:
        """How the parameter is stored under the group's options."""
        ...

    def new_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """The parameter's state before the first step."""
        ...


def expand(storage: Storage, state: State) -> dict[str, Tensor]:
    """The states of a parameter in fp32, by the rule's letters; new memory."""
    expanded = {}
    for name, format in storage.states:
        parts = [state[key] for key in keys_of(name, format)]
        if isinstance(format, Grouped):
            codes, scales = parts
            expanded[name] = dequantize(
                codes, scales, signed=format.signed, group_size=format.group_size, compander=format.compander
            )
        else:
            expanded[name] = format.decode(*parts).clone()
    return expanded


def compress(storage: Storage, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored parts of states in fp32, rounded to nearest; the inverse of `expand` to the formats' bounds."""
    parts: dict[str, Tensor] = {}
    for name, format in storage.states:
        x = states[name].detach().to(torch.float32).contiguous()
        if isinstance(format, Grouped):
            encoded = quantize(x, signed=format.signed, group_size=format.group_size, compander=format.compander)
        else:
            encoded = format.encode(x)
        parts |= zip(keys_of(name, format), encoded, strict=True)
    return parts


def is_tensor(value: Any, shape: tuple[int, ...] | None = None) -> bool:
    """True if this is a dense tensor with values, of `shape` if given."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return dense and (shape is None or tuple(value.shape) == shape)


def described(value: Any) -> str:
    """Describe a tensor by dtype and shape, anything else by its shortened repr."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return one_line(value)
