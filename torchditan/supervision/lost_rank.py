# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Processes of lost ranks: how they ended, the reason that other ranks report, and how those exit.

The other ranks exit without exit handlers, which may wait for a collective that never ends.

Imports no torch, because the launcher's verdict uses this module without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

LOST_RANK = "lost rank"
"""Start of the reason that a rank reports when another one was killed or is stuck."""
# Errors that a rank sees when others are gone. Only the others know the cause.
_OTHERS_WENT = re.compile(
    rf"^{LOST_RANK} |^stopped by rank |"
    r"Connection (closed|reset|refused)|Broken pipe|NCCL|remote process|recvValue|heartbeat|Timed out waiting"
)


class Process(NamedTuple):
    """A process of this machine, as the kernel lists it."""

    state: str
    started: str
    """Clock ticks since boot; together with the process id, this identifies a process uniquely."""
    wait_status: int
    """How it ended, while it is a zombie."""

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def is_peer_failure(reason: str) -> bool:
    """Whether an error only reports that other ranks are gone or do not answer."""
    return _OTHERS_WENT.search(reason) is not None


def read_process(pid: int) -> Process | None:
    """The process with this id; None if it does not exist, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may contain spaces
    except OSError:
        return None
    return Process(state=fields[0], started=fields[19], wait_status=int(fields[49]))


def describe_end(wait_status: int) -> str:
    """The signal that killed a process, or the exit code of one that reported nothing."""
    number = wait_status & 0x7F
    if not number:
        return f"exited with code {wait_status >> 8} without an error message"
    why = " (possibly by the system, out of memory)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{why}"


def exit_at_once(code: int) -> NoReturn:
    """Exit without exit handlers, which on NCCL may wait for a pending collective until its timeout."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code)
