# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the stream needs of a dataset, as protocols, and reading one image of it."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from torchditan.config.errors import ConfigError, option_error

Batch = dict[str, torch.Tensor]


class CorruptImageError(ConfigError):
    """An image that cannot be read; the message names it."""


class ImageDataset(Protocol):
    """What the stream needs of a dataset; `data/` has one file for each."""

    name: str
    sample_shape: tuple[int, ...]
    """(C, H, W) of every sample."""
    class_names: list[str]
    """Empty: the dataset has no labels."""
    horizontal_flip: bool
    """Whether a mirrored sample is as good as the original."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`sample` (C, H, W) float32 in [-1, 1], and `class_label` int where there are labels."""


@runtime_checkable
class BatchedDataset(Protocol):
    """An ImageDataset that reads whole batches at once, mirrored samples included; no sample of it can be corrupt."""

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        """The samples (B,) at these indices, mirrored where `flips` (B,) bool is true.

        Instead of `sample` it may give what `sample` is computed from on the device (autoencoders/latent_space.py).
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
class CaptionedDataset(Protocol):
    """A dataset of captioned images (data/captions.py): the cache encodes it, and becomes the ImageDataset."""

    name: str
    sample_shape: tuple[int, ...]
    captions: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def caption_variants(self, index: int) -> list[str]: ...

    def shape_of(self, index: int) -> tuple[int, ...]: ...

    def content_key(self, index: int) -> str: ...


class SequentialDataset(Protocol):
    """A dataset that can only be read in order."""

    name: str
    sample_shape: tuple[int, ...]
    class_names: list[str]
    horizontal_flip: bool

    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        """This rank's share, items as in ImageDataset; the iterable has `state_dict` and `load_state_dict`."""


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
        ConfigError: none can be read, or the label is not below `num_classes` (0: there are no labels).
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
        if num_classes and not 0 <= item["class_label"] < num_classes:
            right = f"image {place} of {dataset.name} has label {item['class_label']}; must be 0 to {num_classes - 1}"
            raise option_error("dataset.num_classes", num_classes, right)
        return {**item, "skipped": skipped, "place": place}
    raise option_error("dataset.dataset_name", dataset.name, "has no readable image")
