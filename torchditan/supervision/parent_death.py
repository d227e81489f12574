# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A rank ends with its launcher, and a loader worker with its rank, however those end.

Ranks are sessions of their own, so that a SIGKILLed torchrun would leave them alive. Imports no torch: the first
seconds of a rank are those of that import.
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
    """Have the kernel end this rank when torchrun is killed; not under torchrun, nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def outlive_launcher() -> None:
    """Undo it. To be called by the same thread."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _set_signal(0)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends."""
    _set_signal(signal.SIGKILL)


def check_launcher() -> None:
    """Make sure that torchrun did not end before this rank could ask to be ended with it.

    Its store is there before any rank is, so a rank that cannot reach it would wait for nobody.

    Raises:
        RuntimeError: the store is gone.
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
