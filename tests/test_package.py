"""The wheel: built, unpacked in an empty folder, and used there without the repository."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import torch, flashopt_compile, quant
from flashopt_compile import FlashAdamW
assert "site" in flashopt_compile.__file__, flashopt_compile.__file__
parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
parameter.grad = torch.ones_like(parameter)
FlashAdamW([parameter], lr=0.1, eager=True).step()
assert (parameter != 1).all()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    source = folder / "source"  # setuptools leaves a build folder behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "flashopt_compile", "quant"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_the_package_its_types_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"flashopt_compile", "quant"}
    assert {"flashopt_compile/py.typed", "quant/py.typed"} <= set(names)
    sources = {
        str(path.relative_to(ROOT)) for top in ("flashopt_compile", "quant") for path in (ROOT / top).rglob("*.py")
    }
    assert sources <= set(names)


def test_a_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    stepped = run("-c", PROGRAM)
    assert stepped.returncode == 0, stepped.stderr
    version = run("-m", "flashopt_compile", "--version")
    assert version.stdout.startswith(f"flashopt-compile {wheel.name.split('-')[1]} (torch ")
    planned = run("-m", "flashopt_compile", "plan", "--params", "8B", "--json")
    assert json.loads(planned.stdout)["bytes_per_parameter"] == pytest.approx(7.125, abs=1e-3), planned.stderr
    refused = run("-m", "flashopt_compile", "bench")
    assert refused.returncode == 2
    assert "they run in a clone of the repository" in refused.stderr
    assert not list(empty.iterdir())
