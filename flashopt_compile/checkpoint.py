"""State dicts: the keys of stored states, checked before anything is loaded, copied and never cast."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant.format import Part


class Opaque:
    """Carries one parameter's state through Optimizer.load_state_dict, which casts any tensor it can see to the
    parameter's dtype (PyTorch does so for integer codes as well)."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def check_state(owner: str, name: str, state: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Raise ValueError unless `state` holds a step and exactly `parts`."""
    expected, found = {"step", *parts}, set(state)
    if found != expected:
        raise ValueError(
            f"{owner}: the state of parameter {name} has the keys {sorted(found)}; expected are {sorted(expected)}."
        )
    for key, part in parts.items():
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != part.shape or tensor.dtype != part.dtype:
            described = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(
                f"{owner}: {key} of parameter {name} is {described}; expected is {part.dtype} of shape {part.shape}."
            )


def copied(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """`state` as the optimizer keeps it: own memory, on the parameter's device, the step a 0-dim fp32 CPU tensor."""
    own = {key: value.detach().to(device, copy=True) for key, value in state.items() if key != "step"}
    return {"step": torch.as_tensor(state["step"], dtype=torch.float32, device="cpu").clone(), **own}


def wrapped(state_dict: Mapping[str, Any], ids: Iterable[Any]) -> dict[str, Any]:
    """`state_dict` with the states of `ids` made opaque; the caller's dict is left alone."""
    known = set(ids)
    states = {key: Opaque(value) if key in known else value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": states}
