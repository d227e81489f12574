# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Keep freed host memory in the process: on a CPU every forward pass frees and allocates the same large blocks."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """Configure glibc to reuse large freed blocks instead of returning them to the system.

    By default glibc returns a freed block of more than 32 MiB. The next allocation maps it again, with a page fault
    for every 4 KiB: a tenth of a float32 step of DiT-S/2, and a sixth of drawing with it (results/cpu_speed.md).

    Returns:
        Whether the C library accepted the settings. Only glibc has them.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
