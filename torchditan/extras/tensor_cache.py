# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A content-addressed cache of tensors on disk: entries cannot be stale.

Notable:
- `<folder>/<maker>/*.safetensors`, where the maker identifies the weights and settings of an encoder. The key of an
  entry is a hash of the encoded content: another image, caption, size or encoder gives another key;
- files are written under a temporary name and renamed, and never changed or removed. A killed run loses only unwritten
  entries, and several runs or ranks can write at once;
- files are memory-mapped for reading; no entry is kept in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchditan.errors import ConfigError, first_line
from torchditan.run.atomic_files import sha256_of, write_file

_SUFFIX = ".safetensors"
_SEPARATOR = "."


class TensorCache:
    """Entries of one maker: key -> tensors by name.

    Args:
        folder: folder of the cache, shared by all makers.
        maker: identity of the encoder that makes the entries; a valid folder name.
    """

    def __init__(self, folder: Path, maker: str) -> None:
        self.folder = folder / maker
        self._places: dict[str, Path] = {}
        self._seen: set[Path] = set()
        self._readers: dict[Path, Any] = {}

    def refresh(self) -> None:
        """Index files that were written since the last call.

        Raises:
            ConfigError: a file is damaged.
        """
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if path not in self._seen:
                for name in self._open(path).keys():  # noqa: SIM118  no mapping: it has only this
                    self._places.setdefault(name.split(_SEPARATOR)[0], path)
                self._seen.add(path)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        """The tensors of an entry, on the CPU."""
        reader = self._reader(self._places[key])
        prefix = key + _SEPARATOR
        names = [name for name in reader.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): reader.get_tensor(name) for name in names}

    def write(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Add entries as one file.

        Args:
            entries: key (hexadecimal) -> tensors by name; names must not contain a dot.
        """
        from safetensors.torch import save

        tensors = {
            f"{key}{_SEPARATOR}{name}": tensor.detach().cpu().contiguous().clone()
            for key, of_entry in entries.items()
            for name, tensor in of_entry.items()
        }
        digest = hashlib.sha256(" ".join(sorted(entries)).encode()).hexdigest()[:16]
        path = self.folder / f"{digest}{_SUFFIX}"
        write_file(path, save(tensors))
        self._readers.pop(path, None)  # if the same entries were written before, it maps the old file
        self.refresh()

    def _reader(self, path: Path) -> Any:
        if path not in self._readers:
            self._readers[path] = self._open(path)
        return self._readers[path]

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} of the cache is damaged ({first_line(error)}); remove it; its entries are encoded again"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}  # each worker of a data loader maps the files itself


def hash_of(*parts: str) -> str:
    """Key of an entry: 40 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:40]


def identity_of_files(folder: Path, *, memory: Path) -> str:
    """A hash over the names and contents of all files in a folder, in 16 hexadecimal digits.

    Args:
        folder: of an encoder's weights and settings.
        memory: folder that stores the hash of each large file, by its path, size and modification time.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        digest.update(
            f"{path.relative_to(folder).as_posix()} {_hash_of_file(path, memory)}\n".encode(errors="surrogatepass")
        )
    return digest.hexdigest()[:16]


def _hash_of_file(path: Path, memory: Path) -> str:
    status = path.stat()
    note = memory / hash_of(str(path.resolve()), str(status.st_size), str(status.st_mtime_ns))
    if note.is_file() and len(known := note.read_text()) == 64:
        return known
    digest = sha256_of(path)
    write_file(note, digest.encode())
    return digest
