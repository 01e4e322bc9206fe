"""The documentation's code runs: code blocks of README and docs, doctests, examples."""

import doctest
import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted([*(ROOT / "quant").rglob("*.py"), *(ROOT / "flashopt_compile").rglob("*.py")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

BLOCK = re.compile(
    r"(?P<skip><!-- no-run -->\s*\n)?"
    r"^(?P<indent>[ ]*)```(?:python3?|py|pycon)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def runnable_blocks(text: str) -> list[tuple[int, str]]:
    """(lines before it, code) of each code block, except those marked no-run."""
    return [
        (text.count("\n", 0, block.start("code")), textwrap.dedent(block["code"]))
        for block in BLOCK.finditer(text)
        if not block["skip"]
    ]


def run_block(page: Path, lines_before: int, code: str, namespace: dict) -> None:
    if code.lstrip().startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), lines_before)
        test.globs = namespace  # the parser copies the dict it is given
        failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False)
        assert not failed, f"doctest in {page.name} after line {lines_before}, see the captured output"
    else:  # padded, so that tracebacks show the page's line numbers
        exec(compile("\n" * lines_before + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")  # so that pickle and the __main__ guard work as in a script
    monkeypatch.setitem(sys.modules, "__main__", main)
    for lines_before, code in runnable_blocks(page.read_text(encoding="utf-8")):
        run_block(page, lines_before, code, main.__dict__)


@pytest.mark.parametrize("name", [module_name(path) for path in SOURCES])
def test_doctests_hold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    assert not doctest.testmod(module, optionflags=OPTIONS).failed, "see the captured output"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_exits_cleanly(example: Path, tmp_path: Path):
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
