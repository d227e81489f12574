# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checks the image files of a job: which cannot be read, and whether they are those that its run started with."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchditan.config.errors import ConfigError, as_unicode, some
from torchditan.config.options import cache_folder
from torchditan.data_stream.datasets import CorruptImageError, FileDataset, ListedDataset
from torchditan.job.prepare import Job
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import DATASET_FILES
from torchditan.run.progress import report_progress
from torchditan.supervision.supervision import Supervision

MOST_NAMED = 10
_REPAIR_OR_SKIP = "repair or remove them, or skip them with --dataset.corrupt_images skip"


def compare_files(job: Job) -> None:
    """Name the files that differ from those that the run was started with, if it cannot continue with them.

    Raises:
        ConfigError: it cannot.
    """
    run, stored, now = job.run_directory.path, job.stored, job.config.dataset.fingerprint
    if job.rank.rank != 0 or stored is None or stored.options.get("dataset.fingerprint") == now:
        return
    if differing := _describe_differing(job, run):
        right = "to resume the run, restore them; otherwise name a new run with --metrics.experiment_name"
        raise ConfigError(f"{run} holds a run with other files of {job.config.dataset.root_dir} ({differing}); {right}")


def _describe_differing(job: Job, run: Path) -> str:
    """The files that were added, removed or changed since the run was started; "" if none, or if it is not known."""
    stored = run / DATASET_FILES
    if not isinstance(job.dataset, ListedDataset) or not stored.exists():
        return ""
    try:
        before = _by_name(json.loads(gzip.decompress(stored.read_bytes())))
    except (OSError, EOFError, ValueError, AttributeError, zlib.error):  # damaged: the run directory compares
        return ""
    here = _by_name(job.dataset.file_sizes())
    kept = before.keys() & here.keys()
    kinds: dict[str, Collection[str]] = {
        "added": here.keys() - before.keys(),
        "removed": before.keys() - here.keys(),
        "changed": [name for name in kept if before[name][1] != here[name][1]],
        "moved between training and held-out images": [name for name in kept if before[name][0] != here[name][0]],
    }
    return "; ".join(f"{kind}: {some(sorted(paths), most=MOST_NAMED)}" for kind, paths in kinds.items() if paths)


def _by_name(files: dict[str, dict[str, int]]) -> dict[str, tuple[str, int]]:
    """Name -> (split, size)."""
    return {name: (split, size) for split, sizes in files.items() for name, size in sizes.items()}


def record_files(job: Job) -> None:
    """Store the names and sizes of the files in the run directory, unless they are there."""
    path = job.run_directory.path / DATASET_FILES
    if job.rank.rank == 0 and isinstance(job.dataset, ListedDataset) and not path.exists():
        with contextlib.suppress(OSError):  # a full disk; the files are only named in messages
            write_file(path, gzip.compress(json.dumps(job.dataset.file_sizes()).encode()))


def describe_unreadable(images: Sequence[str], *, folder: Path, writes: bool = True) -> str:
    """`2 files cannot be read: a.png (unknown format), b.png (...)`.

    Args:
        images: names with reasons. The first ten are shown; a file in `folder` lists all, if there are more.
        writes: whether this process writes that file.
    """
    text = f"{len(images):,} file{'s' * (len(images) > 1)} cannot be read: {some(images, most=MOST_NAMED)}"
    if len(images) <= MOST_NAMED:
        return text
    listed = folder / "unreadable.txt"
    if writes:
        write_file(listed, "".join(f"{as_unicode(image)}\n" for image in images).encode())
    return f"{text}, listed in {listed}"


def refuse_unreadable(dataset: Any, *, cache_folder: Path) -> None:
    """Check the files of a dataset before long work, if it has files.

    Raises:
        CorruptImageError: some cannot be read.
    """
    if not isinstance(dataset, FileDataset):
        return
    with report_progress(f"checking files in {dataset.root}"):
        *_, (_, damages) = dataset.check_files(cache_folder / "files")
    if damages:
        images = [f"{dataset.path_of(index)} ({damage})" for index, damage in damages.items()]
        named = describe_unreadable(images, folder=cache_folder / "files")
        raise CorruptImageError(f"{named}; {_REPAIR_OR_SKIP}")


def check_files(job: Job, supervision: Supervision) -> set[int]:
    """Check the training and held-out files, and say which cannot be read. All ranks call it.

    Returns:
        Indices of the unreadable training images.

    Raises:
        ConfigError: files cannot be read, and `dataset.corrupt_images` is "error". The message lists them.
    """
    config = job.config
    files_folder = cache_folder(config) / "files"
    unreadable: set[int] = set()
    texts: list[str] = []
    for dataset in (job.dataset, job.validation_dataset):
        if not isinstance(dataset, FileDataset):
            continue
        damages = _find_damages(dataset, cache_folder=files_folder, supervision=supervision)
        texts += [f"{dataset.path_of(index)} ({damage})" for index, damage in damages.items()]
        if dataset is job.dataset:
            unreadable.update(damages)
    if texts:
        named = describe_unreadable(texts, folder=files_folder, writes=job.rank.rank == 0)
        if config.dataset.corrupt_images == "error":
            raise ConfigError(f"{named}; {_REPAIR_OR_SKIP}")
        supervision.warn(f"warning: {named}; the next images replace them")
    if job.rank.rank == 0 and (differing := _describe_differing(job, job.run_directory.path)):
        supervision.warn(f"warning: files since this run was started: {differing}")
    return unreadable


def _find_damages(dataset: FileDataset, *, cache_folder: Path, supervision: Supervision) -> dict[int, str]:
    """Index -> reason of each unreadable file. Rank 0 reports after every part, so that no other rank times out."""
    parts = dataset.check_files(cache_folder) if supervision.rank.rank == 0 else None
    total = len(dataset)  # type: ignore[arg-type]
    box: list[Any] = [(0, {})]
    with report_progress(f"checking files in {dataset.root}", total=total, unit="files") as advance:
        while (done := box[0][0]) < total:
            box = [None if parts is None else next(parts)]
            dist.broadcast_object_list(box, src=0)
            advance(box[0][0] - done)
    damages: dict[int, str] = box[0][1]
    return damages
