"""The shape of the tree: which module may import which, which names it may use, and how long a file may be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module may import only what comes before it in its package's list, or before its folder in the list above. A name
# with a dot gives one module another place than the rest of its folder.
ORDER: dict[str, list[str]] = {
    "quant": ["ulp", "format", "rows", "dither", "split", "compand", "grouped", "bounds"],
    "flashopt_compile": [
        *("rule", "rules", "engine", "inductor", "distributed", "options", "checkpoint", "inspection"),
        *("scaling", "stepping", "tracing", "release.selection", "cast", "optimizer", "optimizers", "release"),
        "checkpoint.archive",
        "planning",
        *("kernels", "commands", "cli", "__main__"),
    ],
    "flashopt_compile.rules": ["adam", "adamw", "lion", "sgd"],
    "flashopt_compile.engine": [
        *("storage", "step", "numbers", "layout", "kernel", "pack", "counts", "calls", "planner", "plan"),
    ],
    "flashopt_compile.inductor": [
        *("versions", "probes", "tiles", "gcc", "bind", "example", "copies", "transpose"),
        *("interleave", "compile", "operator", "backward"),
    ],
    "flashopt_compile.distributed": ["shards"],
    "flashopt_compile.checkpoint": [
        *("values", "marks", "plain", "flashoptim", "foreign", "states", "weights", "file", "beside", "archive"),
    ],
    "flashopt_compile.inspection": ["memory", "numerics", "patience"],
    "flashopt_compile.release": ["selection", "clipping", "scaling", "sums", "watch", "checks", "round", "handle"],
    "flashopt_compile.planning": ["configs", "peers", "plan"],
    "flashopt_compile.kernels": [
        *("targets", "pretend", "source", "emit", "traffic", "instructions", "offline", "interpret", "stray"),
        *("roofline", "report"),
    ],
    "flashopt_compile.commands": ["bench", "table", "plan", "convert", "inspect", "verify", "kernels"],
}
LINE_LIMIT = 350
MODULE_LIMIT = 10
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc", "common"}


def python_files(*folders: str) -> list[Path]:
    return [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names including the imported attribute: `from .a import b` in p/c.py gives p.a.b."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parts[: len(path.parts) - node.level] if node.level else ()
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of all strings that are statements: documentation, which may name anything."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def said_names(path: Path) -> Iterator[str]:
    """All dotted names in the code of a file: imports, attributes, and strings, as these can name modules too."""
    yield from imported_names(path)
    tree = parse(path)
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if re.fullmatch(r"[\w.]+", node.value):  # a name, not a sentence that mentions one
                yield node.value


def says(path: Path, *prefixes: str) -> list[str]:
    """The names in a file that equal one of `prefixes` or lie under one."""
    return [name for name in said_names(path) if any(f"{name}.".startswith(f"{each}.") for each in prefixes)]


PACKAGES = [package for package in ORDER if "." not in package]
PACKAGE_FILES = python_files(*PACKAGES)
MODULES = [path for path in PACKAGE_FILES if path.stem != "__init__"]


def rank(order: list[str], rooms: tuple[str, ...]) -> int:
    """The place in `order` of the module or folder `rooms`, or of its folder."""
    for length in range(len(rooms), 0, -1):
        if ".".join(rooms[:length]) in order:
            return order.index(".".join(rooms[:length]))
    raise AssertionError(f"{'.'.join(rooms)} has no place in ORDER: give it one")


def may_import(importer: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    """True if the imported module comes first in the package where the two paths diverge."""
    for depth in range(1, len(importer)):
        order = ORDER[".".join(importer[:depth])]
        mine, theirs = rank(order, importer[depth:]), rank(order, imported[depth:])
        if mine != theirs:
            return theirs < mine
    return False


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_imports_only_what_stands_above_it(path: Path):
    rooms = path.with_suffix("").parts
    for depth in range(1, len(rooms)):
        rank(ORDER[".".join(rooms[:depth])], rooms[depth:])
    for name in imported_names(path):
        if name.split(".")[0] == rooms[0]:
            assert may_import(rooms, tuple(name.split("."))), f"{path} imports {name}, which comes later in ORDER"


def test_order_names_only_what_exists():
    for package, order in ORDER.items():
        folder = ROOT.joinpath(*package.split("."))
        for name in order:
            path = folder.joinpath(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), (
                f"{package}.{name} is in ORDER and not in the tree"
            )


def test_few_modules_lie_outside_of_folders():
    names = [path.stem for path in MODULES if path.parent == Path("flashopt_compile")]
    assert len(names) <= MODULE_LIMIT, names


@pytest.mark.parametrize("path", python_files("quant"), ids=str)
def test_quant_never_imports_flashopt_compile(path: Path):
    assert not [name for name in imported_names(path) if name.split(".")[0] == "flashopt_compile"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_the_package_imports_nothing_of_the_rest_of_the_repository(path: Path):
    assert not [name for name in imported_names(path) if name.split(".")[0] in ("bench", "tests", "examples")]


@pytest.mark.parametrize("path", python_files("quant"), ids=str)
def test_sympy_stays_in_compand_and_bounds(path: Path):
    if path.name not in ("compand.py", "bounds.py"):
        assert not [name for name in imported_names(path) if name.split(".")[0] == "sympy"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_only_one_module_names_torch_compile(path: Path):
    if path != Path("flashopt_compile/inductor/compile.py"):
        assert not says(path, "torch.compile")


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_only_two_folders_name_compiler_internals(path: Path):
    if not {"inductor", "kernels"} & set(path.parts[1:-1]):
        assert not says(path, "torch._inductor", "torch._dynamo", "torch._functorch")


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_only_one_folder_names_sharded_tensors(path: Path):
    if "distributed" not in path.parts[1:-1]:
        assert not says(path, "torch.distributed.tensor", "DTensor")
        assert not [name for name in said_names(path) if name.split(".")[-1] == "DTensor"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_nothing_that_training_imports_patches_other_modules(path: Path):
    if "kernels" not in path.parts[1:-1]:
        assert not says(path, "unittest", "mock")


@pytest.mark.parametrize("path", python_files(*PACKAGES, "bench", "examples"), ids=str)
def test_source_file_stays_short(path: Path):
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= LINE_LIMIT, f"{path} has {lines} lines"


def test_no_file_has_a_vague_name():
    files = python_files(*PACKAGES, "bench", "examples", "tests")
    assert not [str(path) for path in files if VAGUE_NAMES & set(path.with_suffix("").parts)]
