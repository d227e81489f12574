# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files at an address of fsspec (`s3://...`), read in blocks of 4 MiB, which a folder keeps.

fsspec's own block cache shares one file of metadata, which ranks and loader workers would overwrite.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchditan.config.optional_libraries import import_optional
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.run.atomic_files import write_file

_BLOCK_SIZE = 1 << 22


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address. Its blocks are kept in a folder, if there is one.

    A block is written under a temporary name, so any number of processes may share the folder. Above `limit` bytes, the
    oldest blocks in it are deleted.
    """

    address: str
    size: int
    folder: Path | None
    """Blocks of this version of this file; its parent holds those of all files."""
    limit: int | None = None

    def read_at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on; fewer at the end of the file."""
        end = min(offset + count, self.size)
        if end <= offset:
            return b""
        numbers = range(offset // _BLOCK_SIZE, (end - 1) // _BLOCK_SIZE + 1)
        first = numbers[0] * _BLOCK_SIZE
        return b"".join(map(self._block, numbers))[offset - first : end - first]

    def _block(self, number: int) -> bytes:
        if self.folder is None:
            return self._fetch(number)
        path = self.folder / f"{number:06d}"
        with contextlib.suppress(OSError):
            return path.read_bytes()
        block = self._fetch(number)
        with contextlib.suppress(OSError):  # a full disk
            write_file(path, block)
            if self.limit is not None:
                _delete_oldest(self.folder.parent, limit=self.limit)
        return block

    def _fetch(self, number: int) -> bytes:
        fsspec = import_optional("fsspec", extra="hub")
        start, end = number * _BLOCK_SIZE, min((number + 1) * _BLOCK_SIZE, self.size)
        try:
            system, path = fsspec.core.url_to_fs(self.address)  # an instance of this process, not of a parent
            block: bytes = system.cat_file(path, start=start, end=end)
        except Exception as error:  # errors of a protocol's own library
            raise _unreachable(self.address, error) from error
        if len(block) != end - start:
            raise option_error("dataset.root_dir", self.address, "changed while it was read; start the run again")
        return block


def _delete_oldest(folder: Path, *, limit: int) -> None:
    """Delete the oldest blocks, until those in `folder` have at most `limit` bytes."""
    states = []
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            states.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in states)
    for _, size, path in sorted(states):
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


def _unreachable(address: str, error: Exception) -> ConfigError:
    right = f"cannot be read ({type(error).__name__}: {first_line(error)})"
    return option_error("dataset.root_dir", address, right)


def list_folder(folder: str) -> tuple[Any, list[dict[str, Any]]]:
    """The file system of a remote folder, and its content: `name`, `type`, `size` and more of each."""
    fsspec = import_optional("fsspec", extra="hub")
    try:
        system, path = fsspec.core.url_to_fs(folder)
        return system, system.ls(path, detail=True)
    except Exception as error:
        raise _unreachable(folder, error) from error
