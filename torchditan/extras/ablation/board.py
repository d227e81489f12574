# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Progress output of the runner: a table with a line per run and, on a terminal, a line for the current run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TextIO

_REDRAW_S = 0.5
_ERASE = "\r\x1b[2K"


class Board:
    """The live table of a grid.

    Args:
        stream: usually stdout. If it is not a terminal, only whole lines are written.
        num_runs: rows of the grid.
        name_width: width of the column of run names.
    """

    def __init__(self, stream: TextIO, *, num_runs: int, name_width: int) -> None:
        self._stream = stream
        self._num_runs = num_runs
        self._name_width = name_width
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._num_done = self._num_made = 0
        self._seconds_made = 0.0
        self._drawn_at = float("-inf")

    def begin(self, title: str) -> None:
        numbers = f"{'images/s':>12} {'+-':>8} {'MFU':>6} {'GiB':>8} {'time':>8} {'ETA':>9}"
        self.line(title)
        self.line(f"{'':{2 * len(str(self._num_runs)) + 1}}  {'run':{self._name_width}} {'status':9} {numbers}")

    def row(self, row: Mapping[str, Any], *, is_new: bool) -> None:
        """Add the line of a run. `is_new`: the run was made just now, so the line includes the time left."""
        self._num_done += 1
        if is_new:
            self._num_made += 1
            self._seconds_made += row["elapsed_s"] or 0.0
        numbers = (
            f"{_number(row, 'images_per_second_mean', ',.1f'):>12} {_number(row, 'images_per_second_std', ',.1f'):>8} "
            f"{_number(row, 'mfu_mean', '.1f'):>6} {_number(row, 'peak_memory_gib', '.2f'):>8} "
            f"{_number(row, 'elapsed_s', '.0f', 's'):>8} {self._eta():>9}"
        )
        place = f"{self._num_done:{len(str(self._num_runs))}}/{self._num_runs}"
        text = f"{place}  {row['run_name']:{self._name_width}} {row['status']:9} {numbers}".rstrip()
        self.line(f"{text}  {row['reason']}" if row["reason"] else text)

    def _eta(self) -> str:
        """Estimated time left, assuming that the remaining runs take as long as those that were made."""
        left = self._num_runs - self._num_done
        seconds = self._seconds_made / self._num_made * left if self._num_made else 0
        return str(timedelta(seconds=round(seconds))) if seconds else ""

    def running(self, describe: Callable[[], str]) -> None:
        """Redraw the last line of a terminal at intervals; `describe` is called only then."""
        if not self._is_terminal or time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        shown = f"{self._num_done}/{self._num_runs} done, {describe()}, ETA {self._eta() or '-:--:--'}"
        self._write(shown[: shutil.get_terminal_size().columns - 1])

    def line(self, text: str) -> None:
        self._write(f"{text}\n")

    def close(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"{_ERASE if self._is_terminal else ''}{text}")
        self._stream.flush()


def _number(row: Mapping[str, Any], column: str, form: str, unit: str = "") -> str:
    value = row.get(column)
    return "" if value is None else f"{value:{form}}{unit}"
