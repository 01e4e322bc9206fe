"""The documentation's code runs: code blocks of README and docs, doctests, examples."""

import doctest
import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from flashopt_compile import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted([*(ROOT / "quant").rglob("*.py"), *(ROOT / "flashopt_compile").rglob("*.py")])
NAVIGATION = ROOT / "mkdocs.yml"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / link).resolve()
        assert path.exists(), f"{page.name} links to {link}"


def test_the_site_has_every_page_and_no_other():
    named = set(re.findall(r"^ +- [^:\n]+: (\S+\.md)$", NAVIGATION.read_text(encoding="utf-8"), re.MULTILINE))
    written = {page.name for page in PAGES if page.name != "README.md"}
    assert written <= named
    assert named - written <= {"index.md"}


def test_the_readme_shows_what_flashopt_plan_prints(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--config", str(ROOT / "examples" / "configs" / "llama-3.1-8b.json"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    every = {**plan["alternatives"], "FlashAdamW": plan}
    rows = {
        "torch AdamW, fp32 or mixed precision": ["torch AdamW fp32", "torch AdamW mixed"],
        "torch AdamW, pure bf16": ["torch AdamW bf16"],
        "8-bit AdamW of torchao or bitsandbytes, bf16 weights": ["torchao AdamW8bit", "bitsandbytes AdamW8bit"],
        "FlashAdamW": ["FlashAdamW"],
        "FlashAdamW, gradients released": ["FlashAdamW, gradients released"],
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    for row, names in rows.items():
        for each in (every[name] for name in names):
            sizes = (each["total_bytes"] / 2**30, each["checkpoint_bytes"] / 2**30)
            cells = [row, *(f"{size:.1f}" for size in sizes), f"{each['bytes_per_parameter']:.2f}"]
            assert f"| {' | '.join(cells)} |" in text
