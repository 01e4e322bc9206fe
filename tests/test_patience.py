"""Whoever waits for a step that is being compiled is told so, once, and not if it is quick."""

import io
import logging
import sys
import threading
import time

import pytest
from training import parameters, train

from flashopt_compile import FlashAdamW, stepping
from flashopt_compile.inspection import patience


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "_told", threading.Event())
    caplog.set_level(logging.INFO, logger="flashopt_compile")


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


def test_a_step_is_told_of_only_if_its_plan_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    plan = stepping._new_plan
    train(FlashAdamW(parameters()), range(1))  # so that the next compiles nothing
    patience._told.clear()
    caplog.clear()
    train(FlashAdamW(parameters()), range(2))
    assert not caplog.records
    monkeypatch.setattr(patience, "SECONDS", 0.05)
    monkeypatch.setattr(stepping, "_new_plan", lambda *given: (time.sleep(0.5), plan(*given))[1])
    train(FlashAdamW(parameters(), eager=True), range(2))  # nothing is compiled
    assert not caplog.records
    train(FlashAdamW(parameters()), range(2))
    assert len(caplog.records) == 1
