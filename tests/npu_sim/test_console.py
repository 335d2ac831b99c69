"""Progress of a command: a spinner or a bar on a terminal, nothing where output is piped."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr
from typing import Any

import pytest

from npu_runtime.background import background_work
from npu_sim.commands.chat import after_prefill
from npu_sim.commands.console import progress, step


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")


BOTH = pytest.mark.parametrize("show", [step, progress])


@BOTH
def test_nothing_is_shown_where_output_is_piped(
    show: Callable[[str], AbstractContextManager[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    with show("working"), background_work("compiling"):
        pass
    assert capfd.readouterr() == ("", "")


@BOTH
def test_a_terminal_shows_the_work_and_what_it_may_be_waiting_for(
    show: Callable[[str], AbstractContextManager[Any]],
) -> None:
    with redirect_stderr(Screen()) as screen, show("reading model[1]"), background_work("compiling"):
        deadline = time.monotonic() + 20
        while "reading model[1] (compiling)" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "reading model[1] (compiling)" in screen.getvalue()


def test_a_bar_counts() -> None:
    with redirect_stderr(Screen()) as screen, progress("generating") as report:
        report(3, 12)
    assert "3/12" in screen.getvalue()


def test_a_text_has_a_spinner_until_its_first_piece() -> None:
    with redirect_stderr(Screen()) as screen:
        pieces = after_prefill(iter(["a", "b"]))
        assert next(pieces) == "a"
        shown = screen.getvalue()
        assert list(pieces) == ["b"] and list(after_prefill(iter([]))) == []
    assert "reading the prompt" in shown and screen.getvalue().startswith(shown)
