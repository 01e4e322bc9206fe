"""Get and set a model's exact weights: the sum of each parameter's head and the tail that the optimizer keeps."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile.checkpoint.values import Group, Keeper, described, is_tensor
from flashopt_compile.distributed.shards import as_sharded, local, part_of, whole
from quant.format import WeightFormat
from quant.split import Split

COMPILED = "_orig_mod."


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        else:
            return model


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers that Accelerate, Trainer and Lightning put around it."""
    while not hasattr(optimizer, "get_fp32_model_state_dict") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def entries(model: nn.Module) -> dict[str, tuple[str, Any]]:
    """Map each key of the unwrapped model to the actual key and its parameter or buffer."""
    found = unwrapped(model).state_dict(keep_vars=True)
    return {key.replace(COMPILED, ""): (key, value) for key, value in found.items()}


def groups_of(keeper: Keeper) -> dict[int, Group]:
    """Each parameter's parameter group, by the parameter's id."""
    return {id(parameter): group for group in keeper.param_groups for parameter in group["params"]}


@torch.no_grad()
def get_fp32(keeper: Keeper, model: nn.Module, sharded: bool) -> dict[str, Any]:
    """The model's state dict with fp32 weights; buffers keep their dtype. Tied keys share a tensor."""
    groups, exact = groups_of(keeper), {}
    exported: dict[str, Any] = {}
    for key, (_, value) in entries(model).items():
        if not isinstance(value, Tensor):
            exported[key] = value
            continue
        if id(value) not in exact:
            own = weight_of(keeper, groups.get(id(value)), value) if isinstance(value, nn.Parameter) else value.clone()
            exact[id(value)] = own if sharded else whole(own)
        exported[key] = exact[id(value)]
    return exported


def weight_of(keeper: Keeper, group: Group | None, parameter: Tensor) -> Tensor:
    """Copy one parameter in fp32, with its tail if the optimizer has one. Integers stay integers."""
    state = {} if group is None else keeper.state.get(parameter, {})
    weight = None if group is None else keeper.storage(group, parameter).weight
    head = local(parameter).detach()
    if isinstance(weight, Split) and "tail" in state:
        w = weight.decode(head, local(state["tail"]))
    else:
        w = head.to(torch.float32 if head.is_floating_point() else head.dtype, copy=True)
    return as_sharded(w, parameter)


@torch.no_grad()
def set_fp32(keeper: Keeper, model: nn.Module, fp32_state_dict: Mapping[str, Any], strict: bool) -> None:
    """Set weights and buffers, and the tails of the optimizer's parameters. Everything is checked first."""
    owner = type(keeper).__name__
    if not isinstance(fp32_state_dict, Mapping):
        raise ValueError(f"{owner}: fp32_state_dict is {described(fp32_state_dict)}; expected is a dict of tensors.")
    own = entries(model)
    given = {str(key).replace(COMPILED, ""): value for key, value in fp32_state_dict.items()}
    missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{owner}: fp32_state_dict lacks {described(missing)} and has {described(unexpected)} besides the model's "
            "keys; strict=False takes what there is."
        )
    given = {key: value for key, value in given.items() if key in own}
    check_tied(owner, own, given)
    for key, value in given.items():
        held = own[key][1]
        if isinstance(held, Tensor) and not (is_tensor(value, tuple(held.shape)) and not value.is_complex()):
            raise ValueError(
                f"{owner}: {key} is {described(value)}; expected is a tensor of shape {tuple(held.shape)}."
            )
    heads: dict[str, Any] = {}
    tails: list[tuple[Tensor, Tensor]] = []
    groups = groups_of(keeper)
    for key, value in given.items():
        actual, held = own[key]
        group = groups.get(id(held))
        if not isinstance(held, Tensor):
            heads[actual] = value
            continue
        head = part_of(value, held)
        if group is not None:
            head, *tail = encode(keeper.storage(group, held).weight, head.to(local(held).device, torch.float32))
            tails += ((held, each) for each in tail)
        heads[actual] = as_sharded(head.to(held.dtype), held)
    unwrapped(model).load_state_dict(heads, strict=False)
    for parameter, tail in tails:
        if not keeper.state.get(parameter):
            keeper.state[parameter] = keeper.new_state(groups[id(parameter)], parameter)
        local(keeper.state[parameter]["tail"]).copy_(tail)


def encode(weight: WeightFormat, w: Tensor) -> tuple[Tensor, ...]:
    """Split fp32 weights into parts. Weights that were decoded from parts come back to the bit.

    Dithered steps leave some weights with a head that is not the nearest one. If the nearest head lies in another
    binade, there may be no tail that gives the same sum.
    """
    parts = weight.encode(w)
    if not isinstance(weight, Split):
        return parts
    head, tail = parts
    for towards in (-math.inf, math.inf):
        other = torch.nextafter(head, torch.full_like(head, towards))
        codes = ((w - other.to(torch.float32)) / weight.resolution(other, tail)).round()
        rest = codes.clamp(-weight.levels, weight.levels).nan_to_num(0).to(weight.tail)
        better = (weight.decode(head, tail) != w) & (weight.decode(other, rest) == w)
        head, tail = torch.where(better, other, head), torch.where(better, rest, tail)
    return head, tail


def check_tied(owner: str, own: Mapping[str, tuple[str, Any]], given: Mapping[str, Any]) -> None:
    """Raise ValueError if two keys of one parameter come with different values."""
    first: dict[int, str] = {}
    for key, value in given.items():
        held = own[key][1]
        other = first.setdefault(id(held), key) if isinstance(held, nn.Parameter) else key
        if other != key and not _same(given[other], value):
            raise ValueError(f"{owner}: {other} and {key} are one parameter; in fp32_state_dict their values differ.")


def _same(one: Any, other: Any) -> bool:
    if not (is_tensor(one) and is_tensor(other) and one.shape == other.shape):
        return False
    one, other = whole(one), whole(other)
    return torch.equal(one, other.to(one))


def parameter_keys(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The model's keys for each of the optimizer's parameters, in its order; several if tied."""
    keys: dict[int, list[str]] = {}
    for key, (_, value) in entries(model).items():
        keys.setdefault(id(value), []).append(key)
    return [keys.get(id(parameter), []) for parameter in parameters_of(optimizer)]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
