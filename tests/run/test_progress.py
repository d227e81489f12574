# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Slow work reports its progress on stderr of rank 0; fast work reports nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest

from torchditan.run import progress as module
from torchditan.run.progress import report_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(module, "QUIET_S", 0.05)
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    monkeypatch.setattr(module, "_REDRAW_S", 0.02)


def work(seconds: float = 0.25, *, total: float | None = 10, say: object = None) -> None:
    with report_progress("drawing", total=total, unit="images", say=say) as advance:  # type: ignore[arg-type]
        advance(4)
        time.sleep(seconds)


def test_a_log_gets_whole_lines_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    work()
    out, err = capfd.readouterr()
    assert out == "" and "\r" not in err
    assert len(err.splitlines()) >= 2
    assert err.startswith("drawing: 4/10 images, ") and "ETA 0:0" in err


def test_quick_work_and_other_ranks_are_silent(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", 30.0)
    start = time.perf_counter()
    work(0)
    assert time.perf_counter() - start < 5, "it does not wait for the next line"
    monkeypatch.setattr(module, "QUIET_S", 0.01)
    monkeypatch.setenv("RANK", "1")
    work(0.1)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_has_one_line_that_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    work()
    text = stream.getvalue()
    assert "\n" not in text and text.endswith("\r\x1b[2K")
    assert max(map(len, text.split("\r\x1b[2K"))) == 19


def test_a_console_takes_the_lines_itself(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    work(say=lines.append)
    assert lines and lines[0].startswith("drawing: 4/10 images")
    assert capfd.readouterr() == ("", "")
