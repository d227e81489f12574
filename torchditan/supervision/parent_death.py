# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ranks exit when their launcher exits, and loader workers when their rank exits, however these end.

Each rank is a session leader, so it would survive a SIGKILL of torchrun. Imports no torch, which would delay the
protection by the seconds that the import takes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG = 1
_PROBE_S = 10.0


def die_with_launcher() -> None:
    """Have the kernel kill this rank when torchrun is killed. Without torchrun, does nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def outlive_launcher() -> None:
    """Undo `die_with_launcher`. Call it in the same thread."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _set_signal(0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _set_signal(signal.SIGKILL)


def check_launcher() -> None:
    """Check that torchrun did not end before this rank called `die_with_launcher`.

    torchrun's store exists before any rank. A rank that cannot reach it has no launcher to wait for.

    Raises:
        RuntimeError: the store does not answer.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + _PROBE_S
    while True:
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                place = f"{address[0]}:{address[1]}"
                raise RuntimeError(f"torchrun is gone: its store at {place} does not answer ({error})") from None
            time.sleep(0.5)


def _set_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
