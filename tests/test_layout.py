"""The shape of the tree: who may import whom, and how large a file may grow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import only what stands before it in its package's list, or before its folder in the list above.
ORDER: dict[str, list[str]] = {
    "quant": ["ulp", "format", "dither", "split", "compand", "grouped", "bounds"],
    "flashopt_compile": [
        *("rule", "rules", "storage", "step", "hyper", "tiles", "vectors", "pieces", "batch", "compiled", "count"),
        "sharding",
        *(
            "options",
            "checkpoint",
            "numerics",
            "routine",
            "memory",
            "optimizer",
            "optimizers",
            "archive",
            "kernels",
            "commands",
            "cli",
        ),
    ],
    "flashopt_compile.rules": ["adam", "adamw", "lion", "sgd"],
    "flashopt_compile.checkpoint": ["values", "plain", "flashoptim", "foreign", "states", "weights", "file"],
    "flashopt_compile.kernels": [
        *("targets", "pretend", "source", "emit", "traffic", "offline", "interpret", "stray", "report"),
    ],
    "flashopt_compile.commands": ["bench", "table", "convert", "inspect", "verify", "kernels"],
}
LINE_LIMIT = 350
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}


def python_files(*folders: str) -> list[Path]:
    return [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names, the imported attribute included: `from .a import b` in p/c.py gives p.a.b."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parts[: len(path.parts) - node.level] if node.level else ()
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


PACKAGES = [package for package in ORDER if "." not in package]
PACKAGE_FILES = python_files(*PACKAGES)
MODULES = [path for path in PACKAGE_FILES if path.stem != "__init__"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_imports_only_what_stands_above_it(path: Path):
    rooms = path.with_suffix("").parts
    above: list[str] = []
    for depth in range(1, len(rooms)):
        package, order = ".".join(rooms[:depth]), ORDER[".".join(rooms[:depth])]
        assert rooms[depth] in order, f"{path} has no place in ORDER: give it one"
        above += [f"{package}.{name}" for name in order[: order.index(rooms[depth])]]
    for name in imported_names(path):
        if name.split(".")[0] == rooms[0]:
            allowed = any(f"{name}.".startswith(f"{each}.") for each in above)
            assert allowed, f"{path} imports {name}; it may import only {above}"


@pytest.mark.parametrize("path", python_files("quant"), ids=str)
def test_quant_never_imports_flashopt_compile(path: Path):
    assert not [name for name in imported_names(path) if name.split(".")[0] == "flashopt_compile"]


@pytest.mark.parametrize("path", python_files("quant"), ids=str)
def test_sympy_stays_in_compand_and_bounds(path: Path):
    if path.name not in ("compand.py", "bounds.py"):
        assert not [name for name in imported_names(path) if name.split(".")[0] == "sympy"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_only_compiled_says_torch_compile(path: Path):
    if path != Path("flashopt_compile/compiled.py"):
        spoken = [ast.unparse(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)]
        assert "torch.compile" not in [*spoken, *imported_names(path)]


@pytest.mark.parametrize("path", python_files(*PACKAGES, "bench", "examples"), ids=str)
def test_source_file_stays_short(path: Path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= LINE_LIMIT, f"{path} has {lines} lines"


def test_no_file_has_a_vague_name():
    files = python_files(*PACKAGES, "bench", "examples", "tests")
    assert not [str(path) for path in files if VAGUE_NAMES & set(path.with_suffix("").parts)]
