"""The command `flashopt`: every subcommand explains itself, and a mistake is one line."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flashopt_compile import cli
from flashopt_compile.commands import bench


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert cli.COMMANDS[command].split()[0] in capsys.readouterr().out.lower()


def test_the_list_of_commands_is_complete(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown and summary in " ".join(shown.split()) for name, summary in cli.COMMANDS.items())


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["polish"])
    assert ended.value.code == 2
    assert "polish" in capsys.readouterr().err


def test_the_versions_of_library_and_torch_are_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    library = metadata.version("flashopt-compile")
    assert capsys.readouterr().out == f"flashopt-compile {library} (torch {torch.__version__})\n"


def test_the_package_run_as_a_module_is_the_command():
    command = [sys.executable, "-m", "flashopt_compile"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.startswith("usage: flashopt ")
    refused = subprocess.run([*command, "inspect", "nowhere"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "flashopt inspect: nowhere" in refused.stderr


def test_the_benchmarks_run_in_a_process_of_their_own(capfd: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "nothing"]) == 2
    assert "python -m bench: error: argument what: invalid choice: 'nothing'" in capfd.readouterr().err


def test_the_package_without_the_repository_says_that_it_has_no_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    assert cli.main(["bench"]) == 2
    assert "they run in a clone of the repository" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "flashopt_compile", "plan", "--params", "8B"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert "Broken" not in done.stderr
