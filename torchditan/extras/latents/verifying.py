# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads every byte of a folder of latents, for `torchditan encode OUT --verify`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchditan.data_stream.latent_index import INDEX_FILE, REPAIR, LatentIndex, read_index
from torchditan.data_stream.latent_shards import LABELS_FILE, LatentShards, map_labels, map_shard, size_problems
from torchditan.errors import ConfigError
from torchditan.extras.latents.writer import LOCK_FILE
from torchditan.run.atomic_files import sha256_of


def verify(folder: Path) -> list[str]:
    """Read every byte of a folder. Returns one line for each problem; empty if there are none."""
    if folder.is_file():
        LatentShards.open(folder)
        return []
    try:
        index = read_index(folder)
    except ConfigError as error:
        return [str(error)]
    problems = [f"{folder}/{line}; {REPAIR}" for line in size_problems(folder, index)]
    for shard in index.shards:
        path = folder / shard.file
        if path.is_file() and path.stat().st_size == shard.bytes and sha256_of(path) != shard.sha256:
            problems.append(f"{path} is not what was encoded (its sha256 differs); delete it and {REPAIR}")
    known = {INDEX_FILE, LABELS_FILE, LOCK_FILE, *(shard.file for shard in index.shards)}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in known)
    problems += [f"{folder / name} does not belong to these latents" for name in foreign]
    if not problems:
        problems += _label_problems(folder, index)
    return problems


def _label_problems(folder: Path, index: LatentIndex) -> list[str]:
    """Labels in labels.npy that differ from the shards or have no class; the files themselves are complete."""
    if not index.class_names:
        return []
    labels = map_labels(folder)
    in_shards = np.concatenate([map_shard(folder / shard.file).array("labels") for shard in index.shards])
    if not np.array_equal(labels, in_shards):
        return [f"{folder / LABELS_FILE} differs from the labels in the shards; delete it and {REPAIR}"]
    if not 0 <= labels.min() <= labels.max() < len(index.class_names):
        return [f"{folder / LABELS_FILE} has labels outside 0 to {len(index.class_names) - 1}, its classes"]
    return []
