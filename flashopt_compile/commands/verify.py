"""`flashopt verify`: compare two checkpoints, and show where and by how much they differ."""

import argparse
from typing import Any

import torch
from torch import Tensor

from flashopt_compile.checkpoint.archive import Archive
from flashopt_compile.checkpoint.file import leaves
from flashopt_compile.commands.table import phases, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="a checkpoint")
    parser.add_argument("second", metavar="B", help="another")


def run(options: argparse.Namespace) -> int:
    steps = phases("verify", (f"read {options.first}", f"read {options.second}", "compare"))
    archives = []
    for path in (options.first, options.second):
        next(steps)
        archives.append(Archive.read(path))
    next(steps)
    one, other = (contents(archive) for archive in archives)
    rows = [(name, *differs) for name in {**one, **other} if (differs := difference(one.get(name), other.get(name)))]
    list(steps)
    tensors = sum(isinstance(value, Tensor) for value in one.values())
    if not rows:
        print(f"bit-identical: {tensors} tensors and {len(one) - tensors} other entries")
        return 0
    print(table([("entry", "differing", "worst difference", "of largest"), *rows]))
    print(f"{len(rows)} of {len({**one, **other})} entries differ")
    return 1


def contents(archive: Archive) -> dict[str, Any]:
    """Everything that training resumes from, by name. The writers' versions are left out."""
    sections = {
        "model": archive.model,
        "state": archive.optimizer["state"],
        "param_groups": archive.optimizer["param_groups"],
        "extra": archive.extra,
    }
    return {name: leaf for section, value in sections.items() for name, leaf in leaves(section, value)}


def difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """None if bit-identical; else how many elements differ, the worst difference, and the largest value."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        same = type(one) is type(other) and repr(one) == repr(other)
        return None if same else ("–", f"{short(one)} ≠ {short(other)}", "–")
    if one.shape != other.shape or one.dtype != other.dtype:
        return "–", f"{short(one)} ≠ {short(other)}", "–"
    bits_one, bits_other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    if torch.equal(bits_one, bits_other):
        return None
    width = one.element_size()
    count = int((bits_one.view(-1, width) != bits_other.view(-1, width)).any(1).sum())
    apart = (one.double() - other.double()).abs()
    return f"{count:,}", f"{apart.max().item():.4g}", f"{one.double().abs().max().item():.4g}"


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = "absent" if value is None else str(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
