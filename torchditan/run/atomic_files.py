# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Atomic file writes: to a temporary file next to the target, synced, then renamed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: after a crash, `path` has its old or its new content, never a part."""
    with atomic_writer(path) as file:
        file.write(data)


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file for sequential writing. It replaces `path` once it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_path(path)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    """Temporary path of this process for a file that will become `path`."""
    # Processes on two machines, or in two containers, may have the same process id.
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
