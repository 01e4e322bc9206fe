"""States of bitsandbytes' and torchao's 8-bit optimizers: codes that index a table, and a scale per block."""

import sys
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint.plain import name_of
from flashopt_compile.checkpoint.plain import read as read_plain
from flashopt_compile.checkpoint.values import State, Values, described, is_tensor
from flashopt_compile.engine.storage import Storage

NESTED = "__bnb_optimizer_quant_state__"
NUMBERED = ("state1", "state2")  # bitsandbytes' names for a rule's states, in order
PARTS = ("codes", "scale", "qmap")  # attributes of a torchao tensor
BLOCKS = (256, 2048, 128, 64)  # block lengths of 8-bit optimizers past and present; the usual one first


def is_bitsandbytes(state: State) -> bool:
    return NESTED in state or NUMBERED[0] in state


def read_bitsandbytes(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values:
    """Decode a state of bitsandbytes. If it does not fit, the ValueError holds the end of a sentence."""
    nested = state.get(NESTED, {})
    if not isinstance(nested, dict):
        raise ValueError(f"has {NESTED} {described(nested)}; expected is a dict")
    flat = {**state, **nested}
    expanded: dict[str, Any] = {key: flat[key] for key in ("step",) if key in flat}
    if len(storage.states) > len(NUMBERED) or (NUMBERED[1] in flat) != (len(storage.states) == len(NUMBERED)):
        raise ValueError(f"has the keys {sorted(map(str, flat))} of bitsandbytes, for another number of states")
    for (letter, _), name in zip(storage.states, NUMBERED, strict=False):
        number = name[-1]
        codes, table, scales = flat.get(name), flat.get(f"qmap{number}"), flat.get(f"absmax{number}")
        if isinstance(codes, Tensor) and is_tensor(codes, shape) and codes.dtype == torch.uint8:
            codes = _decode(name, codes, table, scales)
        expanded[name_of(names, letter)] = codes
    return read_plain(expanded, names, storage, shape)


def is_torchao(state: State) -> bool:
    return any(isinstance(value, Tensor) and all(hasattr(value, part) for part in PARTS) for value in state.values())


def read_torchao(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values:
    """Decode a state of torchao. If it does not fit, the ValueError holds the end of a sentence."""
    expanded = {}
    for key, value in state.items():
        codes, scale, table = (getattr(value, part, None) for part in PARTS)
        expanded[key] = value
        if isinstance(codes, Tensor):
            if not is_tensor(codes, shape):
                raise ValueError(f"has {key} with codes {described(codes)}; expected is the shape {shape}")
            expanded[key] = _decode(str(key), codes, table, scale)
    return read_plain(expanded, names, storage, shape)


def _decode(name: str, codes: Tensor, table: Any, scales: Any) -> Tensor:
    """Decode blocks that run over the flat tensor. Their length follows from the number of scales."""
    if not is_tensor(table, (256,)) or not is_tensor(scales) or not 0 < scales.numel() <= codes.numel():
        raise ValueError(
            f"has {name} with a table {described(table)} and scales {described(scales)}; expected are 256 numbers and "
            "a scale per block"
        )
    length = next((size for size in BLOCKS if -(-codes.numel() // size) == scales.numel()), None)
    if length is None:
        raise ValueError(f"has {name} of {codes.numel()} codes with {scales.numel()} scales; blocks are of {BLOCKS}")
    scale = scales.reshape(-1).to(torch.float32).repeat_interleave(length)[: codes.numel()]
    return (table.to(torch.float32)[codes.reshape(-1).long()] * scale).view(codes.shape)


def needs_torchao(error: Exception) -> bool:
    """True if torch.load failed because torchao was not imported before."""
    return "torchao" in str(error) and "torchao.optim" not in sys.modules
