"""States as torch.optim has them: fp32 tensors under its names. The tail goes along; torch.optim leaves it alone."""

from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint.values import Group, Keeper, State, Values, described, expand, is_tensor
from flashopt_compile.engine.storage import Storage

AMSGRAD = "max_exp_avg_sq"


def name_of(names: dict[str, str], letter: str) -> str:
    """torch.optim's name for a state. States of a user's own rule keep their letters."""
    return names.get(letter, letter)


def matches(state: State, names: dict[str, str], storage: Storage) -> bool:
    """True if `state` looks like torch.optim's for a rule with these states."""
    theirs = {name_of(names, letter) for letter, _ in storage.states}
    found = set(state) - {"step", "tail", AMSGRAD}
    return found <= theirs and bool(found or not storage.states)


def read(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values:
    """Decode a state that `matches`. If it does not fit, the ValueError holds the end of a sentence."""
    if AMSGRAD in state:
        raise ValueError(f"has {AMSGRAD}, of amsgrad, which is not supported")
    states, has_begun = {}, False
    for letter, _ in storage.states:
        name = name_of(names, letter)
        value = state.get(name)
        if value is None and name == "momentum_buffer":  # SGD that has not stepped yet
            states[letter] = torch.zeros(shape, dtype=torch.float32, device="cpu")
        elif is_tensor(value, shape) and value is not None and value.is_floating_point():
            states[letter], has_begun = value, True
        else:
            found = "missing" if name not in state else described(value)
            raise ValueError(f"has {name} {found}; expected is a floating-point tensor of shape {shape}")
    tail = state.get("tail")
    if isinstance(tail, Tensor) and tail.is_floating_point():
        tail = None  # torch.optim casts what it loads, and these weights have moved since
    # Not every torch.optim optimizer counts steps. A state with a momentum is past the first step.
    return Values(state.get("step", float(has_begun)), states, tail)


def write(state: State, names: dict[str, str], storage: Storage) -> dict[str, Any]:
    """Convert `state` to torch.optim's form. The tail goes along under its own name."""
    expanded = {name_of(names, letter): value for letter, value in expand(storage, state).items()}
    # Copies, because torch.optim goes on counting in the step tensor it is given.
    kept = {key: state[key].clone() for key in ("step", "tail") if key in state}
    return {**kept, **expanded}


def write_options(keeper: Keeper, group: Group) -> Group:
    """A parameter group's options, plus torch.optim's own further options at their defaults."""
    return {**torch_defaults(keeper), **group}


def torch_defaults(keeper: Keeper) -> Group:
    """The options in the parameter groups of our namesake in torch.optim, if there is one."""
    return {} if keeper.namesake is None else keeper.namesake([torch.zeros(1, device="cpu")]).defaults
