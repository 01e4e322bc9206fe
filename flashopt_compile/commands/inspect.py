"""`flashopt inspect`: a checkpoint's content, its size in bytes, and the health of its numbers."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from torch import Tensor

from flashopt_compile.checkpoint.archive import Archive
from flashopt_compile.checkpoint.file import leaves
from flashopt_compile.checkpoint.states import STAMP
from flashopt_compile.commands.table import phases, size, table

SHARES = ("saturated", "zeroed", "nonfinite")
OPTIONS = ("lr", "betas", "momentum", "weight_decay", "master_weight_bits", "quantize", "rounding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the file to look into")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    steps = phases("inspect", ("read and verify", "count"))
    next(steps)
    archive = Archive.read(options.checkpoint)
    next(steps)
    found = survey(archive)
    list(steps)
    print(json.dumps(found, indent=2, default=str) if options.json else page(found))
    return 0


def survey(archive: Archive) -> dict[str, Any]:
    """The content of `archive` as plain numbers and strings."""
    parts: dict[str, dict[str, Any]] = {}
    sections = {"model": archive.model, "extra": archive.extra}
    named = [(name, leaf) for name, value in sections.items() for _, leaf in leaves(name, value)]
    for state in archive.optimizer["state"].values():
        named += [(f"optimizer {key}", leaf) for key, value in state.items() for _, leaf in leaves(str(key), value)]
    for name, leaf in named:
        if isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            part = parts.setdefault(f"{name} {dtype}", {"name": name, "dtype": dtype, "tensors": 0, "elements": 0})
            part["tensors"] += 1
            part["elements"] += leaf.numel()
            part["bytes"] = part.get("bytes", 0) + leaf.nbytes
            bad = int((~leaf.isfinite()).sum()) if leaf.is_floating_point() else 0
            part["nonfinite"] = part.get("nonfinite", 0) + bad
    stamp, content = archive.optimizer.get(STAMP, {}), archive.content
    steps = [float(state["step"]) for state in archive.optimizer["state"].values() if "step" in state]
    groups = archive.optimizer["param_groups"]
    return {
        "file": archive.path,
        "bytes": sum(map(os.path.getsize, archive.files)),
        "versions": {
            "file": content.get("flashopt_file"),
            "state dict": stamp.get("format"),
            "flashopt-compile": content.get("library"),
            "torch": content.get("torch"),
        },
        "verified": "checksums" in content,
        "optimizer": stamp.get("optimizer"),
        "step": max(steps, default=0.0),
        "extra": sorted(archive.extra),
        "parts": list(parts.values()),
        "groups": [
            {"parameters": len(group["params"]), "options": {key: group[key] for key in OPTIONS if key in group}}
            for group in groups
        ],
        "health": health(archive),
    }


def health(archive: Archive) -> list[dict[str, float]] | None:
    """The health of each parameter group, or None if the optimizer is not one of ours."""
    if STAMP not in archive.optimizer:
        return None
    _, optimizer = archive.revive()
    return [{name: asdict(each)[name] for name in SHARES} for each in optimizer.health()]


def page(found: dict[str, Any]) -> str:
    """Format the survey for people to read."""
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value is not None)
    lines = [
        f"{found['file']}: {size(found['bytes'])}, {versions or 'of no known version'}",
        f"optimizer {found['optimizer'] or 'of another library'} at step {found['step']:.0f}; checksums "
        + ("verified" if found["verified"] else "none")
        + (f"; extra: {', '.join(found['extra'])}" if found["extra"] else ""),
        "",
    ]
    total = max(1, sum(part["bytes"] for part in found["parts"]))
    parts: list[tuple[str, ...]] = [("part", "dtype", "tensors", "elements", "bytes", "share", "not finite")]
    for part in found["parts"]:
        counts = str(part["tensors"]), f"{part['elements']:,}", size(part["bytes"]), f"{part['bytes'] / total:.1%}"
        parts.append((part["name"], part["dtype"], *counts, f"{part['nonfinite']:,}"))
    parts.append(("total", "", "", "", size(total), "", ""))
    lines += [table(parts), ""]
    rows: list[tuple[str, ...]] = [("group", "parameters", *SHARES, "options")]
    for number, group in enumerate(found["groups"]):
        shares = [f"{found['health'][number][name]:.2%}" if found["health"] else "–" for name in SHARES]
        options = ", ".join(f"{key} {value}" for key, value in group["options"].items())
        rows.append((str(number), str(group["parameters"]), *shares, options))
    return "\n".join([*lines, table(rows)])
