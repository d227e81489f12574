# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What is left of a rank that was killed: the words for it, which the launcher's verdict knows too, and its process.

Also how the other ranks exit then, since their exit handlers may wait for a collective that never ends.

Imports no torch, since the verdict does not.
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
"""Beginning of the reason that a rank gives when another one was killed or is stuck."""
# What a rank finds when others are gone; why they went only they know.
_OTHERS_WENT = re.compile(
    rf"^{LOST_RANK} |^stopped by rank |"
    r"Connection (closed|reset|refused)|Broken pipe|NCCL|remote process|recvValue|heartbeat|Timed out waiting"
)


class Process(NamedTuple):
    """A process of this machine, as the kernel lists it."""

    state: str
    started: str
    """Clock ticks since boot: with the process id, it names one process for good."""
    wait_status: int
    """How it ended, while it is a zombie."""

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def is_peer_failure(reason: str) -> bool:
    """Whether an error's text only says that other ranks are gone or do not answer."""
    return _OTHERS_WENT.search(reason) is not None


def read_process(pid: int) -> Process | None:
    """The process with this id; None where there is none, or no /proc to ask."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold spaces
    except OSError:
        return None
    return Process(state=fields[0], started=fields[19], wait_status=int(fields[49]))


def describe_end(wait_status: int) -> str:
    """In words: killed by which signal, or the exit code of a rank that said nothing."""
    number = wait_status & 0x7F
    if not number:
        return f"ended with exit code {wait_status >> 8}, without a word"
    why = " (as by the system when memory ran out)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{why}"


def exit_at_once(code: int) -> NoReturn:
    """Exit without exit handlers, which on NCCL may wait for a pending collective until its timeout."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code)
