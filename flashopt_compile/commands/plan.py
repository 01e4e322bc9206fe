"""`flashopt plan`: what training a model will take on each device, before anything is allocated."""

import argparse
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashopt_compile.cast import cast_model
from flashopt_compile.commands.table import size, table
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.optimizers import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashopt_compile.planning.configs import shapes_of
from flashopt_compile.planning.plan import STRATEGIES, MemoryPlan, Planned, memory_plan

OPTIMIZERS: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "adamw": (FlashAdamW, {}),
    "adam": (FlashAdam, {}),
    "sgd": (FlashSGD, {"momentum": 0.9}),
    "sgdw": (FlashSGDW, {"momentum": 0.9}),
    "lion": (FlashLion, {}),
}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
BYTES = {
    "": 1,
    **{f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)},
}
COLUMNS = 4096  # of the matrices that a bare count of parameters is taken for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", metavar="N", help="a number of parameters, such as 8B or 350M, all in matrices")
    source.add_argument("--config", metavar="FILE", help="a Hugging Face config.json: Llama, Qwen, Mistral, GPT-2, ViT")
    source.add_argument(
        "--model", metavar="PACKAGE:FACTORY", help="a function that makes the model, on the meta device"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="%(default)s unless given")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="devices (%(default)s)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp", help="how they share the work (%(default)s)")
    parser.add_argument("--shards", type=int, metavar="N", help="devices that share the weights under hsdp (8)")
    parser.add_argument("--release", action="store_true", help="free each gradient during backward")
    parser.add_argument("--device", metavar="BYTES", help="a device's memory, such as 24GiB, to see whether it fits")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    optimizer, hyper = OPTIMIZERS[options.optimizer]
    plan = memory_plan(
        planned(options),
        optimizer,
        world=options.world,
        strategy=options.strategy,
        shards=options.shards,
        release=options.release,
        device_bytes=None if options.device is None else amount("--device", options.device, BYTES),
        **hyper,
    )
    print(json.dumps(plan.as_dict(), indent=2) if options.json else page(plan))
    return 0


def planned(options: argparse.Namespace) -> nn.Module | list[Planned]:
    """The model that the options name."""
    if options.params is not None:
        count = amount("--params", options.params, COUNTS)
        rows, rest = divmod(count, COLUMNS)
        shapes = [("matrices", (rows, COLUMNS)), ("rest", (rest,))]
        return [Planned(name, shape) for name, shape in shapes if shape[0]]
    if options.config is not None:
        try:
            config = json.loads(Path(options.config).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--config {options.config} is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"--config {options.config} holds a {type(config).__name__}; expected is an object.")
        return [Planned(name, shape) for name, shape in shapes_of(config)]
    return made(options.model)


def made(name: str) -> nn.Module:
    """The model that `package:factory` makes on the meta device, cast as `cast_model` does."""
    package, _, factory = name.partition(":")
    if not package or not factory:
        raise ValueError(f"--model is {name!r}; allowed is package:factory.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    make = getattr(importlib.import_module(package), factory, None)
    if not callable(make):
        raise ValueError(f"--model is {name!r}, and {package} has no function {factory}.")
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"--model is {name!r}, which makes a {type(model).__name__}; allowed is a torch.nn.Module.")
    cast_model(model)
    return model


def amount(argument: str, text: str, units: dict[str, int]) -> int:
    """A number with a unit; ValueError unless it is one of at least 1."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    count = round(float(found[1]) * units[found[2]]) if found and found[2] in units else 0
    if count < 1:
        allowed = ", ".join(f"{unit[0].upper()}{unit[1:]}" for unit in units if unit)
        raise ValueError(f"{argument} is {text!r}; allowed is a number of at least 1 with one of {allowed}, or none.")
    return count


def page(plan: MemoryPlan) -> str:
    """Format the plan for people to read."""
    setup = plan.setup
    where = "one device" if setup.world == 1 else f"each of {setup.world} devices ({setup.strategy})"
    parts = [("part", "bytes", "share")]
    for name, count in plan.parts.items():
        parts.append((name, size(count), f"{count / max(1, plan.total_bytes):.1%}"))
    parts.append(("total", size(plan.total_bytes), ""))
    rows: list[tuple[str, ...]] = [("optimizer", "per parameter", "on a device", "checkpoint")]
    ours = plan.bytes_per_parameter, plan.total_bytes, plan.checkpoint_bytes
    others = {
        name: (each.bytes_per_parameter, each.total_bytes, each.checkpoint_bytes)
        for name, each in plan.alternatives.items()
    }
    for name, (each, total, saved) in {plan.optimizer: ours, **others}.items():
        fits = "" if plan.device_bytes is None or total <= plan.device_bytes else " (too much)"
        rows.append((name, f"{each:.2f}", size(total) + fits, size(saved)))
    lines = [
        f"{plan.parameters:,} parameters on {where}, activations not counted",
        *("", table(parts), "", table(rows), ""),
        "mixed: fp32 weights and states beside a 16-bit model. bf16 and 8bit keep no more of a weight than 16 bits.",
    ]
    if plan.device_bytes is not None:
        lines.append("")
        if plan.fits:
            left = plan.device_bytes - plan.total_bytes
            lines.append(f"It fits into {size(plan.device_bytes)}, with {size(left)} left for activations.")
        else:
            over = plan.total_bytes - plan.device_bytes
            lines.append(f"It does not fit into {size(plan.device_bytes)}: {size(over)} too much. What would fit:")
            lines += [f"- {_in_units(change)}" for change in plan.changes] or ["- nothing that this command knows"]
    return "\n".join(lines)


def _in_units(change: str) -> str:
    return re.sub(r"(\d+) bytes per device", lambda found: f"{size(int(found[1]))} per device", change)
