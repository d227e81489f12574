# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files that are written whole or not at all: to a temporary name next to the target, synced, then renamed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, meets the old file or the whole new one."""
    with written_beside(path) as file:
        file.write(data)


@contextmanager
def written_beside(path: Path) -> Iterator[IO[bytes]]:
    """A file to write from begin to end, which takes the place of `path` when it is whole and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
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


def beside(path: Path) -> Path:
    """Where this process writes what will be `path`."""
    # Processes of two machines, or of two containers, may have one number.
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")


def sync_folder(folder: Path) -> None:
    """What was renamed in a folder survives a power cut when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
