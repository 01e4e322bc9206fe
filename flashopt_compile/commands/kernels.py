"""`flashopt kernels`: the Triton kernels of a step and their cost, without a GPU."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch

from flashopt_compile.commands.table import phases, table
from flashopt_compile.kernels.emit import emit
from flashopt_compile.kernels.pretend import check_versions
from flashopt_compile.kernels.report import HEAD, MODEL, VERDICT_HEAD, Row, keep, report
from flashopt_compile.kernels.targets import TARGETS, targets_of
from flashopt_compile.optimizer import FlashOptimizer
from flashopt_compile.rule import Rule
from flashopt_compile.rules import adam, adamw, lion, sgd

RULES = {
    "adamw": adamw.adamw,
    "adam": adam.adam,
    "sgd": sgd.sgd_momentum,
    "nesterov": sgd.sgd_nesterov,
    "lion": lion.lion,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help=f"{', '.join(RULES)}, or FILE.py:rule (%(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="parameter and gradient dtype (%(default)s)")
    parser.add_argument("--master", type=int, choices=(24, 32), default=24, help="bits of each weight (%(default)s)")
    parser.add_argument("--target", default="sm_90", metavar="LIST", help=f"any of {','.join(TARGETS)} (%(default)s)")
    parser.add_argument("--shape", type=_shape, default=(4096, 4096), metavar="N,M", help="parameter shape (4096,4096)")
    parser.add_argument("--parameters", type=int, default=1, metavar="N", help="parameters in one graph (%(default)s)")
    parser.add_argument("--combo-kernels", action="store_true", help="let several parameters share a launch")
    parser.add_argument("--no-quantize", dest="quantize", action="store_false", help="states in fp32")
    parser.add_argument("--rounding", choices=("dither", "nearest"), default="dither", help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep source, PTX and AMDGCN there")
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; bytes, instructions and xu are per element"
    )


def run(options: argparse.Namespace) -> int:
    targets = targets_of(options.target)
    rule = rule_of(options.optimizer)
    if options.parameters < 1:
        raise ValueError(f"--parameters is {options.parameters}; allowed is at least 1.")
    installed = check_versions()
    rows: list[Row] = []
    names = [f"{rule.name} for {target.name}, emitted and compiled" for target in targets]
    for target, _ in zip(targets, phases("kernels", names), strict=True):
        emitted = emit(
            rule,
            target.name,
            dtype=DTYPES[options.dtype],
            shapes=[options.shape] * options.parameters,
            master_weight_bits=options.master,
            quantize=options.quantize,
            rounding=options.rounding,
            combo_kernels=options.combo_kernels,
        )
        row, machines = report(emitted)
        rows.append(row)
        if options.out:
            keep(options.out, emitted, machines)
    if options.json:
        print(json.dumps([row.figures() for row in rows], indent=2))
        return 0
    versions = ", ".join(f"{package} {version}" for package, version in installed.items())
    print(f"{emitted.step}; {options.parameters} × {options.shape}; {versions}; bytes, instructions and XU per element")
    print(table([HEAD, *(row.cells() for row in rows)]))
    if judged := [cells for row in rows for cells in row.verdict_cells()]:
        print(f"\n{MODEL}\n{table([VERDICT_HEAD, *judged])}")
    return 0


def rule_of(name: str) -> Rule:
    """Find a rule by its name, or by FILE.py:NAME, where NAME is a rule or an optimizer."""
    if name in RULES:
        return RULES[name]
    path, separator, attribute = name.rpartition(":")
    if not separator:
        raise ValueError(f"--optimizer is {name!r}; allowed are {', '.join(RULES)}, or FILE.py:rule.")
    if not Path(path).is_file():
        raise ValueError(f"--optimizer is {name!r}; there is no file {path!r}.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--optimizer is {name!r}; {path!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, attribute, None)
    if isinstance(found, type) and issubclass(found, FlashOptimizer):
        found = found.rule
    if not isinstance(found, Rule):
        raise ValueError(
            f"--optimizer is {name!r}; {attribute!r} in that file is neither a rule nor an optimizer made of one."
        )
    return found


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed are whole numbers of at least 1, with commas.")
    return shape
