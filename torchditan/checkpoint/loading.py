# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Read checkpoints, also those of others: no code is executed, and errors name the damage.

Notable:
- opening a checkpoint checks the manifest, the sizes and the index. A missing or truncated file is found; a changed bit
  inside a tensor is not;
- torch's distributed format stores its index (`.metadata`) and small values as pickles. A restricted unpickler reads
  the index and accepts only about two dozen names. The values are read with `weights_only`. No path may leave the
  folder.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import stat
import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torchditan.checkpoint.files import MANIFEST, PROGRESS_FILE, final_weights, list_checkpoints, step_of
from torchditan.errors import ConfigError, first_line, option_error, printable
from torchditan.run.training_progress import Progress

INDEX = ".metadata"
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


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest complete one. Newer damaged ones are reported.

    A run without checkpoints has a file of its final weights instead.

    Raises:
        ConfigError: the checkpoint does not exist or is damaged; the message lists the available steps.
    """
    kept = final_weights(folder)
    checkpoints = {step_of(path): path for path in [*list_checkpoints(folder), *([kept] if kept else [])]}
    if not checkpoints:
        raise ConfigError(
            f"{folder} holds no checkpoint: the run has not saved one yet (Ctrl-C in its training saves), or it was "
            "configured to keep no weights (checkpoint.save_final = false); train with --checkpoint.enable_checkpoint"
        )
    if step is not None and step not in checkpoints:
        raise option_error("--step", step, f"no such checkpoint in {folder}; there are {sorted(checkpoints)}")
    damages = []
    for number in sorted(checkpoints, reverse=True) if step is None else [step]:
        try:
            if checkpoints[number] != kept:
                verify(checkpoints[number])
        except DamagedCheckpointError as error:
            damages.append(f"{checkpoints[number]} is not used: {error}")
            continue
        for damage in damages:
            print(printable(f"warning: {damage}; {checkpoints[number].name} is"), file=sys.stderr)
        return checkpoints[number]
    others = f"; there are {sorted(checkpoints)}" if step is not None and len(checkpoints) > 1 else ""
    raise ConfigError(f"no checkpoint can be used: {'; '.join(damages)}{others}")


def cannot_be_read(checkpoint: Path, error: DamagedCheckpointError) -> ConfigError:
    """The error for damage that was found when the weights were read, with the checkpoints to use instead."""
    others = sorted({step_of(path) for path in list_checkpoints(checkpoint.parent)} - {step_of(checkpoint)})
    return ConfigError(f"{checkpoint} cannot be read: {error}" + (f"; other steps are {others}" if others else ""))


def read_numbers(checkpoint: Path) -> dict[str, int | float]:
    """The numbers in progress.json: those of the run's `Progress`, and those of other registered objects.

    Raises:
        DamagedCheckpointError: the file cannot be read.
    """
    try:
        numbers: dict[str, int | float] = json.loads((checkpoint / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        raise DamagedCheckpointError(f"{PROGRESS_FILE} cannot be read") from None
    return numbers


def read_progress(checkpoint: Path) -> Progress:
    """How far the run was.

    Raises:
        DamagedCheckpointError: progress.json is damaged.
    """
    numbers, progress = read_numbers(checkpoint), Progress()
    progress.load_state_dict({name: numbers.get(name, value) for name, value in progress.state_dict().items()})
    return progress


def read_state(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read every full tensor of a checkpoint whose name starts with `prefix`, on the CPU, in one process.

    Names are `model.<parameter>`, `ema.<parameter>` and `optimizer.state.<parameter>.<key>`. AdamW has the keys
    exp_avg, exp_avg_sq and step.
    """
    reader = CheckpointReader(checkpoint)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    load_safely(state, reader, no_dist=True)
    return state


def load_safely(state: dict[str, Any], reader: CheckpointReader, **options: Any) -> None:
    """Fill the tensors of a state, which may be sharded, from a checkpoint.

    Raises:
        DamagedCheckpointError: tensors are missing or do not match.
    """
    try:
        with warnings.catch_warnings():
            # Loading in a single process is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner(), **options)
    except (CheckpointException, DamagedCheckpointError) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        cause = next(iter(failures))[0]
        kind = "" if isinstance(cause, DamagedCheckpointError) else f"{type(cause).__name__}: "
        raise DamagedCheckpointError(f"{kind}{first_line(cause)}") from None
