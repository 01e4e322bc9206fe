"""The options of a parameter group, checked once at the border, with one clear sentence for each mistake."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.distributed.shards import is_sharded, local, placements, why_not
from flashopt_compile.engine.storage import PARAMETER_DTYPES, TAILS, Storage
from quant.format import Part

# Storage and step options of all rules. Each may be set per parameter group.
STORAGE_OPTIONS: dict[str, Any] = {
    "maximize": False,
    "master_weight_bits": 24,
    "quantize": True,
    "rounding": "dither",
    "compress_state_dict": True,
    "decouple_lr": False,
    "check_numerics": False,
    "skip_nonfinite": False,
    "replayable": False,  # what users call capturable: see check_torch_options
}
# Arguments of torch.optim that choose one of its implementations, with the values we support, the default first. Ours
# is always fused and never differentiable.
TORCH_OPTIONS: dict[str, tuple[Any, ...]] = {
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (False, True),
    "differentiable": (False,),
    "amsgrad": (False,),
    "decoupled_weight_decay": (False,),  # an option of Adam; we have FlashAdamW
}
COMMON_TORCH_OPTIONS = ("foreach", "fused", "capturable", "differentiable")  # of nearly all optimizers in torch.optim

LIKENESS = 0.85  # of a misspelt key; max_momentum, which a scheduler adds, is 0.8 like momentum


def one_line(value: Any) -> str:
    """The value's repr in one line of at most 80 characters, for use in a sentence."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _at_least_zero(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def plain(value: Any) -> Any:
    """Convert numpy numbers (scalars or 0-dim arrays) to Python's, also inside a tuple or list."""
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else value
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def _is_number(value: Any) -> bool:
    value = plain(value)
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and not value.is_meta
        return dense and value.numel() == 1 and not value.is_complex() and not bool(value.isnan())
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above zero."""
    return _at_least_zero(value) and value > 0


def _are_betas(value: Any) -> bool:
    return (
        isinstance(value, tuple | list) and len(value) > 0 and all(_is_number(beta) and 0 <= beta < 1 for beta in value)
    )


def _are_bits(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value in TAILS)


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_at_least_zero, "a number of at least 0, or a tensor of one"),
    "eps": (_at_least_zero, "a number of at least 0"),
    "weight_decay": (_at_least_zero, "a number of at least 0"),
    "momentum": (_at_least_zero, "a number of at least 0"),
    "dampening": (_is_number, "a number"),
    "betas": (_are_betas, "numbers in [0, 1)"),
    "nesterov": (lambda value: isinstance(value, bool), "True or False"),
    "maximize": (lambda value: isinstance(value, bool), "True or False"),
    "quantize": (lambda value: isinstance(value, bool), "True or False"),
    "compress_state_dict": (lambda value: isinstance(value, bool), "True or False"),
    "decouple_lr": (lambda value: isinstance(value, bool), "True or False"),
    "check_numerics": (lambda value: isinstance(value, bool), "True or False"),
    "skip_nonfinite": (lambda value: isinstance(value, bool), "True or False"),
    "replayable": (lambda value: isinstance(value, bool), "True or False"),
    "master_weight_bits": (_are_bits, "24, 32 or None"),
    "rounding": (lambda value: isinstance(value, str) and value in ("dither", "nearest"), "'dither' or 'nearest'"),
}


def signature(first: str, keywords: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a constructor that takes `first`, then keywords with these defaults."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    others = [inspect.Parameter(name, kind, default=default) for name, default in keywords.items()]
    return inspect.Signature([inspect.Parameter(first, kind), *others])


def given_options(
    owner: str, hyper: Mapping[str, Any], theirs: Mapping[str, Any], args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """A constructor's arguments by name. Hyper-parameters may come by position or name, other options by name."""
    if len(args) > len(hyper):
        raise TypeError(f"{owner} takes at most {len(hyper)} positional arguments after params: {list(hyper)}.")
    given = dict(zip(hyper, args, strict=False))
    twice = given.keys() & options.keys()
    if twice:
        raise TypeError(f"{owner}: {sorted(twice)[0]} is given twice.")
    given |= check_torch_options(owner, options, theirs)
    known = {**hyper, **STORAGE_OPTIONS}
    for name in given:
        if name not in known and name not in theirs:
            raise TypeError(f"{owner}: unknown option {name!r}; allowed are {', '.join(known)}.")
    return given


def check_options(owner: str, options: Mapping[str, Any], hyper: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option whose value is not allowed; `hyper` has the rule's defaults."""
    for name, value in options.items():
        if name in CHECKS:
            allowed, description = CHECKS[name]
            if not allowed(value):
                raise ValueError(f"{owner}: {name} is {one_line(value)}; allowed is {description}.")
    for name, default in hyper.items():
        if isinstance(default, tuple) and len(options[name]) != len(default):
            raise ValueError(f"{owner}: {name} is {options[name]!r}; allowed are {len(default)} numbers.")
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        raise ValueError(
            f"{owner}: nesterov is True with momentum {options.get('momentum')!r} and dampening "
            f"{options.get('dampening')!r}; it needs a momentum above 0 and no dampening."
        )
    for name in ("check_numerics", "skip_nonfinite"):
        if options.get("replayable") and options.get(name):
            raise ValueError(
                f"{owner}: capturable is True with {name} True; allowed is False, as the host would have to look at "
                "gradients, which a CUDA graph cannot wait for."
            )


def unread(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with a number that all checks allow in place of each tensor: what the host is not to wait for."""
    return {
        name: type(value)(map(_unread, value)) if type(value) in (tuple, list) and name in CHECKS else _unread(value)
        for name, value in options.items()
    }


def _unread(value: Any) -> Any:
    return 0.5 if isinstance(value, Tensor) else value


def check_capturable(owner: str, options: Mapping[str, Any], hyper: Mapping[str, Any]) -> None:
    """Raise ValueError if a capturable group has numbers where a CUDA graph cannot read them."""
    devices = {local(each).device: None for each in options["params"] if each.requires_grad}
    if len(devices) > 1:
        raise ValueError(
            f"{owner}: a group with capturable=True has parameters on {', '.join(map(str, devices))}; allowed is one "
            "device for each group."
        )
    for name in (*hyper, "initial_lr"):
        value = options.get(name)
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Tensor) and each.device not in devices:
                raise ValueError(
                    f"{owner}: {name} is a tensor on {each.device} in a group with capturable=True; allowed are "
                    f"tensors on {next(iter(devices), each.device)}, where its parameters are, and Python numbers."
                )


def check_torch_options(owner: str, options: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`options` without those of torch.optim that its namesake, with the options `theirs`, does not have.

    ValueError for one that asks for what we lack. What `capturable` asks for is kept as `replayable` too: Dynamo sets
    the key of torch.optim's name itself, as their optimizers need it to be compiled.
    """
    for name, allowed in TORCH_OPTIONS.items():
        if name in options and options[name] not in allowed:
            values = " or ".join(repr(value) for value in allowed)
            raise ValueError(f"{owner}: {name} is {options[name]!r}; supported is {values}.")
    kept = {name: value for name, value in options.items() if name in theirs or name not in TORCH_OPTIONS}
    return {**kept, "replayable": options["capturable"]} if "capturable" in options else kept


def torch_defaults(namesake: type[Any] | None) -> dict[str, Any]:
    """The options of TORCH_OPTIONS that parameter groups carry, for tools that read them, with torch's defaults."""
    theirs = {*COMMON_TORCH_OPTIONS, *(inspect.signature(namesake).parameters if namesake else ())}
    return {name: supported[0] for name, supported in TORCH_OPTIONS.items() if name in theirs}


def check_keys(owner: str, options: Mapping[str, Any], hyper: Mapping[str, Any]) -> None:
    """Raise TypeError for a parameter group's key that is nearly one of ours. Others are the user's own."""
    known = [*hyper, *STORAGE_OPTIONS, *TORCH_OPTIONS, "params", "param_names", "initial_lr"]
    for key in options:
        close = [] if key in known or not isinstance(key, str) else get_close_matches(key.lower(), known, 1, LIKENESS)
        if close:
            raise TypeError(f"{owner}: unknown option {key!r} in a parameter group; did you mean {close[0]!r}?")


def check_parameter(owner: str, name: str, parameter: Any) -> None:
    """Raise TypeError or ValueError if we cannot store `parameter`."""
    if not isinstance(parameter, Tensor):
        raise TypeError(f"{owner}: parameter {name} is a {type(parameter).__name__}; allowed are tensors.")
    if getattr(parameter, "_fsdp_flattened", False):  # FSDP1 sets it on its flat and original parameters
        raise TypeError(
            f"{owner}: parameter {name} is part of FullyShardedDataParallel's flat parameter (FSDP1), whose states "
            "cannot be saved or resharded; use FSDP2, torch.distributed.fsdp.fully_shard."
        )
    if not parameter.requires_grad and parameter.grad is None:
        return  # frozen parameters are never touched
    if parameter.layout != torch.strided:
        raise TypeError(f"{owner}: parameter {name} has layout {parameter.layout}; allowed is torch.strided.")
    if parameter.dtype not in PARAMETER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in PARAMETER_DTYPES)
        raise TypeError(f"{owner}: parameter {name} has dtype {parameter.dtype}; allowed are {allowed}.")


def check_flag(owner: str, name: str, value: Any) -> None:
    """Raise ValueError unless an argument is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name} is {one_line(value)}; allowed is True or False.")


def check_dtype(owner: str, name: str, parameter: Tensor, known: torch.dtype) -> None:
    """Raise TypeError if a parameter's dtype has changed since its state was made. Its tail depends on the dtype."""
    if parameter.dtype != known:
        raise TypeError(
            f"{owner}: parameter {name} was {known} when its state was made and is {parameter.dtype} now, so that its "
            "tail no longer fits; cast the model before the optimizer is made, and take the exact weights along with "
            "get_fp32_model_state_dict and set_fp32_model_state_dict."
        )


def check_shards(owner: str, name: str, parameter: Tensor, storage: Storage) -> None:
    """Raise TypeError if `parameter` is sharded in a way that cuts groups."""
    reason = why_not(parameter, storage)
    if reason is not None:
        how = one_line(placements(parameter))
        raise TypeError(f"{owner}: parameter {name} of shape {tuple(parameter.shape)} is sharded as {how}; {reason}.")


def check_replaced(owner: str, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> None:
    """Raise RuntimeError if states belong to parameters that were replaced by sharded ones."""
    own = {id(parameter) for group in groups for parameter in group["params"]}
    former = [parameter for parameter in states if id(parameter) not in own]
    if former and not any(map(is_sharded, former)):
        raise RuntimeError(
            f"{owner}: the model was sharded after the states of {len(former)} parameters were made, and other "
            "parameters have taken their place (Accelerate's prepare does so under FSDP2); shard the model first, then "
            "load states or call set_fp32_model_state_dict."
        )


def check_gradient(owner: str, name: str, parameter: Tensor) -> None:
    """Raise TypeError or ValueError if `parameter` cannot be stepped by its gradient. It must have one."""
    grad = parameter.grad
    assert grad is not None
    if type(grad) is not Tensor and is_sharded(grad) and not is_sharded(parameter):
        raise TypeError(f"{owner}: the gradient of {name} is a DTensor; allowed is a Tensor, as the parameter is.")
    if grad.layout != torch.strided:
        raise TypeError(f"{owner}: the gradient of {name} has layout {grad.layout}; allowed is torch.strided.")
    if grad.dtype not in PARAMETER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in PARAMETER_DTYPES)
        raise TypeError(f"{owner}: the gradient of {name} has dtype {grad.dtype}; allowed are {allowed}.")
    if grad.shape != parameter.shape or grad.device != parameter.device:
        raise ValueError(
            f"{owner}: the gradient of {name} has shape {tuple(grad.shape)} on {grad.device}; "
            f"it must match the parameter's {tuple(parameter.shape)} on {parameter.device}."
        )


def check_grad_scale(owner: str, scale: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError or RuntimeError if a step cannot unscale gradients that torch.amp.GradScaler has left scaled."""
    for position, group in enumerate(groups):
        if group["replayable"]:
            raise RuntimeError(
                f"{owner}: capturable is True in parameter group {position} and GradScaler leaves fp16 gradients to "
                "the step, which would have to wait for it to tell whether one is Inf; set capturable=False."
            )
    if scale is not None and not 2.0**-126 <= float(scale) <= 2.0**126:
        raise ValueError(f"{owner}: grad_scale is {float(scale)}; allowed is a number from 2**-126 to 2**126.")


def check_state(owner: str, name: str, state: Mapping[str, Tensor], parts: Mapping[str, Part]) -> None:
    """Raise ValueError unless a parameter's state is a step and `parts`."""
    found = {key: value.dtype for key, value in state.items() if key != "step"}
    expected = {key: part.dtype for key, part in parts.items()}
    if found != expected:
        raise ValueError(
            f"{owner}: the state of parameter {name} is {found}, and its group's options now ask for {expected}; "
            "options that decide on storage must not change after the first step."
        )
    shapes = {"step": (), **{key: part.shape for key, part in parts.items()}}
    for key, shape in shapes.items():
        if key not in state or tuple(state[key].shape) != shape:
            has = "missing" if key not in state else f"of shape {tuple(state[key].shape)}"
            raise ValueError(f"{owner}: {key} in the state of parameter {name} is {has}; it must be of shape {shape}.")
