# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Keep freed host memory in the process: on a CPU every step frees and takes the same large blocks again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to reuse large freed blocks instead of giving them back to the system.

    By default a block of more than 32 MiB goes back when it is freed, and the next one is mapped anew, a page
    fault and 4 KiB of zeros at a time: a tenth of a float32 step of DiT-S/2 (docs/LOG.md, 2026-11-21).

    Returns:
        Whether the C library took it; others than glibc do as they are used to.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
