# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoint files on disk: checksums, atomic publishing, and readers that execute no code.

Notable:
- `manifest.json` lists every file of the folder with its size and SHA-256 (as `sha256sum` prints it). It also contains
  a checksum of itself. Verification finds files that are truncated, changed by a bit, missing, added, or from another
  step;
- checksums are computed while the bytes are written. The files are then read back and compared, and one rename gives
  the folder its name;
- torch's distributed format stores its index (`.metadata`) and small values as pickles. A restricted unpickler reads
  the index and accepts only about two dozen names. The values are read with `weights_only`. No path may leave the
  folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchditan.run.atomic_files import sync_folder

MANIFEST = "manifest.json"
INDEX = ".metadata"
_FORMAT = 1
_CHUNK = 1 << 22
_NAME = re.compile(r"step-(\d{8})")
_FINAL_WEIGHTS = re.compile(r"step-\d{8}\.safetensors")
_UNFINISHED = re.compile(r"step-\d{8}\.partial")
_DISCARDED = re.compile(r"step-\d{8}\.(replaced|deleted)")

_TYPES_OF_INDEX = {
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""All types in a checkpoint index of this package; paths become plain text (`_IndexUnpickler`)."""


class DamagedCheckpointError(Exception):
    """A checkpoint differs from what was written; the message names the damage, not the checkpoint."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first, including those damaged since."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def final_weights(folder: Path) -> Path | None:
    """The file of weights that a finished run without checkpoints kept, if there is one."""
    return max(_matching(folder, _FINAL_WEIGHTS), default=None)


def step_of(checkpoint: Path) -> int:
    """The training step in the name of a checkpoint folder, or of a file of final weights."""
    return int(checkpoint.stem.removeprefix("step-"))


# Writing


class ChecksummingWriter(dcp.FileSystemWriter):
    """Writes and syncs this rank's tensors, and computes their checksums.

    After writing, `checksums` is {file name: [size in bytes, SHA-256]}. `error` is the first OSError, which torch.save
    would otherwise hide behind its own error.

    Args:
        folder: where the files are written.
        copy_ahead: bytes copied from the GPU while other bytes are written.
    """

    def __init__(self, folder: Path, *, copy_ahead: int = 0) -> None:
        super().__init__(folder, per_thread_copy_ahead=copy_ahead)
        self.fs = self._files = _ChecksummingFiles()

    @property
    def checksums(self) -> dict[str, list[Any]]:
        return self._files.checksums

    @property
    def error(self) -> OSError | None:
        return self._files.error


class _ChecksummingFiles(FileSystem):
    def __init__(self) -> None:
        self.checksums: dict[str, list[Any]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                checked = _ChecksummedStream(cast(IO[bytes], stream), self)
                yield checked
        except OSError as error:
            self.error = self.error or error
            raise
        name = Path(path).name.removesuffix(".tmp")  # torch writes its index to a temporary file and renames it
        self.checksums[name] = [checked.size, checked.digest.hexdigest()]


class _ChecksummedStream:
    """A file that is written sequentially from start to end."""

    def __init__(self, stream: IO[bytes], files: _ChecksummingFiles) -> None:
        self.stream = stream
        self.files = files
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        # `data` supports the buffer protocol. A raw file may write fewer bytes than requested.
        left = memoryview(data).cast("B")
        self.digest.update(left)
        self.size += len(left)
        total = len(left)
        try:
            while left:
                left = left[self.stream.write(left) :]
        except OSError as error:
            self.files.error = error
            raise
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def write_json(path: Path, content: Any) -> list[Any]:
    """Write and sync a file in a folder that is not published yet. Returns [size in bytes, SHA-256]."""
    data = json.dumps(content, indent=1).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def read_back(folder: Path, checksums: dict[str, list[Any]]) -> None:
    """Read files back and compare them with their checksums.

    Raises:
        OSError: a file differs from what was written. Callers treat this like a full disk.
    """
    for name, (size, digest) in checksums.items():
        if (wrong := _damage_of_file(folder / name, size, digest)) is not None:
            raise OSError(errno.EIO, f"{name} does not read back as written: {wrong}")


def write_manifest(folder: Path, *, step: int, trajectory: dict[str, Any], checksums: dict[str, list[Any]]) -> None:
    """Write the manifest, which makes a folder a checkpoint."""
    content = {"format": _FORMAT, "step": step, "trajectory": trajectory, "files": dict(sorted(checksums.items()))}
    write_json(folder / MANIFEST, {**content, "sha256": _digest_of(content)})


def publish(partial: Path, target: Path) -> None:
    """Rename a finished folder to its final name; the rename survives a power failure.

    An existing checkpoint of that name is set aside for `remove_discarded`.
    """
    sync_folder(partial)
    if target.exists():  # damaged, or written before a rollback
        replaced = target.with_suffix(".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(partial, target)
    sync_folder(target.parent)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an interrupted deletion leaves no partial checkpoint."""
    shutil.rmtree(discard(checkpoint))


def discard(folder: Path) -> Path:
    """Rename a checkpoint, or a partly written one, so that it no longer counts. Fast, even on slow storage.

    Returns:
        The renamed folder, which `remove_discarded` deletes.
    """
    deleted = folder.with_suffix(".deleted")
    if deleted.exists():  # an earlier deletion of this step was interrupted
        shutil.rmtree(deleted, ignore_errors=True)
    os.replace(folder, deleted)
    return deleted


def discard_unfinished(folder: Path) -> None:
    """Discard checkpoints that killed runs wrote only in part."""
    for path in _matching(folder, _UNFINISHED):
        with contextlib.suppress(OSError):
            discard(path)


def remove_discarded(folder: Path) -> None:
    """Delete discarded checkpoints, including those that killed runs deleted only in part."""
    for path in _matching(folder, _DISCARDED):
        shutil.rmtree(path, ignore_errors=True)


def _matching(folder: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if name.fullmatch(path.name)] if folder.is_dir() else []


# Reading


def verify(checkpoint: Path, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Check that a checkpoint is complete and undamaged, and return its manifest.

    Args:
        checkpoint: its folder.
        rank, world_size: if several ranks verify together, each reads a share of the files.

    Raises:
        DamagedCheckpointError: a file is damaged, missing or unknown.
    """
    manifest = read_manifest(checkpoint)
    files = manifest["files"]
    there = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*")} - {MANIFEST}
    if missing := sorted(files.keys() - there):
        raise DamagedCheckpointError(f"{missing[0]} is missing")
    if unknown := sorted(there - files.keys()):
        raise DamagedCheckpointError(f"{unknown[0]} does not belong to it")
    share = sorted(files)[rank::world_size]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _damage_of_file(checkpoint / name, *files[name]), share)
        for name, wrong in zip(share, found, strict=True):
            if wrong is not None:
                raise DamagedCheckpointError(f"{name} {wrong}")
    if rank == 0:
        CheckpointReader(checkpoint).read_metadata()
    return manifest


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read and validate the manifest.

    Raises:
        DamagedCheckpointError: it is missing, changed, from another step, or in another format version.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise DamagedCheckpointError(f"{MANIFEST} is not JSON; it may be truncated") from None
    if not isinstance(manifest, dict):
        raise DamagedCheckpointError(f"{MANIFEST} is not a manifest")
    digest = manifest.pop("sha256", None)
    if digest != _digest_of(manifest):
        raise DamagedCheckpointError(f"{MANIFEST} was changed: it does not match its own checksum")
    if manifest.get("format") != _FORMAT:
        raise DamagedCheckpointError(f"{MANIFEST} is of format {manifest.get('format')}; this version reads {_FORMAT}")
    step, files, trajectory = (manifest.get(key) for key in ("step", "files", "trajectory"))
    if not (isinstance(step, int) and _are_files(files) and isinstance(trajectory, dict)):
        raise DamagedCheckpointError(f"{MANIFEST} is not a manifest")
    if step != step_of(checkpoint):
        raise DamagedCheckpointError(f"{MANIFEST} belongs to step {step}")
    return manifest


def _are_files(files: Any) -> bool:
    return isinstance(files, dict) and all(
        _is_plain_name(name)
        and isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], int)
        and isinstance(entry[1], str)
        for name, entry in files.items()
    )


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\\" not in name


def _damage_of_file(path: Path, size: int, digest: str) -> str | None:
    """Describe the damage of a file that should have this size in bytes and SHA-256; None if it is intact."""
    try:
        there = path.stat().st_size
        if there != size:
            return f"has {there:,} bytes; must have {size:,}"
        if path.is_symlink() or not path.is_file():
            return "is not a regular file"
        actual = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                actual.update(data)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if actual.hexdigest() == digest else "does not match its checksum"


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class CheckpointReader(dcp.FileSystemReader):
    """Reads torch's distributed format from an untrusted folder: no code is executed, and no path leaves the folder.

    The index is read once. For a large model on many ranks, reading it takes seconds.
    """

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index of the checkpoint.

        Raises:
            DamagedCheckpointError: it is unreadable, or contains something that an index never contains.
        """
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def _read_index(self) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except DamagedCheckpointError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise DamagedCheckpointError(f"{INDEX} cannot be read ({type(error).__name__})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise DamagedCheckpointError(f"{INDEX} is not a checkpoint index")
        for place in metadata.storage_data.values():
            name = getattr(place, "relative_path", None)
            if not _is_plain_name(name) or getattr(place, "transform_descriptors", None):
                raise DamagedCheckpointError(f"{INDEX} names {name!r}, which is not a file of the checkpoint")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib"):  # the path it was written to; unused
            return _as_text
        if name not in _TYPES_OF_INDEX.get(module, ()):
            raise DamagedCheckpointError(f"{INDEX} asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _as_text(*parts: str) -> str:
    return "/".join(parts)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Load planner that reads the small values of a state as numbers and tensors only, never with a full unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True, map_location="cpu"), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
