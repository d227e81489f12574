# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Ranks exit when their launcher exits, and loader workers when their rank exits, however these end.

Each rank is a session leader, so it would survive a SIGKILL of torchrun. Imports no torch, which would delay the
protection by the seconds that the import takes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, because a forked child should not load libraries


def die_with_launcher() -> None:
    """Have the kernel kill this rank when torchrun is killed. Without torchrun, does nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def outlive_launcher() -> None:
    """Undo `die_with_launcher`. Call it in the same thread."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to this process when its parent ends (Linux only); 0 for none."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
