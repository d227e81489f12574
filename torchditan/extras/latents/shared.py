# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded latents in a shared folder (extras/sharing/share.py). data/latents.py opens them from the hub.

Notable:
- shards are hard links where the file system allows it, otherwise copies;
- the index says nothing about this machine.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

from torchditan.data_stream.latent_index import INDEX_FILE, LatentIndex, index_to_json, read_index
from torchditan.data_stream.latent_shards import LABELS_FILE, size_problems
from torchditan.datasets.latents import splits_of
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.registry import entry_name
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import to_json


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
    if any(index.images for index in public.values()):
        notes.append("the shards also have the images that were encoded")
    return public, notes


def _public(index: LatentIndex) -> LatentIndex:
    """The index without what belongs to this machine: the place of the autoencoder, and the paths of bad images."""
    shards = tuple(
        dataclasses.replace(shard, skipped=tuple((number, "unreadable") for number, _ in shard.skipped))
        for shard in index.shards
    )
    path = index.autoencoder_path
    path = path if path in {entry.hub_name for entry in PUBLISHED.values()} else None
    name = index.autoencoder_name
    name = entry_name(name) if re.search(r"[/\\]", name) else name  # an option that is a path
    return dataclasses.replace(index, autoencoder_name=name, autoencoder_path=path, shards=shards)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy on another file system."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
