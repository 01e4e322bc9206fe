"""States as torch.optim has them: whole fp32 tensors under its names, beside the tail, which it leaves alone."""

from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint.values import Group, Keeper, State, Values, described, expand, is_tensor
from flashopt_compile.storage import Storage

AMSGRAD = "max_exp_avg_sq"


def name_of(names: dict[str, str], letter: str) -> str:
    """What torch.optim calls a state; a rule of the user's own keeps its letters."""
    return names.get(letter, letter)


def matches(state: State, names: dict[str, str], storage: Storage) -> bool:
    """Whether `state` looks as torch.optim would leave it for a rule with these states."""
    theirs = {name_of(names, letter) for letter, _ in storage.states}
    found = set(state) - {"step", "tail", AMSGRAD}
    return found <= theirs and bool(found or not storage.states)


def read(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values:
    """The values of a state that `matches`; ValueError with the end of a sentence if they do not fit."""
    if AMSGRAD in state:
        raise ValueError(f"has {AMSGRAD}, of amsgrad, which is not supported")
    states, has_begun = {}, False
    for letter, _ in storage.states:
        name = name_of(names, letter)
        value = state.get(name)
        if value is None and name == "momentum_buffer":  # SGD that has not stepped yet
            states[letter] = torch.zeros(shape)
        elif is_tensor(value, shape) and value is not None and value.is_floating_point():
            states[letter], has_begun = value, True
        else:
            found = "missing" if name not in state else described(value)
            raise ValueError(f"has {name} {found}; expected is a floating-point tensor of shape {shape}")
    tail = state.get("tail")
    if isinstance(tail, Tensor) and tail.is_floating_point():
        tail = None  # torch.optim casts what it loads: these weights have moved on since
    # Not all of torch.optim counts steps; what has a momentum is past the first.
    return Values(state.get("step", float(has_begun)), states, tail)


def write(state: State, names: dict[str, str], storage: Storage) -> dict[str, Any]:
    """`state` as torch.optim would have it; the tail goes along under its own name."""
    expanded = {name_of(names, letter): value for letter, value in expand(storage, state).items()}
    # Copies: torch.optim goes on counting in the very tensor it is given as step.
    kept = {key: state[key].clone() for key in ("step", "tail") if key in state}
    return {**kept, **expanded}


def write_options(keeper: Keeper, group: Group) -> Group:
    """A group's options and those that the namesake of torch.optim asks for besides, at its own defaults."""
    return {**torch_defaults(keeper), **group}


def torch_defaults(keeper: Keeper) -> Group:
    """What the namesake of torch.optim puts in its groups, if there is one."""
    return {} if keeper.namesake is None else keeper.namesake([torch.zeros(1)]).defaults
