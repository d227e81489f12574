# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The contract of a dataset, and reading one image of it.

A dataset is a class that inherits from `ImageDataset` (docs/extending.md has an example). Values that it may leave out
have a default there. What it may be able to do beyond single samples is a method, and each method has a protocol here:
`BatchedDataset`, `GroupedDataset`, `VariedDataset`, `StandInDataset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from torchditan.config.errors import ConfigError, option_error

Batch = dict[str, torch.Tensor]


class CorruptImageError(ConfigError):
    """An image that cannot be read; the message names it."""


class DatasetDescription:
    """What a dataset says about its samples. The first four have no default."""

    name: str
    sample_shape: tuple[int, ...]
    """(C, H, W) of every sample, (C, F, H, W) of videos; with several shapes the most common one."""
    class_names: list[str]
    """Names of the labels 0, 1, ...; empty: the samples have no labels, or the job does not use them."""
    horizontal_flip: bool
    """Whether a mirrored sample is as good as the original."""

    class_labels: np.ndarray | None = None
    """(N,) integers: the label of every sample, where it is known without reading the samples. Labels out of range are
    then found before training, and sample grids find the images of a class at once."""
    fingerprint: str | None = None
    """Identity of the data. A run stores it and refuses to continue with data that has another one."""

    # The three below are set by our own datasets of latents and captions. Their types belong to optional parts, which
    # the stream never imports.
    index: Any = None
    """`torchditan.latents.index.LatentIndex`, if the samples are stored latents."""
    null_tensors: dict[str, torch.Tensor] | None = None
    """Embeddings of the empty caption, if items hold embeddings of their captions: one sample of each, same names."""
    prompts: Any = None
    """`torchditan.evaluation.sample_rows.SampleRows` that sample grids show instead of classes."""


class ImageDataset(DatasetDescription):
    """Samples by their number: the base class of a dataset in `data/`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample of this number, always the same one.

        Returns:
            `sample` (C, H, W) float32, pixels in [-1, 1] or normalised latents, and `class_label` int if there are
            `class_names`.

        Raises:
            CorruptImageError: the sample cannot be read.
        """
        raise NotImplementedError


class SequentialDataset(DatasetDescription):
    """Samples that can only be read in order."""

    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        """This rank's share, items as in ImageDataset; the iterable has `state_dict` and `load_state_dict`."""
        raise NotImplementedError


REQUIRED = {
    "name": "a string",
    "sample_shape": "(C, H, W)",
    "class_names": "a list of names, [] without labels",
    "horizontal_flip": "whether a mirrored sample is as good as the original",
}
"""Attributes without a default, and what they have to be."""


def check_contract(dataset: Any, *, name: str) -> None:
    """Check that a dataset has what `ImageDataset` or `SequentialDataset` requires.

    A dataset that does not inherit from them gets the defaults of the attributes that it does not have.

    Args:
        dataset: changed in place.
        name: its value of `dataset.dataset_name`.

    Raises:
        ConfigError: an attribute or a method is missing; the message names all of them.
    """
    kind = type(dataset)
    missing = [f"{attribute} ({what})" for attribute, what in REQUIRED.items() if not hasattr(dataset, attribute)]
    methods = ("iterate",) if isinstance(dataset, SequentialDataset) else ("__len__", "__getitem__")
    for method in methods:
        unwritten = (None, getattr(ImageDataset, method, None), getattr(SequentialDataset, method, None))
        if getattr(kind, method, None) in unwritten:
            missing.append(f"{method}()")
    if missing:
        right = f"its class {kind.__name__} has no {', no '.join(missing)}; see docs/extending.md"
        raise option_error("dataset.dataset_name", name, right)
    if not isinstance(dataset, DatasetDescription):
        for attribute in DatasetDescription.__annotations__:
            if not hasattr(dataset, attribute):
                setattr(dataset, attribute, getattr(DatasetDescription, attribute))


@runtime_checkable
class BatchedDataset(Protocol):
    """An ImageDataset that reads whole batches at once, mirrored samples included; no sample of it can be corrupt."""

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        """The samples (B,) at these indices, mirrored where `flips` (B,) bool is true.

        Instead of `sample` it may give what `sample` is computed from on the device (latents/latent_space.py).
        """


@runtime_checkable
class GroupedDataset(Protocol):
    """An ImageDataset whose samples have several shapes; its `sample_shape` is the most common one."""

    def groups(self) -> list[np.ndarray]:
        """Indices (n,) of the samples of each shape, ascending, none of them empty; every sample is in one."""


@runtime_checkable
class VariedDataset(Protocol):
    """An ImageDataset whose samples have several captions."""

    def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
        """The item at this position: with the caption that (seed, position) chooses."""
        ...


@runtime_checkable
class StandInDataset(Protocol):
    """An ImageDataset of random samples that replaces any other one in a benchmark."""

    def condition_on(self, tensors: Mapping[str, Any]) -> None:
        """From now on items hold random tensors of these names and `TensorSpec`s, as the model's condition."""


@runtime_checkable
class CaptionSource(Protocol):
    """Images and their captions as texts. It is not trained on: the cache encodes it, and becomes the ImageDataset."""

    name: str
    sample_shape: tuple[int, ...]
    captions: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def caption_variants(self, index: int) -> list[str]: ...

    def shape_of(self, index: int) -> tuple[int, ...]: ...

    def content_key(self, index: int) -> str: ...


def read_image(
    dataset: ImageDataset,
    index: int,
    *,
    num_classes: int,
    corrupt_images: Literal["error", "skip"],
    group: np.ndarray | None = None,
) -> dict[str, Any]:
    """The item at `index`, or with `skip` the next readable one: `place` is its index, `skipped` counts those before.

    Args:
        group: indices in ascending order, `index` among them, that may take its place; None: all.

    Raises:
        CorruptImageError: it cannot be read, and `corrupt_images` is `error`.
        ConfigError: none can be read, or the label is not below `num_classes` (0: the item is without its label).
    """
    length = len(dataset) if group is None else len(group)
    first = index if group is None else int(np.searchsorted(group, index))
    for skipped in range(length):
        place = (first + skipped) % length
        place = place if group is None else int(group[place])
        try:
            item = dataset[place]
        except CorruptImageError:
            if corrupt_images == "error":
                raise
            continue
        item = {**item, "skipped": skipped, "place": place}
        if num_classes == 0:
            item.pop("class_label", None)
        elif not 0 <= item["class_label"] < num_classes:
            right = f"image {place} of {dataset.name} has label {item['class_label']}; must be 0 to {num_classes - 1}"
            raise option_error("dataset.num_classes", num_classes, right)
        return item
    raise option_error("dataset.dataset_name", dataset.name, "has no readable image")
