"""The shape of the tree: who may import whom, and how large a file may grow."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import only what stands before it in its package's list; `rules` is every file of rules/.
ORDER: dict[str, list[str]] = {
    "quant": ["ulp", "format", "dither", "split", "compand", "grouped", "bounds"],
    "flashopt_compile": [
        *("rule", "rules", "storage", "step", "pieces", "batch", "compiled", "options", "checkpoint", "numerics"),
        *("optimizer", "optimizers"),
    ],
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


def room(path: Path) -> str:
    """The module's name in ORDER: its path's second component."""
    return Path(path.parts[1]).stem


PACKAGE_FILES = python_files(*ORDER)
MODULES = [path for path in PACKAGE_FILES if path.stem != "__init__"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_imports_only_what_stands_above_it(path: Path):
    package = path.parts[0]
    order = ORDER[package]
    assert room(path) in order, f"{path} has no place in ORDER: give it one"
    above = order[: order.index(room(path))]
    for name in imported_names(path):
        target, _, inner = name.partition(".")
        if target == package:
            assert inner.split(".")[0] in above, f"{path} imports {name}; it may import only {above}"


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


@pytest.mark.parametrize("path", python_files(*ORDER, "bench", "examples"), ids=str)
def test_source_file_stays_short(path: Path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= LINE_LIMIT, f"{path} has {lines} lines"


def test_no_file_has_a_vague_name():
    files = python_files(*ORDER, "bench", "examples", "tests")
    assert not [str(path) for path in files if VAGUE_NAMES & set(path.with_suffix("").parts)]
