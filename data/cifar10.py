# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""CIFAR-10: 60,000 photos of 32 x 32 pixels in 10 classes (Krizhevsky 2009). The test batch is for validation.

Reads the official binary files (`cifar-10-binary.tar.gz`), parquet files as the hub stores them, or the hub. The Python
version is refused, because unpickling a downloaded file runs any code in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.hub import open_hub
from torchditan.datasets.images import to_sample
from torchditan.datasets.options import NEEDS, Split, existing_path, photo_channels, refuse
from torchditan.datasets.splits import describe_parts, divide_files, walk
from torchditan.datasets.tables import TableImages, read_parquet
from torchditan.errors import ConfigError, option_error

CLASS_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
RECORD_BYTES = 1 + 3 * 32 * 32


class Cifar10(ImageDataset):
    """All images in memory, uint8: 150 MB for the training split."""

    name = "cifar10"
    horizontal_flip = True
    class_labels: np.ndarray

    def __init__(self, *, pixels: np.ndarray, class_labels: np.ndarray, channels: int) -> None:
        self.pixels = pixels  # (N, 32, 32, 3)
        self.class_labels = class_labels
        self.class_names = list(CLASS_NAMES)
        self.sample_shape = (channels, 32, 32)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = self.pixels[index]
        if self.sample_shape[0] == 1:
            from PIL import Image

            pixels = np.asarray(Image.fromarray(pixels).convert("L"))
        return {"sample": torch.from_numpy(to_sample(pixels)), "class_label": int(self.class_labels[index])}


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Any:
    channels = photo_channels(config, input_channels)
    refuse(config, "crop")
    if config.hub_name is not None:
        return open_hub(
            config,
            hub_name=config.hub_name,
            split=split,
            image_key="img" if config.image_key == "image" else config.image_key,
            sample_shape=(channels, 32, 32),
        )
    if config.streaming:
        raise option_error("dataset.streaming", True, "needs the hub; set --dataset.hub_name uoft-cs/cifar10")
    root = existing_path(config)
    if root.is_dir() and (root / "cifar-10-batches-bin").is_dir():
        root = root / "cifar-10-batches-bin"
    if root.is_dir():
        names = ["/".join((*parts, name)) for parts, found in walk(root) for name in found]
    else:
        root, names = root.parent, [root.name]
    if parquet := [name for name in names if name.endswith(".parquet")]:
        return _read_parquet(config, root, parquet, split=split, channels=channels)
    pattern = "test_batch*.bin" if split == "validation" else "data_batch_*.bin"
    files = sorted(root.glob(pattern))
    if not files:
        raise _nothing_found(root, pattern)
    records = np.concatenate([_read_binary(path) for path in files])  # (N, RECORD_BYTES)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Cifar10(pixels=np.ascontiguousarray(pixels), class_labels=records[:, 0].astype(np.int64), channels=channels)


def _read_binary(path: Path) -> np.ndarray:
    """(N, 3073) uint8: one byte for the label, then 1,024 each for red, green and blue."""
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(data) == 0 or len(data) % RECORD_BYTES:
        raise option_error("dataset.root_dir", str(path), f"has {len(data)} bytes, not a multiple of {RECORD_BYTES}")
    return data.reshape(-1, RECORD_BYTES)


def _nothing_found(root: Path, pattern: str) -> ConfigError:
    right = f"has no {pattern} and no parquet; cifar10 needs {NEEDS['cifar10']}"
    if any((folder / "data_batch_1").exists() for folder in (root, root / "cifar-10-batches-py")):
        right = "is the Python version, whose pickles can run code; download cifar-10-binary.tar.gz instead"
    return option_error("dataset.root_dir", str(root), right)


def _read_parquet(config: options.Dataset, root: Path, names: list[str], *, split: Split, channels: int) -> TableImages:
    """Test and held-out files, by their names and folders, are the validation split. A single file is for training."""
    parts = divide_files(names)
    parts["validation"], parts["test"] = parts["validation"] + parts["test"], []
    chosen = [root / name for name in (parts["validation"] if split == "validation" else parts["train"] or names)]
    if not chosen:
        raise option_error("dataset.root_dir", config.root_dir, "has no test-*.parquet for the validation images")
    tables = [read_parquet(path, shown=str(config.root_dir)) for path in chosen]
    table = import_optional("pyarrow", extra="hub").concat_tables(tables)
    images = TableImages(
        table,
        name="cifar10",
        where=str(chosen[0] if len(chosen) == 1 else chosen[0].parent),
        image_key="img" if config.image_key == "image" and "img" in table.column_names else config.image_key,
        label_key=config.label_key,
        class_names=list(CLASS_NAMES),
        sample_shape=(channels, 32, 32),
    )
    images.reading = describe_parts(parts, what="parquet file")
    return images
