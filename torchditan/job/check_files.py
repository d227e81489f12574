# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checks the image files of a job: which cannot be read, and whether they are those that its run started with."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchditan.config.options import cache_folder
from torchditan.data_stream.datasets import CorruptImageError, FileDataset, ListedDataset
from torchditan.distributed.process_group import from_rank_0
from torchditan.errors import ConfigError, as_unicode, some
from torchditan.job.prepare import Job
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import DATASET_FILES
from torchditan.run.progress import report_progress

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
    if differing := _differing(job):  # otherwise the run directory refuses the data, if they are others
        right = "to resume the run, restore them; otherwise name a new run with --metrics.experiment_name"
        raise ConfigError(f"{run} holds a run with other files of {job.config.dataset.root_dir} ({differing}); {right}")


def record_files(job: Job) -> None:
    """Store the names and sizes of the files in the run directory, unless they are there."""
    path = job.run_directory.path / DATASET_FILES
    if job.rank.rank == 0 and isinstance(job.dataset, ListedDataset) and not path.exists():
        with contextlib.suppress(OSError):  # a full disk; the files are only named in messages
            write_file(path, gzip.compress(json.dumps(job.dataset.file_sizes()).encode()))


def _differing(job: Job) -> str:
    """The files that were added, removed or changed since the run was started; "" if none, or if it is not known."""
    stored = job.run_directory.path / DATASET_FILES
    if not isinstance(job.dataset, ListedDataset) or not stored.exists():
        return ""
    try:
        before = _by_name(json.loads(gzip.decompress(stored.read_bytes())))
    except (OSError, EOFError, ValueError, AttributeError, zlib.error):  # damaged
        return ""
    here = _by_name(job.dataset.file_sizes())
    kept = before.keys() & here.keys()
    kinds = {
        "added": here.keys() - before.keys(),
        "removed": before.keys() - here.keys(),
        "changed": {name for name in kept if before[name][1] != here[name][1]},
        "moved between training and held-out images": {name for name in kept if before[name][0] != here[name][0]},
    }
    return "; ".join(f"{kind}: {some(sorted(paths), most=MOST_NAMED)}" for kind, paths in kinds.items() if paths)


def _by_name(files: dict[str, dict[str, int]]) -> dict[str, tuple[str, int]]:
    """Name -> (split, size)."""
    return {name: (split, size) for split, sizes in files.items() for name, size in sizes.items()}


def check_files(job: Job, *, warn: Callable[[str], None]) -> set[int]:
    """Check the training and held-out files, and say which cannot be read. All ranks call it.

    Returns:
        Indices of the unreadable training images.

    Raises:
        ConfigError: files cannot be read, and `dataset.corrupt_images` is "error". The message lists them.
    """
    folder = cache_folder(job.config) / "files"
    unreadable: set[int] = set()
    images: list[str] = []
    for dataset in (job.dataset, job.validation_dataset):
        if not isinstance(dataset, FileDataset):
            continue
        damages = _find_damages(dataset, folder=folder, is_checker=job.rank.rank == 0)
        images += [f"{dataset.name_of(index)} ({damage})" for index, damage in damages.items()]
        if dataset is job.dataset:
            unreadable.update(damages)
    if images:
        named = _describe_unreadable(images, folder=folder, writes=job.rank.rank == 0)
        if job.config.dataset.corrupt_images == "error":
            raise ConfigError(f"{named}; {_REPAIR_OR_SKIP}")
        warn(f"warning: {named}; the next images replace them")
    if job.rank.rank == 0 and (differing := _differing(job)):
        warn(f"warning: files since this run was started: {differing}")
    return unreadable


def refuse_unreadable(dataset: Any, *, cache_folder: Path) -> None:
    """Check the files of a dataset before long work in one process, if it has files.

    Raises:
        CorruptImageError: some cannot be read.
    """
    if not isinstance(dataset, FileDataset):
        return
    with report_progress(f"checking files in {dataset.root}"):
        *_, (_, damages) = dataset.check_files(cache_folder / "files")
    if damages:
        images = [f"{dataset.name_of(index)} ({damage})" for index, damage in damages.items()]
        raise CorruptImageError(f"{_describe_unreadable(images, folder=cache_folder / 'files')}; {_REPAIR_OR_SKIP}")


def _find_damages(dataset: FileDataset, *, folder: Path, is_checker: bool) -> dict[int, str]:
    """Index -> reason of each unreadable file. One rank checks and reports after every part, so that no other rank
    times out."""
    parts = dataset.check_files(folder) if is_checker else None
    total = len(dataset)  # type: ignore[arg-type]
    done, damages = 0, {}
    with report_progress(f"checking files in {dataset.root}", total=total, unit="files") as advance:
        while done < total:
            before = done
            done, damages = from_rank_0(None if parts is None else next(parts))
            advance(done - before)
    return damages


def _describe_unreadable(images: Sequence[str], *, folder: Path, writes: bool = True) -> str:
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
