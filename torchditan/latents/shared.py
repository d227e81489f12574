# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded latents in a shared folder (weights/share.py), and their way back from the hub.

Notable:
- shards are hard links where the file system allows it, otherwise copies;
- the index says nothing about this machine;
- what comes from the hub is checked by size and SHA-256 once, after the download.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import suppress
from pathlib import Path

from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.config.errors import ConfigError, option_error
from torchditan.latents.index import INDEX_FILE, LatentIndex, index_to_json, read_index
from torchditan.latents.shards import LABELS_FILE, size_problems
from torchditan.run.atomic_files import sha256_of, write_file
from torchditan.run.directory import to_json
from torchditan.run.hub import download_folder

SPLITS = ("train", "validation")
_FILES = (INDEX_FILE, LABELS_FILE, "shard-*.safetensors", "shard-*.tar")
_CHECKED = ".torchditan_checked"
"""In a downloaded snapshot: its files are those of the index."""


def splits_of(folder: Path) -> dict[str, Path]:
    """name -> folder of each finished split; a single split is called train."""
    if (folder / INDEX_FILE).is_file():
        return {"train": folder}
    return {split: folder / split for split in SPLITS if (folder / split / INDEX_FILE).is_file()}


def has_latents(folder: Path) -> bool:
    """Whether `torchditan encode` wrote this folder, or `torchditan share`."""
    return bool(splits_of(folder))


def link_latents(source: Path, new: Path) -> tuple[dict[str, LatentIndex], list[str]]:
    """Link the shards of all splits into a new folder, and write their public index.

    Returns:
        The public index of each split, and what others will miss.

    Raises:
        ConfigError: a shard is missing or has another size.
    """
    public, skipped = {}, 0
    for split, path in splits_of(source).items():
        index = read_index(path)
        if problems := size_problems(path, index):
            raise ConfigError(f"{path}/{problems[0]}; encode the latents again")
        target = new / path.relative_to(source)
        target.mkdir(exist_ok=True)
        for file in [*(shard.file for shard in index.shards), LABELS_FILE]:
            if (path / file).is_file():
                _link(path / file, target / file)
        public[split] = _public(index)
        write_file(target / INDEX_FILE, to_json(index_to_json(public[split]), indent=2) + b"\n")
        skipped += index.num_skipped
    notes = [f"{skipped} images could not be read when encoding; the index lists their numbers"] if skipped else []
    return public, notes


def open_from_hub(place: str) -> Path:
    """Download latents as `hub:owner/name`, once, and check them.

    Raises:
        ConfigError: the place does not exist, cannot be fetched, holds no latents, or is damaged.
    """
    patterns = [f"{folder}{file}" for folder in ("", "train/", "validation/") for file in _FILES]
    folder = download_folder(place, kind="dataset", patterns=patterns)
    splits = splits_of(folder)
    if not splits:
        raise option_error("dataset.root_dir", place, f"holds no latents (no {INDEX_FILE}), as torchditan share writes")
    if not (folder / _CHECKED).exists():
        for path in splits.values():
            index = read_index(path)
            for problem in size_problems(path, index):
                raise option_error("dataset.root_dir", place, f"is damaged: {problem}; delete {path} and open it again")
            for shard in index.shards:
                if sha256_of(path / shard.file) != shard.sha256:
                    file = (path / shard.file).resolve()
                    right = f"is damaged: the SHA-256 of {shard.file} differs; delete {file} and open it again"
                    raise option_error("dataset.root_dir", place, right)
        with suppress(OSError):  # a cache that others share may be read-only
            (folder / _CHECKED).touch()
    return folder


def _public(index: LatentIndex) -> LatentIndex:
    """The index without what belongs to this machine: the place of the autoencoder, and the paths of bad images."""
    shards = tuple(
        dataclasses.replace(shard, skipped=tuple((number, "unreadable") for number, _ in shard.skipped))
        for shard in index.shards
    )
    path = index.autoencoder_path
    path = path if path in {entry.hub_name for entry in PUBLISHED.values()} else None
    return dataclasses.replace(index, autoencoder_path=path, shards=shards)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy on another file system."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
