"""`flashopt convert`: turn one library's checkpoint into another's, without the program that wrote it."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint import file, plain
from flashopt_compile.checkpoint.archive import OPTIMIZERS, Archive, Weights
from flashopt_compile.checkpoint.beside import safetensors
from flashopt_compile.checkpoint.flashoptim import flashoptim_state_dict
from flashopt_compile.commands.table import phases, size, table
from flashopt_compile.optimizer import FlashOptimizer

Writer = Callable[[str, Weights, FlashOptimizer, dict[str, Any]], None]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint with a model and an optimizer")
    parser.add_argument("target", metavar="DST", help="the file to write")
    parser.add_argument("--to", required=True, choices=WRITERS, help="what to write")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="SRC's optimizer, if the file does not name it")
    parser.add_argument("--dtype", choices=DTYPES, help="split fp32 weights into heads of this dtype and tails")
    parser.add_argument("--force", action="store_true", help="replace SRC if DST is the same file")


def run(options: argparse.Namespace) -> int:
    if not options.force and _is_same_file(options.source, options.target):
        raise ValueError(f"{options.target} is the source itself; name another file, or give --force to replace it.")
    steps = phases("convert", ("read and verify", "decode", "encode and write"))
    next(steps)
    archive = Archive.read(options.source)
    before = sum(map(os.path.getsize, archive.files))
    next(steps)
    weights, optimizer = archive.revive(options.optimizer, DTYPES.get(options.dtype))
    next(steps)
    WRITERS[options.to](options.target, weights, optimizer, archive.extra)
    list(steps)
    if archive.guessed:
        print(
            f"flashopt convert: {archive.guessed} parameters have equal weights; they were matched by the order of "
            "their names, which may exchange their tails and states.",
            file=sys.stderr,
        )
    rows = [("file", "holds", "bytes", "per parameter")]
    elements = max(1, sum(parameter.numel() for parameter in weights.held))
    after = os.path.getsize(options.target)
    for path, what, count in (
        (options.source, type(optimizer).__name__, before),
        (options.target, options.to, after),
    ):
        rows.append((path, what, size(count), f"{count / elements:.2f}"))
    print(table(rows))
    return 0


def _is_same_file(source: str, target: str) -> bool:
    """True if both exist and are the same file, including hard and symbolic links."""
    return os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target)


def write_torch(path: str, weights: Weights, optimizer: FlashOptimizer, extra: dict[str, Any]) -> None:
    """fp32 weights, and states under torch.optim's names without our own additions."""
    for group in optimizer.param_groups:
        group["compress_state_dict"] = False
    expanded = optimizer.state_dict()
    states = {
        key: {name: value for name, value in state.items() if name != "tail"}
        for key, state in expanded["state"].items()
    }
    theirs = {*plain.torch_defaults(optimizer), *optimizer.hyper, "params", "param_names", "initial_lr"}
    groups = [{key: value for key, value in group.items() if key in theirs} for group in expanded["param_groups"]]
    model = optimizer.get_fp32_model_state_dict(weights)
    file.write(path, {"model": model, "optimizer": {"state": states, "param_groups": groups}, "extra": extra})


def write_flash(path: str, weights: Weights, optimizer: FlashOptimizer, extra: dict[str, Any]) -> None:
    file.save(path, weights, optimizer, **extra)


def write_flashoptim(path: str, weights: Weights, optimizer: FlashOptimizer, extra: dict[str, Any]) -> None:
    model = {key: value.detach() if isinstance(value, Tensor) else value for key, value in weights.tensors.items()}
    file.write(path, {"model": model, "optimizer": flashoptim_state_dict(optimizer), "extra": extra})


def write_fp32(path: str, weights: Weights, optimizer: FlashOptimizer, extra: dict[str, Any]) -> None:
    """Only the weights, exact, for any program that reads safetensors."""
    save_tensors(path, optimizer.get_fp32_model_state_dict(weights))


def write_split(path: str, weights: Weights, optimizer: FlashOptimizer, extra: dict[str, Any]) -> None:
    """Heads under their usual keys, so that any program can use them, and tails under `key.tail`."""
    tensors: dict[str, Any] = dict(weights.tensors)
    for key, value in weights.tensors.items():
        tail = optimizer.state.get(value, {}).get("tail") if isinstance(value, torch.nn.Parameter) else None
        if tail is not None:
            tensors[f"{key}.tail"] = tail
    save_tensors(path, tensors)


def save_tensors(path: str, tensors: dict[str, Any]) -> None:
    own = {key: value.detach().clone().contiguous() for key, value in tensors.items() if isinstance(value, Tensor)}
    with file.replacing(path) as partial:
        safetensors().save_file(own, partial, metadata={"format": "pt"})


WRITERS: dict[str, Writer] = {
    "torch": write_torch,
    "flash": write_flash,
    "flashoptim": write_flashoptim,
    "safetensors-fp32": write_fp32,
    "safetensors-split": write_split,
}
