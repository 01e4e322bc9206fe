"""Whoever waits for a step that is being compiled is told so, once, and not if it is quick."""

import io
import logging
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from training import parameters, train

from flashopt_compile import FlashAdamW
from flashopt_compile.inspection import patience


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(patience, "_told", threading.Event())
    caplog.set_level(logging.INFO, logger="flashopt_compile")
    yield
    assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.daemon]


def wait(seconds: float) -> None:
    with patience.patience("FlashAdamW"):
        time.sleep(seconds)


def test_a_long_wait_is_told_once_in_the_log_and_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(patience, "SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", Terminal())
    wait(0.5)
    wait(0.2)
    (record,) = caplog.records
    assert record.name == "flashopt_compile"
    assert record.getMessage().startswith("FlashAdamW: compiling the step")
    assert sys.stderr.getvalue() == f"{record.getMessage()}\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_no_terminal_gets_no_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(patience, "SECONDS", 0.05)
    wait(0.5)
    assert len(caplog.records) == 1
    assert capsys.readouterr().err == ""


def test_it_is_told_while_a_first_step_works_and_not_after_a_quick_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    train(FlashAdamW(parameters()), range(1))  # compiled for this process now
    patience._told.clear()
    caplog.clear()
    train(FlashAdamW(parameters()), range(2))
    assert not caplog.records
    monkeypatch.setattr(patience, "SECONDS", 0.0)
    train(FlashAdamW(parameters(), eager=True), range(2))
    assert not caplog.records
    train(FlashAdamW(parameters()), range(2))
    assert len(caplog.records) == 1
