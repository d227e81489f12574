# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The datasets. To add one: `data/mine.py` with a function `build`, and a line to `DATASETS` of registry.py.

`build(config, *, split, input_channels)` returns an `ImageDataset` (torchditan/data_stream/datasets.py).
`build_dataset` checks it and compares it with the options. docs/extending.md has an example.
The folder data/ is the package `torchditan.datasets`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchditan.config.options import Dataset
from torchditan.datasets.options import Split, height_and_width
from torchditan.errors import as_unicode, option_error
from torchditan.registry import DATASETS, build, resolve

if TYPE_CHECKING:
    from torchditan.data_stream.datasets import ImageDataset


def build_dataset(
    config: Dataset, *, split: Split, input_channels: int | None = None, cache_folder: Path | None = None
) -> ImageDataset:
    """Build the dataset of `config` and check it against the options. The dataset fills in options that are left open.

    Args:
        config: section `[dataset]`. `num_classes` 0 hides the labels. It may exceed the classes of the dataset; the
            additional ones are named "class 12".
        split: a dataset without splits holds out some images for validation.
        input_channels: `model.input_channels`; 1 converts photos to grey.
        cache_folder: given to a function `build` with a parameter of this name, which may keep there what is slow to
            find; None keeps nothing.

    Returns:
        An ImageDataset, or with `streaming` a SequentialDataset.

    Raises:
        ConfigError: the dataset is unknown, or does not support the options.
    """
    # Imported here because it imports torch, and train.py checks the data before that.
    from torchditan.data_stream.datasets import SequentialDataset, check_contract

    name = config.dataset_name
    function, given = resolve(DATASETS, "dataset.dataset_name", name)
    if "cache_folder" in inspect.signature(function).parameters:
        given["cache_folder"] = cache_folder
    dataset = build(function, "dataset.dataset_name", name, config, split=split, input_channels=input_channels, **given)
    check_contract(dataset, name=name)
    if config.streaming != isinstance(dataset, SequentialDataset):
        right = "can only be read in order; must be true"
        if config.streaming:
            right = "is not a SequentialDataset; must be false"
        raise option_error("dataset.streaming", config.streaming, f"{name} {right}")
    *_, height, width = dataset.sample_shape
    if not config.aspect_buckets and height_and_width(config, default=(height, width)) != (height, width):
        right = f"{dataset.name} is {height} x {width}; leave it out"
        raise option_error("dataset.image_size", config.image_size, right)
    if not isinstance(dataset, SequentialDataset) and len(dataset) == 0:
        option, value = ("dataset_name", name) if config.root_dir is None else ("root_dir", config.root_dir)
        raise option_error(f"dataset.{option}", value, "; ".join([f"holds no {split} images", *dataset.reading]))
    return _set_classes(config, dataset)


def build_stored_latents(config: Dataset, *, split: Split, cache_folder: Path | None = None) -> ImageDataset:
    """Latents in tar shards of others, for `torchditan encode --latents`: items are (C, h, w) float32, as stored.

    Raises:
        ConfigError: the dataset is not `webdataset`, or holds no latents.
    """
    from torchditan.datasets.webdataset import build_latents

    if config.dataset_name != "webdataset":
        right = "must be webdataset, tar shards with .npy or .safetensors members, for --latents"
        raise option_error("dataset.dataset_name", config.dataset_name, right)
    if config.image_size is not None:
        right = "follows from the latents and the autoencoder; leave it out"
        raise option_error("dataset.image_size", config.image_size, right)
    dataset = build_latents(config, split=split, cache_folder=cache_folder)
    return cast("ImageDataset", _set_classes(config, dataset))


def _set_classes(config: Dataset, dataset: Any) -> Any:
    if config.num_classes == 0:
        try:
            dataset.class_names = []
        except AttributeError:
            right = f"{dataset.name} has class_names that cannot be replaced by []; leave it out"
            raise option_error("dataset.num_classes", 0, right) from None
        return dataset
    if config.num_classes is not None and not dataset.class_names:
        raise option_error("dataset.num_classes", config.num_classes, f"{dataset.name} has no labels; must be 0")
    num_found = len(dataset.class_names)
    if config.num_classes is not None and config.num_classes < num_found:
        right = f"{dataset.name} has {num_found} classes; must be at least that, or 0 to train without labels"
        raise option_error("dataset.num_classes", config.num_classes, right)
    labels = np.asarray([] if dataset.class_labels is None else dataset.class_labels)
    if num_found and len(labels) and not 0 <= labels.min() <= labels.max() < num_found:
        right = (
            f"the labels of {dataset.name} range from {labels.min()} to {labels.max()}; must be 0 to {num_found - 1}, "
            f"its {num_found} classes"
        )
        raise option_error("dataset.num_classes", config.num_classes, right)
    more = [f"class {label}" for label in range(num_found, config.num_classes or 0)]
    dataset.class_names = [*map(as_unicode, dataset.class_names), *more]
    return dataset
