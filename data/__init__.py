# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The datasets, by name. To add yours: write `data/mine.py` with a `build`, import it, add one line below.

`build(config, *, split, input_channels)` returns anything with the attributes of
`torchditan.stream.ImageDataset`; `build_dataset` then checks it against the options, so a dataset of
yours is checked like ours. docs/data.md has an example.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal

from data import cifar10, digits, dummy, earth, emoji, folder, imagenet
from data.options import height_and_width
from torchditan import config as options
from torchditan.config import ConfigError
from torchditan.stream import ImageDataset

DATASETS: dict[str, Callable[..., Any]] = {
    "cifar10": cifar10.build,
    "digits": digits.build,
    "dummy": dummy.build,
    "earth": earth.build,
    "emoji": emoji.build,
    "folder": folder.build,
    "imagenet": imagenet.build,
    "imagenet_hub": imagenet.build_hub,
}
STREAMED = ("cifar10", "imagenet_hub")


def build_dataset(
    config: options.Dataset, *, split: Literal["train", "validation"], input_channels: int | None = None
) -> ImageDataset:
    """The dataset of `config`, checked against the options; what they leave open, the dataset fills in.

    Args:
        config: section `[dataset]`. `num_classes` 0 hides the labels; more classes than the dataset has
            are allowed and named "class 12".
        split: a dataset that has no split of its own holds some images out for validation.
        input_channels: `model.input_channels`; 1 turns photos grey.

    Returns:
        A map-style dataset, or with `streaming` a `data.hub.StreamingImages`.

    Raises:
        ConfigError: the options name no dataset, or one that cannot be what they ask for.
    """
    name = config.dataset_name
    if name not in DATASETS:
        raise ConfigError(_unknown_name(name))
    if config.streaming and name not in STREAMED:
        raise ConfigError(f"dataset.streaming: {name} is not read from the hub; only {', '.join(STREAMED)} can stream")
    dataset = DATASETS[name](config, split=split, input_channels=input_channels)
    _check_shape(config, dataset, input_channels=input_channels)
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        where = config.root_dir or name
        raise ConfigError(f"dataset.dataset_name {name!r}: no {split} images in {where}")
    return _set_classes(config, dataset)


def _unknown_name(name: str) -> str:
    if name == "imagenet_dummy":
        return (
            "dataset.dataset_name 'imagenet_dummy' reads latents, which come with a later version; "
            "for a benchmark use --dataset.dataset_name dummy"
        )
    nearest = difflib.get_close_matches(name, DATASETS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"dataset.dataset_name {name!r} is unknown{hint}; there are {', '.join(DATASETS)}"


def _check_shape(config: options.Dataset, dataset: Any, *, input_channels: int | None) -> None:
    channels, height, width = dataset.sample_shape
    if height_and_width(config, default=(height, width)) != (height, width):
        raise ConfigError(
            f"dataset.image_size is {config.image_size}, but {dataset.name} is {height} x {width}; leave it out"
        )
    if input_channels not in (None, channels):
        raise ConfigError(f"model.input_channels is {input_channels}, but {dataset.name} has {channels}; leave it out")


def _set_classes(config: options.Dataset, dataset: Any) -> Any:
    if config.num_classes == 0:
        return Unlabelled(dataset) if dataset.class_names else dataset
    if config.num_classes is not None and not dataset.class_names:
        raise ConfigError(f"dataset.num_classes is {config.num_classes}, but {dataset.name} has no labels; set it to 0")
    num_found = len(dataset.class_names)
    if config.num_classes is not None and config.num_classes < num_found:
        raise ConfigError(f"dataset.num_classes is {config.num_classes}, but {dataset.name} has {num_found} classes")
    labels = getattr(dataset, "class_labels", None)
    if num_found and labels is not None and not 0 <= labels.min() <= labels.max() < num_found:
        raise ConfigError(
            f"dataset.dataset_name {dataset.name!r}: labels run from {labels.min()} to {labels.max()}, "
            f"but there are {num_found} classes, 0 to {num_found - 1}"
        )
    dataset.class_names += [f"class {label}" for label in range(num_found, config.num_classes or 0)]
    return dataset


class Unlabelled:
    """A dataset without its labels, for `dataset.num_classes` 0."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset
        self.name = dataset.name
        self.sample_shape = dataset.sample_shape
        self.class_names: list[str] = []
        self.horizontal_flip = dataset.horizontal_flip

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.dataset[index]
        del item["class_label"]
        return item
