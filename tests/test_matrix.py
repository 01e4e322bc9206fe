"""The bench over all versions of torch: what it asks, keeps and writes. Nothing is installed or measured here."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import matrix, version_row
from flashopt_compile.inductor import versions
from flashopt_compile.kernels import pretend

ROW = {"registers": 150, "spills": 0}
ANSWERS: dict[str, Any] = {
    "machine": "A processor, 2 cores (AVX512), Linux; Python 3.11.7, torch 2.15.0",
    "kernels": {"sm_90": ROW, "gfx942": {**ROW, "registers": 134}, "xpu": {"registers": None, "spills": None}},
    "caller": {"seconds": 5.2, "same_bits": True},
    "first step": 11.4,
    "ratios": {"16.7M": 1.084, "300 small": 2.4},
}
SUITE = {"counts": {"passed": 4000, "failed": 1}, "failures": ["FAILED tests/test_a.py::test_b"], "seconds": 9}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked, of answers that are made up."""
    asked: list[str] = []

    def ask(version: str, question: str) -> Any:
        asked.append(f"{version} {question}")
        return ANSWERS[question]

    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "folder_of", lambda version: tmp_path / version)
    monkeypatch.setattr(matrix, "install", lambda version: asked.append(f"{version} install"))
    monkeypatch.setattr(matrix, "ask", ask)
    monkeypatch.setattr(matrix, "run_suite", lambda version: asked.append(f"{version} suite") or SUITE)
    return asked


def test_all_is_asked_once_and_written_to_the_page(asked: list[str]):
    matrix.main(["--torch", "2.15.0"])
    assert asked == [f"2.15.0 {each}" for each in ("install", *matrix.QUESTIONS, "suite")]
    text = matrix.PAGE.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    (row,) = (line for line in text.splitlines() if line.startswith("| 2.15.0"))
    for cell in ("3.9.0", "3.11.7", "4,000 passed, 1 failed", "1.08×", "2.40×", "5 s, same bits", "11 s"):
        assert f"| {cell} |" in row
    assert "3 targets, 134 to 150 registers" in row and "torch 2.15.0: FAILED tests/test_a.py::test_b" in text
    assert text.count("not run") == 6 * (len(matrix.TORCHES) - 1)
    asked.clear()
    matrix.main(["--torch", "2.15.0"])
    assert asked == []
    matrix.main(["--torch", "2.15.0", "--only", "ratios", "--again"])
    assert asked == ["2.15.0 install", "2.15.0 ratios"]


def test_an_interrupted_run_continues_where_it_was(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(version: str) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(matrix, "run_suite", interrupted)
        matrix.main(["--torch", "2.14.1"])
    asked.clear()
    matrix.main(["--torch", "2.14.1"])
    assert asked == ["2.14.1 install", "2.14.1 suite"]


def test_a_failure_is_written_and_asked_again(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    def fail(version: str, question: str) -> Any:
        raise matrix.Failed("RuntimeError: no")

    with monkeypatch.context() as patch:
        patch.setattr(matrix, "ask", fail)
        matrix.main(["--torch", "2.13.0", "--only", "caller"])
    assert "| fails: RuntimeError: no |" in matrix.PAGE.read_text(encoding="utf-8")
    matrix.main(["--torch", "2.13.0", "--only", "caller"])
    assert json.loads(matrix.path_of("2.13.0").read_text())["caller"] == ANSWERS["caller"]


@pytest.mark.parametrize("arguments", [["--torch", "2.9.1"], ["--only", "everything"]])
def test_what_is_not_known_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        matrix.main(arguments)
    assert f"is {arguments[1]}; allowed are" in capsys.readouterr().err


def test_every_question_has_an_answer():
    assert set(matrix.QUESTIONS) == set(version_row.QUESTIONS)


def test_the_matrix_and_the_library_speak_of_the_same_versions():
    minors = {version.rpartition(".")[0]: triton.rpartition(".")[0] for version, triton in matrix.TORCHES.items()}
    assert minors == pretend.TRITONS
    ends = [tuple(map(int, version.split(".")[:2])) for version in (min(matrix.TORCHES), max(matrix.TORCHES))]
    assert ends == [versions.OLDEST, versions.NEWEST]
    declared = (matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (least, most) = (f"{major}.{minor}" for major, minor in ends)
    assert f'"torch>={least},<2.{int(most.partition(".")[2]) + 1}"' in declared
