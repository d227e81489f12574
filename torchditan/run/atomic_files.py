# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files and folders that are complete or do not exist: written next to the target, synced, then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchditan.errors import ConfigError


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


@contextmanager
def refuse_unwritable(path: Path, *, right: str = "") -> Iterator[None]:
    """One line for a disk that is full, read-only or not ours.

    Raises:
        ConfigError: `path` cannot be written. The message ends with `right`.
    """
    try:
        yield
    except OSError as error:
        words = [f"{path} cannot be written: {error.strerror or error}", *([right] if right else [])]
        raise ConfigError("; ".join(words)) from None


@contextmanager
def new_folder(folder: Path, *, replace: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end. An error leaves nothing behind.

    Args:
        folder: the folder to create; it may exist if it is empty.
        replace: whether an existing one is deleted just before.

    Raises:
        ConfigError: it exists and is not replaced, or cannot be written.
    """
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not replace(folder):
        raise ConfigError(f"{folder} exists; choose another name")
    partial = temporary_path(folder)
    try:
        with refuse_unwritable(folder):
            partial.mkdir(parents=True)
            yield partial
            if not is_free:
                shutil.rmtree(folder)
            os.replace(partial, folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks of 4 MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
