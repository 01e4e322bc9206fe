"""State dicts: those that an optimizer writes and those that it can read, checked before anything is loaded.

Ours are plain tensors under `step`, `tail`, `m.codes`, `m.scales` (or `m` in fp32), with a stamp under "flashopt".
"""

import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint import flashoptim, foreign, plain
from flashopt_compile.checkpoint.marks import marks_of
from flashopt_compile.checkpoint.values import Group, Keeper, State, Values, compress, described, is_tensor
from flashopt_compile.distributed.shards import as_sharded, is_sharded, local, part_of
from flashopt_compile.engine.storage import Storage
from flashopt_compile.options import STORAGE_OPTIONS, TORCH_OPTIONS, check_options
from flashopt_compile.options import plain as plain_value
from quant.format import Part

FORMAT = 1
STAMP = "flashopt"
DECOUPLED = "decoupled_weight_decay"


class Opaque:
    """Hides one parameter's state from Optimizer.load_state_dict, which would cast every tensor it sees, integer
    codes included, to the parameter's dtype."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def library_version() -> str:
    try:
        return version("flashopt-compile")
    except PackageNotFoundError:
        return "unknown"


def outgoing(keeper: Keeper, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Stamp Optimizer.state_dict's result, and convert parameter groups with compress_state_dict=False to fp32."""
    states = dict(state_dict["state"])
    groups = [{key: plain_value(value) for key, value in group.items()} for group in state_dict["param_groups"]]
    for number, (own, group) in enumerate(zip(keeper.param_groups, groups, strict=True)):
        if not own["compress_state_dict"]:
            groups[number] = plain.write_options(keeper, group)
            for key, parameter in zip(group["params"], own["params"], strict=True):
                if key in states:
                    state = {name: local(value) for name, value in states[key].items()}
                    state = plain.write(state, keeper.torch_names, keeper.storage(own, parameter))
                    states[key] = sharded_state(state, parameter, {})
    stamp = {
        "format": FORMAT,
        "optimizer": keeper.kind(),
        "library": library_version(),
        "states": len(states),
        "marks": marks_of([each for group in keeper.param_groups for each in group["params"]]),
        "dtypes": [str(each.dtype).removeprefix("torch.") for group in keeper.param_groups for each in group["params"]],
    }
    return {**state_dict, "state": states, "param_groups": groups, STAMP: stamp}


def unmarked(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of ours without marks, for files that name their parameters; torch.optim's as it is."""
    stamp = state_dict.get(STAMP)
    return {**state_dict, STAMP: {**stamp, "marks": []}} if stamp else state_dict


def incoming(keeper: Keeper, state_dict: Any) -> dict[str, Any]:
    """Convert a state dict of ours, of torch.optim or of a library we know to our keys; ValueError if it does not fit.

    The caller's dict is not changed. States are opaque to Optimizer.load_state_dict.
    """
    owner = type(keeper).__name__
    states, saved = check_frame(owner, state_dict)
    dtypes = check_stamp(owner, keeper, state_dict.get(STAMP))
    sizes, own = ([len(group["params"]) for group in groups] for groups in (saved, keeper.param_groups))
    if sizes != own:
        raise ValueError(f"{owner}: the state dict has groups of {sizes} parameters; this optimizer has {own}.")
    ids = [key for group in saved for key in group["params"]]
    positions = {key: position for position, key in enumerate(ids)}
    extra = [key for key in states if key not in positions]
    if extra or len(positions) != len(ids):
        what = f"the states {described(extra)} of no parameter" if extra else "a parameter twice"
        raise ValueError(f"{owner}: the state dict has {what} in its groups, which are of {sizes} parameters.")
    recorded = (state_dict.get(STAMP) or {}).get("states", len(states)), len(dtypes) or len(ids)
    if recorded != (len(states), len(ids)):
        raise ValueError(
            f"{owner}: the state dict has {len(states)} states of {len(ids)} parameters; when it was written it had "
            f"{recorded[0]} of {recorded[1]}."
        )
    groups: list[Group] = []
    loaded: dict[Any, Any] = {}
    for group, saved_group in zip(keeper.param_groups, saved, strict=True):
        options = understood_options(owner, keeper, group, saved_group)
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            state = states.get(key)
            if state:
                dtype = dtypes[positions[key]] if dtypes else None
                loaded[key] = understood(owner, keeper, str(key), state, options, parameter, dtype), parameter, options
        groups.append(options)
    copies = {
        key: Opaque(copied(state, parameter, options, keeper.storage(options, parameter).parts(tuple(parameter.shape))))
        for key, (state, parameter, options) in loaded.items()
    }
    return {"state": copies, "param_groups": groups}


def check_frame(owner: str, state_dict: Any) -> tuple[Mapping[Any, State], list[Group]]:
    """The states and parameter groups of a well-formed state dict."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = list(state_dict)[:5] if isinstance(state_dict, Mapping) else described(state_dict)
        raise ValueError(f"{owner}: the state dict is {found}; expected is a dict with 'state' and 'param_groups'.")
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError(f"{owner}: 'state' of the state dict is {described(states)}; expected is a dict of dicts.")
    fits = isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list | tuple)
        and all(isinstance(key, int | str) for key in group["params"])
        for group in groups
    )
    if not fits:
        raise ValueError(
            f"{owner}: 'param_groups' of the state dict is {described(groups)}; expected is a list of dicts with a "
            "list 'params' of numbers or names."
        )
    return states, list(groups)


def check_stamp(owner: str, keeper: Keeper, stamp: Any) -> list[str]:
    """The dtypes of the saved parameters. A dict without a stamp, from another library, has none."""
    if stamp is None:
        return []
    fields = {"format": int, "optimizer": str, "states": int, "dtypes": list}
    fits = isinstance(stamp, Mapping) and all(isinstance(stamp.get(key), kind) for key, kind in fields.items())
    if not fits or not all(isinstance(dtype, str) for dtype in stamp["dtypes"]):
        raise ValueError(f"{owner}: {STAMP!r} of the state dict is {described(stamp)}; expected are {list(fields)}.")
    if not 1 <= stamp["format"] <= FORMAT:
        raise ValueError(
            f"{owner}: the state dict has format {stamp['format']}, written by version {stamp.get('library')}; this "
            f"version reads formats up to {FORMAT}."
        )
    if stamp["optimizer"] != keeper.kind():
        raise ValueError(f"{owner}: the state dict is of {stamp['optimizer']}; expected is one of {keeper.kind()}.")
    return stamp["dtypes"]


def understood_options(owner: str, keeper: Keeper, group: Group, saved: Group) -> Group:
    """The optimizer's options updated with the saved ones, without those that only torch.optim has."""
    theirs = plain.torch_defaults(keeper).get(DECOUPLED)
    if theirs is not None and isinstance(saved.get(DECOUPLED), bool) and saved[DECOUPLED] != theirs:
        raise ValueError(f"{owner}: {DECOUPLED} of the state dict is {saved[DECOUPLED]}; expected is {theirs}.")
    amsgrad = saved.get("amsgrad", False)
    if amsgrad is not False:
        raise ValueError(f"{owner}: amsgrad of the state dict is {described(amsgrad)}; supported is False.")
    try:
        saved = flashoptim.read_options(dict(saved))
    except ValueError as error:
        raise ValueError(f"{owner}: the state dict's {error}.") from None
    kept = [name for name in TORCH_OPTIONS if name in group]  # say how to compute, not what was computed
    known = {name: group[name] for name in (*keeper.hyper, *STORAGE_OPTIONS, *kept)}
    options = {**known, **{key: value for key, value in saved.items() if key not in TORCH_OPTIONS}}
    for name in ("compress_state_dict", "replayable"):  # how to save and how to step, not what was saved
        options[name] = group[name]
    check_options(owner, options, keeper.hyper)
    if options["replayable"]:
        device = local(group["params"][0]).device
        options = {name: moved(value, device) for name, value in options.items()}
    if options["decouple_lr"]:
        lr = options["lr"]
        options.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)
    return options


def understood(
    owner: str, keeper: Keeper, name: str, state: State, options: Group, parameter: Tensor, dtype: str | None
) -> dict[str, Any]:
    """Convert one parameter's state, of any known library, to our keys: this process's part of it.

    The state of a sharded parameter may be sharded or complete.
    """
    here, storage = tuple(local(parameter).shape), keeper.storage(options, parameter)
    in_shards = any(map(is_sharded, state.values()))
    shape = here if in_shards else tuple(parameter.shape)
    if in_shards:
        parts = storage.parts(tuple(parameter.shape))
        state = {key: own_part(owner, name, key, value, parameter, parts) for key, value in state.items()}
    if "tail" in state and dtype is not None and dtype != str(parameter.dtype).removeprefix("torch."):
        raise ValueError(
            f"{owner}: the state of parameter {name} has a tail of {dtype} weights; the parameter is {parameter.dtype}."
        )
    values, lacking = None, [key for key, value in state.items() if isinstance(value, Mapping) and not value]
    if lacking:  # what torch.distributed.checkpoint puts in place of keys that it has not found
        raise ValueError(
            f"{owner}: the state of parameter {name} has an empty {lacking[0]}: in a flattened state dict, "
            "torch.distributed.checkpoint does not look for what compress_state_dict=False writes; set "
            "compress_state_dict=True, or flatten_optimizer_state_dict=False."
        )
    if set(state) != {"step", *storage.parts(shape)}:
        try:
            values = read(state, keeper.torch_names, storage, shape)
        except ValueError as error:
            raise ValueError(f"{owner}: the state of parameter {name} {error}.") from None
    if values is None:
        check_state(owner, name, state, storage.parts(shape))
        return {key: value if in_shards or key == "step" else part_of(value, parameter) for key, value in state.items()}
    states, tail = values.states, values.tail
    if not in_shards:
        states = {letter: part_of(value, parameter) for letter, value in states.items()}
        tail = tail if tail is None else part_of(tail, parameter)
    held = {key: local(value) for key, value in keeper.state.get(parameter, {}).items()}
    state = stored(storage, Values(values.step, states, tail), held, storage.parts(here))
    check_state(owner, name, state, storage.parts(here))
    return state


def own_part(owner: str, name: str, key: str, value: Any, parameter: Tensor, parts: Mapping[str, Part]) -> Any:
    """This process's part of a state's tensor, which may be sharded."""
    if key == "step" or not isinstance(value, Tensor):
        return value
    shape = parts[key].shape if key in parts else tuple(parameter.shape)
    if tuple(value.shape) != shape:
        raise ValueError(f"{owner}: {key} of parameter {name} is {described(value)}; expected is the shape {shape}.")
    return part_of(value, parameter)


def read(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values | None:
    """Decode a foreign state; None if no known library writes such keys."""
    if flashoptim.matches(state):
        return flashoptim.read(state, names, storage, shape)
    if foreign.is_bitsandbytes(state):
        return foreign.read_bitsandbytes(state, names, storage, shape)
    if foreign.is_torchao(state):
        return foreign.read_torchao(state, names, storage, shape)
    if plain.matches(state, names, storage):
        return plain.read(state, names, storage, shape)
    return None


def stored(storage: Storage, values: Values, held: State, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Encode values as we store them. Without a new tail the old one stays: other libraries have none."""
    state = {"step": values.step, **compress(storage, values.states)}
    part = parts.get("tail")
    if part is not None:
        zeros = torch.zeros(part.shape, dtype=part.dtype, device="cpu")
        kept = held.get("tail", zeros)
        state["tail"] = values.tail if values.tail is not None else kept if kept.dtype == part.dtype else zeros
    return state


def check_state(owner: str, name: str, state: State, parts: Mapping[str, Part]) -> None:
    """Raise ValueError unless `state` holds a step and exactly `parts`."""
    expected, found = {"step", *parts}, set(state)
    if found != expected:
        raise ValueError(
            f"{owner}: the state of parameter {name} has the keys {sorted(map(str, found))}; expected are "
            f"{sorted(expected)}."
        )
    step = state["step"]
    is_number = (is_tensor(step, ()) and not step.is_complex()) or isinstance(step, int | float)
    if not is_number or not 0 <= float(step) < math.inf:
        raise ValueError(f"{owner}: step of parameter {name} is {described(step)}; expected is a number of at least 0.")
    for key, part in parts.items():
        tensor = state[key]
        if not is_tensor(tensor, part.shape) or tensor.dtype != part.dtype:
            raise ValueError(
                f"{owner}: {key} of parameter {name} is {described(tensor)}; expected is {part.dtype} of shape "
                f"{part.shape}."
            )


def moved(value: Any, device: torch.device) -> Any:
    """A hyper-parameter whose tensors are on a device."""
    if isinstance(value, tuple | list):
        return type(value)(moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def copied(state: State, parameter: Tensor, options: Group, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Copy `state` to the parameter's device and shard it as the parameter is.

    The step becomes a 0-dim fp32 tensor, on the CPU unless the group is capturable.
    """
    device = local(parameter).device
    where = device if options["replayable"] else "cpu"
    step = torch.as_tensor(state["step"], dtype=torch.float32, device=where).clone()
    own = {
        key: value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        for key, value in state.items()
        if key != "step"
    }
    return sharded_state({"step": step, **own}, parameter, parts)


def sharded_state(state: State, parameter: Tensor, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Shard this process's part of a state as its parameter is. Shapes come from `parts`, or else from the state."""
    shapes = {key: part.shape for key, part in parts.items()}
    return {
        key: value if key == "step" else as_sharded(value, parameter, shapes.get(key)) for key, value in state.items()
    }
