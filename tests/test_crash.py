"""Crashes and damage: processes killed while they save, full disks, and 500 damaged files."""

import os
import random
import signal
import subprocess
import sys
import time
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


def children(lines: list[str]) -> list[int]:
    return [int(line) for line in lines if line.strip().isdigit()]


def saves(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("saved")]


def test_killed_at_any_moment_the_previous_checkpoint_is_whole(tmp_path: Path):
    """Twenty times, each at another moment of a save; what the dead leave is removed by the next save."""
    path = tmp_path / "run.ckpt"
    moments = random.Random(7)
    program = [sys.executable, str(Path(__file__).parent / "saving.py"), str(path)]
    leftovers = 0
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(20):
            path.unlink(missing_ok=True)
            process.stdin.write("go\n")
            process.stdin.flush()
            lines: list[str] = []
            while not (children(lines) and saves(lines)):
                lines.append(process.stdout.readline())
            time.sleep(moments.uniform(0.01, 0.06))
            os.kill(children(lines)[0], signal.SIGKILL)
            done = max(saves([*lines, *iter(process.stdout.readline, "dead\n")]))
            model, optimizer = pair(seed=9)
            extra = load(path, model, optimizer)
            assert extra["count"] in (done, done + 1)  # renamed, and not told of any more
            assert (extra["weight"] == extra["count"]).all()
            leftovers += len(os.listdir(tmp_path)) - 1
        process.stdin.close()
    assert leftovers  # or no process was killed within a save
    save(path, model, optimizer)
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_what_others_are_writing_is_left_alone(tmp_path: Path):
    model, optimizer = pair()
    host = file.socket.gethostname()
    alive = tmp_path / f".run.ckpt.{host}.{os.getppid()}.partial"
    elsewhere = tmp_path / ".run.ckpt.another-host.1.partial"
    for path in (alive, elsewhere):
        path.write_bytes(b"half")
    save(tmp_path / "run.ckpt", model, optimizer)
    assert alive.exists() and elsewhere.exists()


def damage(raw: bytes, random_: random.Random) -> bytes:
    """Bytes flipped, overwritten, cut off, cut out, or put in."""
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
        # Damage where nothing is stored, such as the padding between tensors: what was loaded must be all right.
        assert repr(extra) == repr(whole)
        assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
        other, resumed = pair(seed=9)
    assert refused > 300
    assert named > 50
