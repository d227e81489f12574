# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Latents written by `torchditan encode`, and the public file of ImageNet latents.

Notable:
- `latents` reads a folder with `train/` and `validation/`, or a single split, or the public file
  `imagenet_ci8x8.safetensors`. Without `dataset.root_dir` it reads the public file in the working directory;
- `read_batch` reads a batch as stored, which the device normalizes; a single item is normalized here;
- a mirrored sample is the stored latent of the mirrored image, because an encoder does not commute with a mirror;
- `hub:owner/name` as `dataset.root_dir` downloads shared latents, and checks them by size and SHA-256 once;
- held-out latents are normalized like the training latents, never by their own statistics.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchditan.config import options
from torchditan.data_stream.datasets import Batch, ImageDataset
from torchditan.data_stream.latent_index import INDEX_FILE, SETTINGS_FILE, fingerprint_of, read_index
from torchditan.data_stream.latent_shards import LABELS_FILE, LatentShards, size_problems, to_sample
from torchditan.datasets.options import PUBLIC_FILE, Split, existing_path, refuse
from torchditan.datasets.splits import SPLITS
from torchditan.errors import option_error
from torchditan.run.atomic_files import sha256_of
from torchditan.run.hub import download_folder, is_on_hub

_FILES = (INDEX_FILE, LABELS_FILE, "shard-*.safetensors", "shard-*.tar")
_CHECKED = ".torchditan_checked"
"""In a downloaded snapshot: its files are those of the index."""


class Latents(ImageDataset):
    """One split. `index` describes the latents, including the shift and scale that normalize them."""

    with_logvar = False
    """Whether `read_batch` also returns the log-variance, to draw from the encoder's posterior."""

    def __init__(self, shards: LatentShards, *, name: str, shift: tuple[float, ...], scale: tuple[float, ...]) -> None:
        self.shards = shards
        self.name = name
        self.index = dataclasses.replace(shards.index, shift=shift, scale=scale)
        self.fingerprint = fingerprint_of(shards.index)
        self.sample_shape = self.index.latent_shape
        self.class_names = list(self.index.class_names)
        self.class_labels = shards.labels
        self.horizontal_flip = self.index.flipped
        self._shift, self._scale = torch.tensor(shift), torch.tensor(scale)  # (C,) float32

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw = self.shards.read(np.array([index]), np.zeros(1, dtype=bool), with_image=self.with_image)
        item: dict[str, Any] = {"sample": to_sample(raw, shift=self._shift, scale=self._scale)[0]}
        if self.with_image:
            item["image"] = raw["image"][0]
        if self.class_labels is not None:
            item["class_label"] = int(self.class_labels[index])
        return item

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        """The input of `to_sample` (see `LatentShards.read`) and `class_label` (B,) int64."""
        batch = self.shards.read(indices, flips, with_logvar=self.with_logvar, with_image=self.with_image)
        if self.class_labels is not None:
            batch["class_label"] = torch.from_numpy(self.class_labels[indices].astype(np.int64))
        return batch


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Latents:
    refuse(config, "hub_name", "crop")
    root = _find(config)
    train = _find_split(root, "train")
    if train is None:
        train = root  # a folder without train/ is a single split
    shards = train_shards = LatentShards.open(train)
    if split == "validation":
        held_out = _find_split(root, "validation")
        if held_out is None:
            right = "has no validation latents; encode them with --split validation, or set --validation.freq 0"
            raise option_error("dataset.root_dir", config.root_dir or str(root), right)
        shards = LatentShards.open(held_out)
        _check_same_space(shards, train_shards)
    if config.horizontal_flip and not shards.index.flipped and split == "train":
        right = "these latents contain no mirrored images; encode them without --no_flip, or leave it out"
        raise option_error("dataset.horizontal_flip", True, right)
    index = train_shards.index
    dataset = Latents(shards, name=config.dataset_name, shift=index.shift, scale=index.scale)
    if config.num_classes == 0:
        dataset.class_names, dataset.class_labels = [], None
    return dataset


def splits_of(folder: Path) -> dict[str, Path]:
    """name -> folder of each finished split; a single split is called train."""
    if (folder / INDEX_FILE).is_file():
        return {"train": folder}
    return {split: folder / split for split in SPLITS if (folder / split / INDEX_FILE).is_file()}


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


def _find(config: options.Dataset) -> Path:
    """`dataset.root_dir`, or the public file in that folder or in the working directory."""
    if config.root_dir is not None and is_on_hub(config.root_dir):
        return open_from_hub(config.root_dir)
    root = existing_path(config)
    return root / PUBLIC_FILE if (root / PUBLIC_FILE).is_file() else root


def _find_split(root: Path, split: Split) -> Path | None:
    """Folder or file of one split. Of the public files, `_val` marks the validation split."""
    if root.is_file():
        path = root if split == "train" else root.with_name(f"{root.stem}_val{root.suffix}")
        return path if path.is_file() else None
    folder = root / split
    return folder if (folder / INDEX_FILE).exists() or (folder / SETTINGS_FILE).exists() else None


def _check_same_space(held_out: LatentShards, train: LatentShards) -> None:
    """Refuse held-out latents of another autoencoder or other settings: their loss would be meaningless."""
    for field in ("autoencoder_name", "fingerprint", "latent_shape", "class_names"):
        here, there = getattr(held_out.index, field), getattr(train.index, field)
        is_named = field != "class_names" or train.path.is_dir()  # the public files do not name classes
        if is_named and here != there:
            right = f"its {field} differs from that of the training latents; encode both splits with the same settings"
            raise option_error("dataset.root_dir", str(held_out.path), right)
