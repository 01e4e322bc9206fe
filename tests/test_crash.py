"""Crashes and damage: processes killed during a save, full disks, and 500 damaged files."""

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import pair, snapshot
from training import assert_identical

from flashopt_compile import load, save
from flashopt_compile.checkpoint import file


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, optimizer = pair()
    save(tmp_path / "run.ckpt", model, optimizer, count=1)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "run.ckpt", model, optimizer, count=2)
    assert load(tmp_path / "run.ckpt", model, optimizer) == {"count": 1}
    assert os.listdir(tmp_path) == ["run.ckpt"]


LIMIT = 120.0  # seconds to wait for a line of another process


class Lines:
    """The lines that a process writes. Each must arrive within LIMIT."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._lines = process, queue.Queue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self) -> str:
        try:
            line = self._lines.get(timeout=LIMIT)
        except queue.Empty:
            raise AssertionError(f"nothing was written for {LIMIT} seconds") from None
        assert line, f"the process ended with {self._process.wait(LIMIT)}"
        return line

    def until(self, last: str) -> list[str]:
        """All lines before the line `last`."""
        lines: list[str] = []
        while (line := self.next()).strip() != last:
            lines.append(line)
        return lines


def children(lines: list[str]) -> list[int]:
    return [int(line) for line in lines if line.strip().isdigit()]


def saves(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("saved")]


@contextmanager
def started(program: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes. At the end it is killed together with its forks, if still running."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(program, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT)


def test_a_process_that_dies_or_prints_nothing_ends_the_wait(monkeypatch: pytest.MonkeyPatch):
    with started([sys.executable, "-c", "print('one'); raise SystemExit(3)"]) as process:
        lines = Lines(process)
        assert lines.next() == "one\n"
        with pytest.raises(AssertionError, match="ended with 3"):
            lines.next()
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 0.1)
    with started([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with pytest.raises(AssertionError, match=r"nothing was written for 0\.1 seconds"):
            Lines(process).next()
        monkeypatch.undo()


def test_a_save_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path):
    """Kill twenty saves, each at another moment. The next save removes what they left behind."""
    path = tmp_path / "run.ckpt"
    moments = random.Random(7)
    program = [sys.executable, str(Path(__file__).parent / "saving.py"), str(path)]
    leftovers = 0
    with started(program) as process:
        assert process.stdin is not None
        written = Lines(process)
        for _ in range(20):
            path.unlink(missing_ok=True)
            process.stdin.write("go\n")
            process.stdin.flush()
            lines: list[str] = []
            while not (children(lines) and saves(lines)):
                lines.append(written.next())
            time.sleep(moments.uniform(0.01, 0.06))
            os.kill(children(lines)[0], signal.SIGKILL)
            done = max(saves([*lines, *written.until("dead")]))
            model, optimizer = pair(seed=9)
            extra = load(path, model, optimizer)
            assert extra["count"] in (done, done + 1)  # killed after the rename and before the print
            assert (extra["weight"] == extra["count"]).all()
            leftovers += len(os.listdir(tmp_path)) - 1
        process.stdin.close()
        assert process.wait(LIMIT) == 0
    assert leftovers  # else no process was killed during a save
    save(path, model, optimizer)
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_partial_files_of_other_writers_are_left_alone(tmp_path: Path):
    model, optimizer = pair()
    host = file.socket.gethostname()
    alive = tmp_path / f".run.ckpt.{host}.{os.getppid()}.partial"
    elsewhere = tmp_path / ".run.ckpt.another-host.1.partial"
    for path in (alive, elsewhere):
        path.write_bytes(b"half")
    save(tmp_path / "run.ckpt", model, optimizer)
    assert alive.exists() and elsewhere.exists()


def damage(raw: bytes, random_: random.Random) -> bytes:
    """Flip, overwrite, truncate, cut out or insert bytes."""
    data, kind = bytearray(raw), random_.randrange(5)
    at = random_.randrange(len(data))
    length = random_.randrange(1, 40)
    if kind == 0:
        data[at] ^= 1 << random_.randrange(8)
    elif kind == 1:
        data[at : at + length] = random_.randbytes(min(length, len(data) - at))
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + length]
    else:
        data[at:at] = random_.randbytes(length)
    return bytes(data)


def test_500_damaged_files_neither_crash_nor_load_silently(tmp_path: Path):
    model, optimizer = pair()
    good, bad = tmp_path / "good.ckpt", tmp_path / "bad.ckpt"
    save(good, model, optimizer, step=7, note="a note", weights=torch.arange(50.0))
    raw = good.read_bytes()
    other, resumed = pair(seed=9)
    before, options = snapshot(other, resumed), repr(resumed.param_groups[0]["lr"])
    whole = load(good, *pair(seed=9))
    random_ = random.Random(11)
    refused = named = 0
    for _ in range(500):
        bad.write_bytes(damage(raw, random_))
        try:
            extra = load(bad, other, resumed)
        except ValueError as error:
            refused += 1
            named += "is damaged: " in str(error)
            assert str(bad) in str(error)
            assert "\n" not in str(error)
            assert_identical(snapshot(other, resumed), before)
            assert repr(resumed.param_groups[0]["lr"]) == options
            continue
        # The damage hit unused bytes, such as the padding between tensors, so everything must have loaded correctly.
        assert repr(extra) == repr(whole)
        assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
        other, resumed = pair(seed=9)
    assert refused > 300
    assert named > 50
