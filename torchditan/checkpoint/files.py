# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoint files on disk: atomic publishing, and a reader that executes no code.

Notable:
- torch's own writer and reader store the tensors. `manifest.json`, written last, lists every file with its size. One
  rename gives the folder its name once all files are on disk;
- opening a checkpoint checks the manifest, the sizes and the index. A missing or truncated file is found; a changed bit
  inside a tensor is not;
- torch's distributed format stores its index (`.metadata`) and small values as pickles. A restricted unpickler reads
  the index and accepts only about two dozen names. The values are read with `weights_only`. No path may leave the
  folder.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import pickle
import re
import shutil
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from torchditan.run.atomic_files import sync_folder

MANIFEST = "manifest.json"
INDEX = ".metadata"
_NAME = re.compile(r"step-(\d{8})")
_FINAL_WEIGHTS = re.compile(r"step-\d{8}\.safetensors")
_UNFINISHED = re.compile(r"step-\d{8}\.partial")
_DISCARDED = re.compile(r"step-\d{8}\.deleted")

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


class _Writer(dcp.FileSystemWriter):
    """torch's writer of one file per rank. It raises the OSError that torch.save hides behind a RuntimeError."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            # torch.load checks no CRC-32, and computing it takes as long as writing.
            with serialization_config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
                return super().write_data(plan, planner)
        except Exception as error:
            hidden: BaseException | None = error
            while hidden is not None and not isinstance(hidden, OSError):
                hidden = hidden.__context__
            raise hidden or error from None


def save_tensors(state: dict[str, Any], folder: Path, **options: Any) -> None:
    """Write and sync the tensors of a state, which may be sharded, and their index.

    Args:
        options: of `dcp.save`.

    Raises:
        OSError: the disk of any rank refused a write; on all ranks.
        CheckpointException: another error of any rank; on all ranks.
    """
    # A copy ahead would use the current GPU of this thread, and threads of asynchronous saves start with the first GPU.
    writer = _Writer(folder, per_thread_copy_ahead=0)
    try:
        dcp.save(state, storage_writer=writer, **options)
    except CheckpointException as error:
        refusals = [failure for failure, _ in error.failures.values() if isinstance(failure, OSError)]
        raise refusals[0] if refusals else error from None


def write_json(path: Path, content: Any) -> None:
    """Write and sync a file in a folder that is not published yet."""
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(folder: Path, *, step: int, trajectory: dict[str, Any]) -> None:
    """Write the manifest, which makes a folder a checkpoint, after all other files."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    write_json(folder / MANIFEST, {"step": step, "trajectory": trajectory, "files": sizes})


def publish(partial: Path, target: Path) -> None:
    """Rename a finished folder to its final name; the rename survives a power failure.

    An existing checkpoint of that name is set aside for `remove_discarded`.
    """
    sync_folder(partial)
    if target.exists():  # damaged, or written before a rollback
        discard(target)
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
    """Check that a checkpoint is complete: all files with their sizes, and a valid index.

    Raises:
        DamagedCheckpointError: a file is missing or unknown, has another size, or cannot be read.
    """
    CheckpointReader(checkpoint).read_metadata()


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest.

    Raises:
        DamagedCheckpointError: it is missing, damaged, or from another step.
    """
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
        step, _, _ = (manifest[key] for key in ("step", "files", "trajectory"))
    except OSError as error:
        raise DamagedCheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpointError(f"{MANIFEST} is not a manifest; it may be truncated") from None
    if step != step_of(checkpoint):
        raise DamagedCheckpointError(f"{MANIFEST} belongs to step {step}")
    return manifest


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader for an untrusted folder: no code is executed, and no path leaves the folder.

    `manifest` and `read_metadata` check the files once, and raise DamagedCheckpointError.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.folder = checkpoint

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of the manifest. The folder has exactly its files, with their sizes."""
        manifest = read_manifest(self.folder)
        files = manifest["files"]
        try:
            there = {path.name: path.lstat() for path in self.folder.iterdir() if path.name != MANIFEST}
        except OSError as error:  # the run may be deleting it
            raise DamagedCheckpointError(f"it cannot be read ({error.strerror})") from None
        for name in sorted(files.keys() ^ there.keys()):
            raise DamagedCheckpointError(f"{name} {'is missing' if name in files else 'does not belong to it'}")
        for name, size in files.items():
            if not stat.S_ISREG(there[name].st_mode):
                raise DamagedCheckpointError(f"{name} is not a regular file")
            if there[name].st_size != size:
                raise DamagedCheckpointError(f"{name} has {there[name].st_size:,} bytes; must have {size:,}")
        return manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index of the checkpoint."""
        return self._index

    @cached_property
    def _index(self) -> Metadata:
        files = self.manifest["files"]
        try:
            metadata: Metadata = _IndexUnpickler(io.BytesIO((self.folder / INDEX).read_bytes())).load()
            for place in metadata.storage_data.values():
                name = place.relative_path
                if name not in files or getattr(place, "transform_descriptors", None):
                    raise DamagedCheckpointError(f"{INDEX} names {name!r}, which is not a file of the checkpoint")
        except DamagedCheckpointError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise DamagedCheckpointError(f"{INDEX} cannot be read ({type(error).__name__})") from None
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib"):  # the path it was written to; unused
            return _as_text
        if (module, name) == ("builtins", "getattr"):  # how early Python 3.11 pickles enumerations
            return _member_of
        if name not in _TYPES_OF_INDEX.get(module, ()):
            raise DamagedCheckpointError(f"{INDEX} asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


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
