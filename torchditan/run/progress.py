# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Progress of slow work that would otherwise print nothing: an updating line on a terminal, few lines in a log.

Notable:
- a thread reports, so that single long calls (loading weights, compiling) are covered too;
- it writes to stderr, because another program may read stdout as data;
- work that finishes within `QUIET_S` prints nothing; only rank 0 reports.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

QUIET_S = 10.0
"""Seconds of work before the first line of a log."""
EVERY_S = 30.0
"""Seconds between two lines of a log."""
_REDRAW_S = 1.0

Advance = Callable[[float], None]


@contextmanager
def report_progress(
    what: str, *, total: float | None = None, unit: str = "", say: Callable[[str], None] | None = None
) -> Iterator[Advance]:
    """Report the progress of the body until it ends.

    Args:
        what: description, such as "loading outputs/quickstart".
        total: amount of work, in `unit`; None shows only the seconds.
        unit: such as "images".
        say: receives each line instead of stderr; for a console with its own progress bar.

    Yields:
        A function to call with the amount done since its last call.
    """
    done = 0.0

    def advance(amount: float = 1) -> None:
        nonlocal done
        done += amount

    if os.environ.get("RANK", "0") != "0":
        yield advance
        return
    start, finished = time.perf_counter(), threading.Event()

    def line() -> str:
        return _line(what, done=done, total=total, unit=unit, seconds=time.perf_counter() - start)

    reporter = threading.Thread(target=_report, args=(line, finished, say), name="progress", daemon=True)
    reporter.start()
    try:
        yield advance
    finally:
        finished.set()
        reporter.join()


def _report(line: Callable[[], str], finished: threading.Event, say: Callable[[str], None] | None) -> None:
    if say is None and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        is_drawn = False
        while not finished.wait(_REDRAW_S):
            text = line()[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be erased
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
            is_drawn = True
        if is_drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        return
    write = say or (lambda text: print(text, file=sys.stderr, flush=True))
    wait = QUIET_S
    while not finished.wait(wait):
        write(line())
        wait = EVERY_S


def _line(what: str, *, done: float, total: float | None, unit: str, seconds: float) -> str:
    """`drawing samples: 35/50 model steps, 0.9/s, ETA 0:00:16`, or `loading outputs/quickstart: 20 s`."""
    if total is None:
        return f"{what}: {seconds:,.0f} s"
    text = f"{what}: {done:,.0f}/{total:,.0f} {unit}"
    if not done:
        return f"{text}, {seconds:,.0f} s"
    rate = done / seconds
    left = timedelta(seconds=round(max(0.0, total - done) / rate))
    return f"{text}, {rate:,.3g}/s, ETA {left}"
