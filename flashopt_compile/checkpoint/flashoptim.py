"""State dicts of the published FlashOptim 0.1: read with its fp16 scales, and written for it to load.

    momentum = scale · ψ(code/127), ψ the inverse of softsign        variance = (scale · code/255)²

Groups of 32 run over the flat tensor. To survive Optimizer.load_state_dict, which casts to the parameter's dtype, what
is 16 bits wide is kept as that dtype's bits (fp16 scales and int16 tails of a bf16 parameter, say) and int8 tails as
numbers of that dtype.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint.plain import name_of
from flashopt_compile.checkpoint.plain import read as read_plain
from flashopt_compile.checkpoint.values import Group, Keeper, State, Values, described, expand, is_tensor
from flashopt_compile.distributed.shards import whole
from flashopt_compile.engine.storage import Storage
from quant.compand import SOFTSIGN, SQUARE_ROOT

GROUP_SIZE = 32
QUANTIZED, SCALES, ERROR_BITS, BYTEWIDTH = "::quantized", "::scales", "error_bits", "master_bytewidth"
COMPANDERS = {torch.int8: (SOFTSIGN, 127, 1), torch.uint8: (SQUARE_ROOT, 255, 2)}  # and the power of their scale
BITS = {0: None, 3: 24, 4: 32}  # master_weight_bits by the master weight's bytes
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
# The scales of a bf16 parameter's codes are fp16 values to the one version and, cast to bf16, fp16 bits to the other.
VERSIONS = ("0.1.3", "0.1.4")


def matches(state: State) -> bool:
    return ERROR_BITS in state or any(str(key).endswith(QUANTIZED) for key in state)


def read(state: State, names: dict[str, str], storage: Storage, shape: tuple[int, ...]) -> Values:
    """Decode a state that `matches`. If it does not fit, the ValueError holds the end of a sentence."""
    expanded = {key: value for key, value in state.items() if "::" not in str(key) and key != ERROR_BITS}
    for letter, _ in storage.states:
        name = name_of(names, letter)
        if name + QUANTIZED in state:
            expanded[name] = _decode(name, state[name + QUANTIZED], state.get(name + SCALES), shape)
    unknown = set(expanded) - {"step"} - {name_of(names, letter) for letter, _ in storage.states}
    if unknown:
        raise ValueError(f"has {sorted(map(str, unknown))} besides FlashOptim's keys")
    values = read_plain(expanded, names, storage, shape)
    part = storage.parts(shape).get("tail")
    if part is None or ERROR_BITS not in state:
        return values
    bits = state[ERROR_BITS]
    if not is_tensor(bits, shape):
        raise ValueError(f"has error_bits {described(bits)}; expected is a tensor of shape {shape}")
    if bits.is_floating_point():
        bits = bits.view(torch.int16) if part.dtype == torch.int16 and bits.element_size() == 2 else bits.to(part.dtype)
    return values._replace(tail=bits)


def read_options(group: Group) -> Group:
    """A parameter group's options under our names."""
    if BYTEWIDTH not in group:
        return group
    known = {key: value for key, value in group.items() if key != BYTEWIDTH}
    if not isinstance(group[BYTEWIDTH], int) or group[BYTEWIDTH] not in BITS:
        raise ValueError(f"master_bytewidth is {described(group[BYTEWIDTH])}; allowed are 0, 3 and 4")
    return {**known, "master_weight_bits": BITS[group[BYTEWIDTH]]}


def given_options(owner: str, group: Group) -> Group:
    """A parameter group's options as a user gives them, under our names."""
    if BYTEWIDTH in group and "master_weight_bits" in group:
        raise ValueError(f"{owner}: {BYTEWIDTH} and master_weight_bits are both given; allowed is one of them.")
    try:
        return read_options(group)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}.") from None


def _decode(name: str, codes: Any, scales: Any, shape: tuple[int, ...]) -> Tensor:
    groups = (-(-math.prod(shape) // GROUP_SIZE),)
    if not is_tensor(codes, shape) or codes.dtype not in COMPANDERS:
        raise ValueError(f"has {name}{QUANTIZED} {described(codes)}; expected is int8 or uint8 of shape {shape}")
    if not is_tensor(scales, groups) or scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"has {name}{SCALES} {described(scales)}; expected is float16 of shape {groups}")
    compander, levels, power = COMPANDERS[codes.dtype]
    scale = scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales
    scale = scale.to(torch.float32).repeat_interleave(GROUP_SIZE)[: codes.numel()] ** power
    return compander.expander(levels)(codes.reshape(-1).to(torch.float32), scale).view(shape)


def _encode(owner: str, name: str, x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.int8 if signed else torch.uint8
    compander, levels, power = COMPANDERS[dtype]
    flat = x.reshape(-1)
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)
    largest = groups.abs().amax(1) ** (1 / power) if len(groups) else flat
    if not bool((largest <= LARGEST_SCALE).all()):
        raise ValueError(
            f"{owner}: {name} has values of up to {x.abs().max().item():.3g}; the fp16 scales of FlashOptim hold "
            f"finite values of up to {LARGEST_SCALE**power:.3g}."
        )
    scale = largest.to(torch.float16)
    above = torch.nextafter(scale, torch.full_like(scale, math.inf)).clamp(max=LARGEST_SCALE)
    scale = torch.where(scale.to(torch.float32) < largest, above, scale)  # rounded up, so that no value is cut off
    lost = int(((largest > 0) & (largest < LEAST_SCALE)).sum())
    if lost:
        warnings.warn(
            f"{owner}: {lost} of {len(groups)} groups of {name} are below {LEAST_SCALE**power:.3g}, the least that the "
            "fp16 scales of FlashOptim hold, and are written with that scale, coarsely or as zeros.",
            stacklevel=4,
        )
    wide = (scale.to(torch.float32) ** power)[:, None]
    codes = torch.where(wide > 0, compander.compressor(levels)(groups, wide.clamp(min=LEAST_SCALE**2)), 0.0).round()
    return codes.view(-1)[: flat.numel()].to(dtype).view(x.shape), scale


def flashoptim_state_dict(keeper: Keeper, version: str = "0.1.3") -> dict[str, Any]:
    """The optimizer's state dict as published FlashOptim loads it, from `version` on.

    "0.1.3" is for all: the states of bf16 parameters are written in fp32, as neither version reads the other's 8-bit
    ones. With "0.1.4" these have 8 bits too, and 0.1.3 would take them for other numbers without a word. States of
    user-defined rules have no name there. A value beyond the range of fp16 scales is refused; one below it is written
    coarsely, with a warning. Sharded parameters are gathered, so all processes must call.
    """
    owner = type(keeper).__name__
    if version not in VERSIONS:
        raise ValueError(f"{owner}: version is {described(version)}; allowed are {' and '.join(map(repr, VERSIONS))}.")
    states: dict[int, dict[str, Any]] = {}
    groups: list[Group] = []
    for group in keeper.param_groups:
        first = sum(len(each["params"]) for each in groups)
        ids = list(range(first, first + len(group["params"])))
        for number, parameter in zip(ids, group["params"], strict=True):
            if keeper.state.get(parameter):
                states[number] = _write(keeper, owner, number, group, parameter, version)
        groups.append({**_write_options(keeper, group), "params": ids})
    return {"state": states, "param_groups": groups}


def _write(keeper: Keeper, owner: str, number: int, group: Group, parameter: Tensor, version: str) -> dict[str, Any]:
    state = {key: whole(value) for key, value in keeper.state[parameter].items()}
    storage = keeper.storage(group, parameter)
    written: dict[str, Any] = {}
    if "tail" in state:
        tail = state["tail"]
        written[ERROR_BITS] = tail.view(parameter.dtype) if tail.element_size() == 2 else tail.to(parameter.dtype)
    if "v" in dict(storage.states):  # only Adam counts steps there
        written["step"] = state["step"].to(torch.int64)
    for letter, x in expand(storage, state).items():
        if letter not in keeper.torch_names:
            raise ValueError(f"{owner}: FlashOptim has no state {letter!r}; it has {sorted(keeper.torch_names)}.")
        name = keeper.torch_names[letter]
        if not group["quantize"]:
            written[name] = x.to(parameter.dtype)
            continue
        codes, scales = _encode(owner, f"{letter} of parameter {number}", x, signed=letter == "m")
        if parameter.dtype == torch.bfloat16 and version == "0.1.3":
            written[name] = x
            continue
        wide = parameter.dtype == torch.float32
        written |= {name + QUANTIZED: codes, name + SCALES: scales if wide else scales.view(parameter.dtype)}
    return written


def _write_options(keeper: Keeper, group: Group) -> Group:
    known = {name: group[name] for name in keeper.hyper}
    bits = next(width for width, bits in BITS.items() if bits == group["master_weight_bits"])
    initial = group.get("initial_lr", group["lr"])
    return {**known, "initial_lr": initial, BYTEWIDTH: bits, "quantize": group["quantize"]}
