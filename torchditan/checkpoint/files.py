# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoint folders on disk: their names, writing, publishing and deleting. loading.py reads them.

torch's own writer stores the tensors. `manifest.json`, written last, lists every file with its size. One rename gives
the folder its name once all files are on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from torchditan.run.atomic_files import sync_folder

MANIFEST = "manifest.json"
PROGRESS_FILE = "progress.json"
CONFIG_FILE = "config.json"
_NAME = re.compile(r"step-(\d{8})")
_FINAL_WEIGHTS = re.compile(r"step-\d{8}\.safetensors")
_UNFINISHED = re.compile(r"step-\d{8}\.partial")
_DISCARDED = re.compile(r"step-\d{8}\.deleted")


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first, including those damaged since."""
    return sorted(_matching(folder, _NAME))


def latest_checkpoint(folder: Path) -> Path | None:
    return max(list_checkpoints(folder), default=None)


def final_weights(folder: Path) -> Path | None:
    """The file of weights that a finished run without checkpoints kept, if there is one."""
    return max(_matching(folder, _FINAL_WEIGHTS), default=None)


def step_of(checkpoint: Path) -> int:
    """The training step in the name of a checkpoint folder, or of a file of final weights."""
    return int(checkpoint.stem.removeprefix("step-"))


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


def discard(folder: Path) -> None:
    """Rename a checkpoint, or a partly written one, so that it no longer counts, and `remove_discarded` deletes it.

    Fast, even on slow storage. An interrupted deletion leaves no partial checkpoint.
    """
    deleted = folder.with_suffix(".deleted")
    if deleted.exists():  # an earlier deletion of this step was interrupted
        shutil.rmtree(deleted, ignore_errors=True)
    os.replace(folder, deleted)


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
