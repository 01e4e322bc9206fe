"""Cast a model to 16 bits before training: which tensors stay in fp32, and hooks where the two dtypes meet."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree  # also sees into the outputs that other libraries register

from flashopt_compile.checkpoint.weights import COMPILED, unwrapped
from flashopt_compile.distributed.shards import is_sharded
from flashopt_compile.engine.storage import PARAMETER_DTYPES
from flashopt_compile.options import check_flag, one_line

Layers = Iterable[str | nn.Module] | str | nn.Module
OWNER = "cast_model"


@dataclass(frozen=True)
class CastReport:
    """What a model consists of after `cast_model`: names of the parameters and buffers in `dtype` and in fp32."""

    dtype: torch.dtype
    cast: tuple[str, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        layers = dict.fromkeys(name.rpartition(".")[0] for name in self.kept)
        where = f" ({', '.join(layers)})" if any(layers) else ""
        return f"{len(self.cast)} tensors in {self.dtype}, {len(self.kept)} kept in torch.float32{where}"


class CastInputs:
    """Hook of a module kept in fp32: its floating-point inputs become fp32."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_dtype((args, kwargs), torch.float32)


@dataclass(frozen=True)
class CastOutputs:
    """Hook of a module kept in fp32: its floating-point outputs become `dtype`."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return to_dtype(output, self.dtype)


def to_dtype(values: Any, dtype: torch.dtype) -> Any:
    """`values` with every floating-point tensor in it cast, in tuples, lists and dicts too."""
    return pytree.tree_map(lambda each: each.to(dtype) if is_floating(each) else each, values)


def is_floating(value: Any) -> bool:
    """Whether this is a tensor of numbers that may be cast. 8-bit floats are codes to most who use them."""
    return isinstance(value, Tensor) and value.dtype in (*PARAMETER_DTYPES, torch.float64)


@torch.no_grad()
def cast_model(
    model: nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    selective: bool = True,
    full_precision_layers: Layers | None = None,
    full_precision_recast_layers: Layers | None = None,
) -> CastReport:
    """Cast a model's parameters and floating-point buffers to `dtype`, in place, and report what was cast.

    `selective` keeps BatchNorm, InstanceNorm and other modules with running statistics in fp32. Layers named by pattern
    (as in fnmatch, on dotted names) or given as modules stay in fp32 with all that is in them: their inputs are cast to
    fp32, and the outputs of `full_precision_recast_layers` back to `dtype`. A layer whose weight is tied to one in fp32
    is recast too. Calling again replaces what an earlier call did. Cast before the optimizer is made; to keep the bits
    that casting rounds away, give it the old weights: `exact = model.state_dict()` before, and after
    `optimizer.set_fp32_model_state_dict(model, exact)`.
    """
    model = checked(model, dtype, selective)
    modules = named_modules(model)
    plain = chosen("full_precision_layers", full_precision_layers, modules)
    recast = chosen("full_precision_recast_layers", full_precision_recast_layers, modules)
    for module in plain & recast:
        name = next(name for name, each in modules if each is module)
        raise ValueError(
            f"{OWNER}: module {name!r} is in full_precision_layers and in full_precision_recast_layers; "
            "allowed is one of them, as its outputs stay in fp32 or are cast back."
        )
    asked = plain | recast
    inside = {module for layer in asked for module in layer.modules()}
    norms = {module for _, module in modules if selective and is_norm(module)}
    tied = tied_to(inside | norms, modules)
    kept = {tensor for module in inside | norms | tied for _, tensor in own_tensors(module)}
    casts = [
        (name, tensor, torch.float32 if tensor in kept else dtype)
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if is_floating(tensor)
    ]
    for name, tensor, to in casts:
        check_tensor(name.replace(COMPILED, ""), tensor, to)

    for _, module in modules:
        remove_hooks(module)
    # torch's own norms take 16-bit inputs beside fp32 weights, and save their inputs in 16 bits.
    border = set(outermost(model, inside)) | tied | {each for each in norms - inside if not isinstance(each, _NormBase)}
    for module in border:
        module.register_forward_pre_hook(CastInputs(), with_kwargs=True)
        if module not in plain:
            module.register_forward_hook(CastOutputs(dtype))
    for _, tensor, to in casts:
        tensor.data = tensor.data.to(to)  # the same tensor as before, to all who share it
        if tensor.grad is not None:
            tensor.grad = tensor.grad.to(to)
    names = [(name.replace(COMPILED, ""), to is dtype) for name, _, to in casts]
    return CastReport(dtype, *(tuple(name for name, is_cast in names if is_cast is which) for which in (True, False)))


def checked(model: Any, dtype: Any, selective: Any) -> nn.Module:
    """The model without the wrapper of torch.compile; TypeError or ValueError for an argument that is not allowed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OWNER}: model is a {type(model).__name__}; allowed is a torch.nn.Module.")
    if dtype not in PARAMETER_DTYPES:
        allowed = ", ".join(map(str, PARAMETER_DTYPES))
        raise ValueError(f"{OWNER}: dtype is {one_line(dtype)}; allowed are {allowed}.")
    check_flag(OWNER, "selective", selective)
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{OWNER}: {f'module {name!r} of model' if name else 'model'} is a DistributedDataParallel, whose "
                "buckets are of the old dtype; cast the model before it is wrapped."
            )
    return unwrapped(model)


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError if a parameter or buffer cannot be cast."""
    if is_sharded(tensor):
        raise TypeError(f"{OWNER}: {name} of model is a DTensor; cast the model before it is sharded.")
    if nn.parameter.is_lazy(tensor):
        raise TypeError(f"{OWNER}: {name} of model has no shape yet; run the model once before it is cast.")
    if tensor.numel() and not tensor.is_meta and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        extremes = torch.stack(tensor.detach().aminmax())
        if bool((extremes.isfinite() & ~extremes.to(dtype).isfinite()).any()):
            raise ValueError(
                f"{OWNER}: {name} of model has values of up to {float(extremes.abs().max()):.3g}; {dtype} holds finite "
                f"values of up to {torch.finfo(dtype).max:.3g}; keep its layer by full_precision_layers."
            )


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules below `model` and itself, without the wrappers and names of torch.compile."""
    named = model.named_modules(remove_duplicate=False)
    return [(f"{name}.".replace(COMPILED, "").removesuffix("."), unwrapped(module)) for name, module in named]


def chosen(argument: str, layers: Any, modules: list[tuple[str, nn.Module]]) -> set[nn.Module]:
    """The modules that an argument names, by patterns or by themselves."""
    if layers is None:
        return set()
    found: set[nn.Module] = set()
    is_one = isinstance(layers, str | nn.Module)
    if not is_one and not isinstance(layers, Iterable):
        raise TypeError(f"{OWNER}: {argument} is {one_line(layers)}; allowed is a list of patterns and modules.")
    for layer in [layers] if is_one else layers:
        if isinstance(layer, nn.Module):
            matching = {module for _, module in modules if module is unwrapped(layer)}
        elif isinstance(layer, str):
            matching = {module for name, module in modules if name and fnmatchcase(name, layer)}
        else:
            raise TypeError(f"{OWNER}: {argument} has {one_line(layer)}; allowed are patterns and modules.")
        if not matching:
            names = [name for name, _ in modules if name]
            what = "is no module of model" if isinstance(layer, nn.Module) else "matches no module of model"
            raise ValueError(f"{OWNER}: {argument} has {one_line(layer)}, which {what}; it has {one_line(names)}.")
        found |= matching
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether `module` normalizes by running statistics, or is of a kind that may."""
    return isinstance(module, _NormBase) or isinstance(getattr(module, "running_mean", None), Tensor)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def tied_to(kept: set[nn.Module], modules: list[tuple[str, nn.Module]]) -> set[nn.Module]:
    """The other modules that share a tensor with `kept`, or with each other and so on."""
    tied: set[nn.Module] = set()
    while True:
        shared = {tensor for module in kept | tied for _, tensor in own_tensors(module) if is_floating(tensor)}
        more = {module for _, module in modules if any(tensor in shared for _, tensor in own_tensors(module))}
        if more <= kept | tied:
            return tied
        tied |= more - kept


def outermost(module: nn.Module, kept: set[nn.Module]) -> Iterator[nn.Module]:
    """Those of `kept` that a module outside of them calls."""
    if module in kept:
        yield module
    else:
        for child in module.children():
            yield from outermost(child, kept)


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of an earlier cast; a copy of a cast model has them too."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, CastInputs | CastOutputs)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
