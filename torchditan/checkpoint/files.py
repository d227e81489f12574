# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoint files on disk: checksums, atomic publishing, and readers that execute no code.

Notable:
- `manifest.json` lists every file of the folder with its size and SHA-256 (as `sha256sum` prints it). A file of tensors
  has one CRC-32 for each stored tensor instead. The manifest also contains a checksum of itself;
- checksums are computed while the bytes are written. One rename gives the folder its name once all files are on disk;
- opening a checkpoint verifies everything but the tensors. A tensor is verified when it is read, so that a program that
  needs only the averaged weights reads no other byte;
- torch's distributed format stores its index (`.metadata`) and small values as pickles. A restricted unpickler reads
  the index and accepts only about two dozen names. The values are read with `weights_only`. No path may leave the
  folder.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from torchditan.run.atomic_files import sha256_of, sync_folder

MANIFEST = "manifest.json"
INDEX = ".metadata"
_FORMATS = (1, 2)
"""Of the manifest. In the first one, files of tensors have a single checksum."""
_BUFFER = 1 << 20
"""torch.save writes a tensor in about 40 small pieces and a large one."""
_DIFFERS = "does not match its checksum"
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
    """Writes and syncs this rank's tensors to one file, and computes the checksum of each.

    After writing, `checksums` is {file name: [size in bytes, SHA-256]}. For the file of tensors, {place of a tensor in
    it: CRC-32} replaces the SHA-256, which would take several times as long. `error` is the first OSError, which torch
    would otherwise hide behind its own error.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.checksums: dict[str, list[Any]] = {}
        self.error: OSError | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        written: Future[list[WriteResult]] = Future()
        try:
            written.set_result(self._write_tensors(name, plan.items, planner))
        except OSError as error:
            self.error = error
            raise
        return written

    def _write_tensors(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results, crc32s, start = [], {}, 0
        without_crc32 = serialization_config.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
        with (self.folder / name).open("wb", buffering=_BUFFER) as file, ThreadPoolExecutor(1) as pool, without_crc32:
            for item in items:
                part = _ChecksummedPart(self, file, pool)
                _write_item(planner.resolve_data(item), part)
                place = _StorageInfo(name, start, part.size)
                results.append(WriteResult(index=item.index, size_in_bytes=part.size, storage_data=place))
                crc32s[str(start)] = _hexadecimal(part.crc32)
                start += part.size
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # not on macOS
                # Free the memory of the written pages: it is that of the next checkpoint, and of cached training data.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.checksums[name] = [start, crc32s]
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
            index = self.folder / INDEX
            self.checksums[INDEX] = [index.stat().st_size, sha256_of(index)]
        except OSError as error:
            self.error = error
            raise


def _write_item(data: io.BytesIO | torch.Tensor, part: _ChecksummedPart) -> None:
    """Write one entry of a state as torch's own writer does."""
    if isinstance(data, io.BytesIO):
        part.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # a part of another tensor, which torch.save would write too
        tensor = tensor.clone()
    torch.save(tensor, cast(IO[bytes], part))


class _ChecksummedPart:
    """A part of a file that is written sequentially. A thread of `pool` reads large pieces while they are written."""

    def __init__(self, writer: ChecksummingWriter, file: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.writer = writer
        self.file = file
        self.pool = pool
        self.crc32 = 0
        self.size = 0

    def write(self, data: Any) -> int:
        bits = memoryview(data).cast("B")  # `data` supports the buffer protocol
        self.size += len(bits)
        is_large = len(bits) >= _BUFFER
        checking = self.pool.submit(zlib.crc32, bits, self.crc32) if is_large else None
        try:
            self.file.write(bits)
        except OSError as error:
            self.writer.error = error
            raise
        finally:  # the memory of `data` is valid only during this call
            self.crc32 = zlib.crc32(bits, self.crc32) if checking is None else checking.result()
        return len(bits)

    def flush(self) -> None:
        """torch.save calls this after each tensor; the file is synced at its end."""


def write_json(path: Path, content: Any) -> list[Any]:
    """Write and sync a file in a folder that is not published yet. Returns [size in bytes, SHA-256]."""
    data = json.dumps(content, indent=1).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def write_manifest(folder: Path, *, step: int, trajectory: dict[str, Any], checksums: dict[str, list[Any]]) -> None:
    """Write the manifest, which makes a folder a checkpoint."""
    content = {"format": _FORMATS[-1], "step": step, "trajectory": trajectory, "files": dict(sorted(checksums.items()))}
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


def verify(checkpoint: Path) -> None:
    """Read a whole checkpoint to check that it is complete and undamaged.

    Raises:
        DamagedCheckpointError: a file is damaged, missing or unknown.
    """
    reader = CheckpointReader(checkpoint)
    places = {(place.relative_path, place.offset): place for place in reader.read_metadata().storage_data.values()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda place: len(reader.read(place).getbuffer()), places.values()):
            pass


def read_back(folder: Path) -> None:
    """Read back the files of a folder that is not published yet. `ChecksummingWriter` left the tensors on disk only.

    Raises:
        OSError: a file differs from what was written. Callers treat this like a full disk.
    """
    try:
        verify(folder)
    except DamagedCheckpointError as error:
        raise OSError(errno.EIO, f"it does not read back as written: {error}") from None


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
    if manifest.get("format") not in _FORMATS:
        known = " and ".join(map(str, _FORMATS))
        raise DamagedCheckpointError(f"{MANIFEST} is of format {manifest.get('format')}; this version reads {known}")
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
        and isinstance(entry[1], (str, dict))
        for name, entry in files.items()
    )


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\\" not in name


def _damage_of_file(path: Path, size: int, digest: str | dict[str, str]) -> str | None:
    """Describe the damage of a file, or None. Of a file of tensors, which have the checksums, only the size counts."""
    try:
        there = path.stat().st_size
        if there != size:
            return f"has {there:,} bytes; must have {size:,}"
        if path.is_symlink() or not path.is_file():
            return "is not a regular file"
        return None if isinstance(digest, dict) or sha256_of(path) == digest else _DIFFERS
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _hexadecimal(crc32: int) -> str:
    return f"{crc32:08x}"


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class CheckpointReader(dcp.FileSystemReader):
    """Reads torch's distributed format from an untrusted folder: no code is executed, and no path leaves the folder.

    `manifest` and `read_metadata` verify everything but the tensors, once. `read_data` verifies the tensors that it
    reads. All raise DamagedCheckpointError.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.folder = checkpoint

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of the manifest. The other files are all there, and those without tensors are intact."""
        manifest = read_manifest(self.folder)
        files = manifest["files"]
        there = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")} - {MANIFEST}
        if missing := sorted(files.keys() - there):
            raise DamagedCheckpointError(f"{missing[0]} is missing")
        if unknown := sorted(there - files.keys()):
            raise DamagedCheckpointError(f"{unknown[0]} does not belong to it")
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda name: _damage_of_file(self.folder / name, *files[name]), files)
            for name, wrong in zip(files, found, strict=True):
                if wrong is not None:
                    raise DamagedCheckpointError(f"{name} {wrong}")
        return manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index of the checkpoint."""
        return self._index

    @cached_property
    def _index(self) -> Metadata:
        files = self.manifest["files"]
        try:
            metadata = _IndexUnpickler(io.BytesIO((self.folder / INDEX).read_bytes())).load()
        except DamagedCheckpointError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise DamagedCheckpointError(f"{INDEX} cannot be read ({type(error).__name__})") from None
        if not _is_index(metadata):
            raise DamagedCheckpointError(f"{INDEX} is not a checkpoint index")
        for place in metadata.storage_data.values():
            name = getattr(place, "relative_path", None)
            if not _is_plain_name(name) or name not in files or getattr(place, "transform_descriptors", None):
                raise DamagedCheckpointError(f"{INDEX} names {name!r}, which is not a file of the checkpoint")
            numbers = [getattr(place, key, None) for key in ("offset", "length")]
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise DamagedCheckpointError(f"{INDEX} has no place in {name} for one of its tensors")
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self.read(self.storage_data[item.storage_index])
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, stored)
                continue
            tensor = torch.load(stored, map_location="cpu", weights_only=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, place: _StorageInfo) -> io.BytesIO:
        """The bytes of one stored tensor, after their verification."""
        name, checksums = place.relative_path, self.manifest["files"][place.relative_path][1]
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read ({error.strerror})") from None
        if isinstance(checksums, dict) and _hexadecimal(zlib.crc32(data)) != checksums.get(str(place.offset)):
            raise DamagedCheckpointError(f"{name} {_DIFFERS}")
        return io.BytesIO(data)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib"):  # the path it was written to; unused
            return _as_text
        if (module, name) == ("builtins", "getattr"):  # how early Python 3.11 pickles enumerations
            return _member_of
        if name not in _TYPES_OF_INDEX.get(module, ()):
            raise DamagedCheckpointError(f"{INDEX} asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _is_index(metadata: Any) -> bool:
    """Whether all attributes are there and of their types: a changed pickle can create objects without them."""
    tensors, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    return (
        isinstance(metadata, Metadata)
        and isinstance(tensors, dict)
        and all(isinstance(name, str) and _is_index_entry(entry) for name, entry in tensors.items())
        and isinstance(places, dict)
        and all(
            isinstance(key, MetadataIndex)
            and isinstance(getattr(key, "fqn", None), str)
            and isinstance(key.offset, (torch.Size, NoneType))
            for key in places
        )
    )


def _is_index_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    properties, chunks = (getattr(entry, name, None) for name in ("properties", "chunks"))
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(getattr(entry, "size", None), torch.Size)
        and isinstance(properties, TensorProperties)
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and all(isinstance(getattr(chunk, name, None), torch.Size) for name in ("offsets", "sizes"))
            and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            for chunk in chunks
        )
    )


def _as_text(*parts: str) -> str:
    return "/".join(parts)


def _member_of(enumeration: Any, name: str) -> enum.Enum:
    if not (isinstance(enumeration, type) and issubclass(enumeration, enum.Enum)):
        raise DamagedCheckpointError(f"{INDEX} asks for builtins.getattr, which no checkpoint needs")
    member: enum.Enum = enumeration[name]
    return member


class SafeLoadPlanner(DefaultLoadPlanner):
    """Load planner that reads the small values of a state as numbers and tensors only, never with a full unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True, map_location="cpu"), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)
