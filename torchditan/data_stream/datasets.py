# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The interface of a dataset, and how the stream reads one image.

A dataset is a class that inherits from `ImageDataset` (docs/extending.md has an example). Optional attributes have a
default there. Optional abilities are methods, each with a protocol here: `BatchedDataset`, `GroupedDataset`,
`VariedDataset`, `ListedDataset`, `FileDataset`, `StandInDataset`.
"""

from __future__ import annotations

import abc
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from torchditan.errors import ConfigError, option_error, printable

Batch = dict[str, torch.Tensor]


class CorruptImageError(ConfigError):
    """An image that cannot be read. The message names it.

    Args:
        named: only its name and the reason, for lists of such images.
    """

    def __init__(self, message: str = "", *, named: str | None = None) -> None:
        super().__init__(message)
        self.named = str(self) if named is None else printable(named)


def images_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(..., C, H, W) in [-1, 1] of a sample or a batch: its `image`, uint8, stored with a latent, or its `sample`."""
    return batch["image"].float() / 127.5 - 1 if "image" in batch else batch["sample"]


class DatasetDescription(abc.ABC):
    """Attributes of a dataset. The first four have no default."""

    name: str
    sample_shape: tuple[int, ...]
    """(C, H, W) of every sample, (C, F, H, W) for videos; the most common shape if there are several."""
    class_names: list[str]
    """Names of the labels 0, 1, ...; empty if the samples have no labels, or the job does not use them."""
    horizontal_flip: bool
    """Whether mirroring a sample preserves its meaning."""

    class_labels: np.ndarray | None = None
    """(N,) integers: the label of every sample, if known without reading the samples. The job then checks the range of
    the labels before training, and sample grids find the images of a class immediately."""
    fingerprint: str | None = None
    """Identity of the data. A run stores it and refuses to continue with data of another identity."""

    reading: Sequence[str] = ()
    """Lines about how the data was read, shown before training: what is held out, and what is not read."""

    # Only our datasets of latents and captions set the attributes below. Their types belong to optional parts,
    # which the stream never imports.
    index: Any = None
    """`torchditan.data_stream.latent_index.LatentIndex`, if the samples are stored latents."""
    with_image: bool = False
    """Whether stored latents come with their `image`, uint8, which a frozen network reads."""
    null_tensors: dict[str, torch.Tensor] | None = None
    """Embeddings of the empty caption, if items contain caption embeddings: one sample of each, under the same name."""
    text_blocks: int | None = None
    """Default of `model.text_blocks` for these captions."""
    prompts: Any = None
    """`torchditan.sampling.drawing.SampleRows` that sample grids show instead of classes."""


class ImageDataset(DatasetDescription):
    """Map-style samples: the base class of a dataset in `data/`."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample with this index. The same index always gives the same sample.

        Returns:
            `sample` (C, H, W) float32, pixels in [-1, 1] or normalised latents, and `class_label` int if there are
            `class_names`.

        Raises:
            CorruptImageError: the sample cannot be read.
        """


class SequentialDataset(DatasetDescription):
    """Samples that can only be read in order."""

    @abc.abstractmethod
    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        """This rank's share, with items as in ImageDataset. The iterable has `state_dict` and `load_state_dict`."""


_REQUIRED = ("name", "sample_shape", "class_names", "horizontal_flip")
_TOLERANCE = 0.01
"""For pixels, which resizing and noise may move beyond [-1, 1]."""
_MANY = 16
"""Samples that are compared with [0, 1]."""


def check_contract(dataset: Any, *, name: str) -> None:
    """Check that a dataset is an `ImageDataset` or a `SequentialDataset` with all its attributes, and its first item.

    The first item of a sequential dataset is checked when its stream reads it.

    Args:
        name: value of `dataset.dataset_name`.

    Raises:
        ConfigError: it is not, or an attribute is missing, or the item is wrong.
    """
    kind = type(dataset).__name__
    if not isinstance(dataset, DatasetDescription):
        right = f"its class {kind} must inherit from ImageDataset or SequentialDataset; see docs/extending.md"
        raise option_error("dataset.dataset_name", name, right)
    if missing := [attribute for attribute in _REQUIRED if not hasattr(dataset, attribute)]:
        right = f"its class {kind} has no {', no '.join(missing)}; see docs/extending.md"
        raise option_error("dataset.dataset_name", name, right)
    if not isinstance(dataset, ImageDataset) or isinstance(dataset, StandInDataset) or len(dataset) == 0:
        return
    with suppress(CorruptImageError):  # `dataset.corrupt_images` decides when it is trained on
        item = dataset[0]
        check_item(dataset, item, name=name)
        _warn_of_other_range(dataset, item["sample"])


def check_item(dataset: Any, item: Any, *, name: str) -> None:
    """Check an item of a dataset against its attributes.

    Args:
        name: value of `dataset.dataset_name`.

    Raises:
        ConfigError: the item, its sample or its label is not as in the contract.
    """

    def refuse(right: str) -> ConfigError:
        return option_error("dataset.dataset_name", name, f"{right}; see docs/extending.md")

    if not isinstance(item, Mapping):
        raise refuse(f"its first item is a {type(item).__name__}; must be a dict with `sample`")
    sample: Any = item.get("sample")
    shape = tuple(dataset.sample_shape)
    is_tensor = isinstance(sample, torch.Tensor) and sample.dtype == torch.float32
    is_right = is_tensor and tuple(sample.shape) == shape
    if is_tensor and isinstance(dataset, GroupedDataset):  # several heights and widths
        is_right = sample.dim() == len(shape) and sample.shape[0] == shape[0]
    limit = 1 + _TOLERANCE if _has_pixels(dataset) else float("inf")
    if not is_right or not sample.isfinite().all() or sample.abs().max() > limit:
        values = "from -1 to 1" if _has_pixels(dataset) else "finite"
        right = f"the sample of its first item is {_describe(sample)}"
        raise refuse(f"{right}; must be a torch.Tensor float32 {shape}, {values}")
    if dataset.class_names:
        label: Any = item.get("class_label")
        last = len(dataset.class_names) - 1
        is_known = dataset.class_labels is not None  # their range is checked for all
        if not _is_label(label) or not (is_known or 0 <= label <= last):
            found = "no class_label" if label is None else f"class_label {label!r}"
            raise refuse(f"its first item has {found}; must be an integer, 0 to {last}, or class_names must be []")


def _has_pixels(dataset: Any) -> bool:
    """Whether the samples are pictures, not latents, which have any values."""
    return dataset.index is None and dataset.sample_shape[0] in (1, 3)


def _warn_of_other_range(dataset: Any, first: torch.Tensor) -> None:
    """Print a line on rank 0 if many samples have no negative value: they may be in [0, 1], as torchvision's are."""
    if not _has_pixels(dataset) or not 0 <= first.min() < first.max() or os.environ.get("RANK", "0") != "0":
        return
    indices = [number * len(dataset) // _MANY for number in range(1, _MANY)]
    if all(dataset[index]["sample"].min() >= 0 for index in indices):
        right = "if pixels are from 0 to 1, change them to -1 to 1: sample * 2 - 1"
        print(f"note: samples of {dataset.name} have no negative values; {right}", file=sys.stderr, flush=True)


def _describe(sample: Any) -> str:
    """Type, shape and range of what should be a sample: `numpy.ndarray uint8 (4, 4, 3), from 0 to 255`."""
    if sample is None:
        return "missing"
    kind = type(sample)
    text = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    if not isinstance(sample, (torch.Tensor, np.ndarray)):
        return text
    text += f" {str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
    is_numeric = isinstance(sample, torch.Tensor) or sample.dtype.kind in "biuf"
    if not is_numeric or 0 in sample.shape:
        return text
    values = torch.as_tensor(sample).double()
    is_finite = values.isfinite().all()
    return f"{text}, from {values.min():.4g} to {values.max():.4g}" if is_finite else f"{text}, not finite"


def _is_label(label: Any) -> bool:
    try:
        operator.index(label)
    except TypeError:
        return False
    return True


@runtime_checkable
class BatchedDataset(Protocol):
    """An ImageDataset that reads whole batches at once, including mirrored samples. All its samples are readable."""

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        """The samples (B,) at these indices, mirrored where `flips` (B,) bool is true.

        Instead of `sample`, the batch may contain inputs from which the device computes it (sample_space.py).
        """


@runtime_checkable
class GroupedDataset(Protocol):
    """An ImageDataset whose samples have several shapes; its `sample_shape` is the most common one."""

    def groups(self) -> list[np.ndarray]:
        """Indices (n,) of the samples of each shape, ascending and not empty. Every sample is in one group."""


@runtime_checkable
class VariedDataset(Protocol):
    """An ImageDataset whose samples have several captions."""

    def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
        """The item at this position, with the caption that (seed, position) selects."""
        ...


@runtime_checkable
class ListedDataset(Protocol):
    """An ImageDataset that can name its images, so that a run can tell which differ from those it was started with."""

    def file_sizes(self) -> dict[str, dict[str, int]]:
        """Split -> name -> size in bytes (0 if unknown) of every image, held-out ones included."""
        ...


@runtime_checkable
class FileDataset(ListedDataset, Protocol):
    """An ImageDataset of files, which are checked before training."""

    root: Path

    def name_of(self, index: int) -> str: ...

    def check_files(self, cache_folder: Path) -> Iterator[tuple[int, dict[int, str]]]:
        """Yield the number of files checked so far and the unreadable ones: index -> reason. At least twice a minute,
        and at the end."""
        ...


@runtime_checkable
class StandInDataset(Protocol):
    """An ImageDataset of random samples that replaces any other dataset in a benchmark."""

    def condition_on(self, tensors: Mapping[str, Any]) -> None:
        """Add random tensors with these names and `TensorSpec`s to all later items, as the model's condition."""


@runtime_checkable
class CaptionSource(Protocol):
    """Images with captions as text. The cache encodes it and becomes the ImageDataset to train on."""

    name: str
    sample_shape: tuple[int, ...]
    reading: Sequence[str]
    captions: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def caption_variants(self, index: int) -> list[str]: ...

    def caption_weights(self, index: int) -> list[float]: ...

    def shape_of(self, index: int) -> tuple[int, ...]: ...

    def content_key(self, index: int) -> str: ...


@runtime_checkable
class CaptionedPixels(Protocol):
    """Pixels of one shape with captions as text, which are embedded when an item is read: there may be too many to
    encode. If it also has classes, it is read in this way only for a model of text."""

    name: str
    sample_shape: tuple[int, ...]
    class_names: list[str]
    reading: Sequence[str]
    fingerprint: str | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`sample` and `caption`."""
        ...

    def caption_of(self, index: int) -> str: ...


def read_image(
    dataset: ImageDataset,
    index: int,
    *,
    num_classes: int,
    corrupt_images: Literal["error", "skip"],
    group: np.ndarray | None = None,
) -> dict[str, Any]:
    """The item at `index`, or with `skip` the next readable one. `place` is its index, `skipped` has the unreadable
    ones before it: index -> name and reason.

    Args:
        group: ascending indices, including `index`, that may replace it; None for all.

    Raises:
        CorruptImageError: the image cannot be read, and `corrupt_images` is `error`.
        ConfigError: no image can be read, or a label is not below `num_classes` (0: items have no label).
    """
    length = len(dataset) if group is None else len(group)
    first = index if group is None else int(np.searchsorted(group, index))
    skipped: dict[int, str] = {}
    for offset in range(length):
        place = (first + offset) % length
        place = place if group is None else int(group[place])
        try:
            item = dataset[place]
        except CorruptImageError as error:
            if corrupt_images == "error":
                raise
            skipped[place] = error.named
            continue
        item = {**item, "skipped": skipped, "place": place}
        if num_classes == 0:
            item.pop("class_label", None)
        elif not 0 <= item["class_label"] < num_classes:
            right = f"image {place} of {dataset.name} has label {item['class_label']}; must be 0 to {num_classes - 1}"
            raise option_error("dataset.num_classes", num_classes, right)
        return item
    raise option_error("dataset.dataset_name", dataset.name, "has no readable image")
