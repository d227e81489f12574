# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The protocol of a metric: it receives batches of generated and real pictures, and then computes its results.

torchditan evaluate computes the metrics in `--metrics` (`METRICS` in registry.py); docs/extending.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchditan.data_stream.datasets import CorruptImageError, ImageDataset

Source = Literal["train", "held_out", "generated"]
"""Source of pictures: training images, held-out images, or samples of the model."""


@dataclass(frozen=True)
class Evaluation:
    """Arguments for building a metric."""

    class_names: list[str]
    """Of the dataset; empty if the model was trained without labels."""
    seed: int
    epochs: int = 20
    """Passes over the training images, for metrics that train a model."""
    device: str = "cpu"
    """Where a metric runs its network."""
    cache_folder: Path | None = None
    """Keeps the features of real images; None keeps none."""
    inception_weights: Path | None = None
    """Weights file of Inception-2015; None uses torch-fidelity's, downloaded once."""
    reference: Path | None = None
    """`.npz` of ADM's evaluator that replaces the training images in comparisons of distributions."""
    samples_name: str = "generated images"
    """What an error calls the generated images: the option that sets their number, or their file."""


@dataclass(frozen=True)
class Pictures:
    """A batch of pictures of one source."""

    images: Tensor
    """(N, C, H, W) uint8 on the CPU, C 1 or 3; latents are decoded."""
    labels: Tensor | None
    """(N,) int64, for generated images the requested class; None without labels."""
    numbers: Tensor
    """(N,) int64: place of each picture among all of its source, from 0. The same on any number of ranks."""
    source: Source
    prompts: list[str] | None = None
    """The text of each picture, for samples of a model of captions."""


class Figure(NamedTuple):
    """One number of an evaluation."""

    value: float
    num_images: int
    """Generated images behind it."""
    halves: tuple[float, float] | None = None
    """The same number of two disjoint halves of these images; None where a half has too few."""
    extractor: str | None = None
    """Network whose features it compares."""
    interval: tuple[float, float] | None = None
    """95% interval, if one set of images gives it."""
    no_interval: str | None = None
    """Why there is no interval, however many samples and seeds."""


def share(count: int, total: int) -> Figure:
    """The figure `count / total` of independent images, with its Wilson interval (Wilson 1927)."""
    z, value = 1.959964, count / total
    center = (value + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(value * (1 - value) / total + z**2 / (4 * total**2))
    ends = (0.0 if count == 0 else center - half, 1.0 if count == total else center + half)  # without rounding errors
    return Figure(value, total, interval=ends)


class Metric(Protocol):
    """One metric of one evaluation; built as `cls(evaluation)`."""

    needs_labels: ClassVar[bool]
    """Whether it requires a class-conditional model."""

    verdicts: ClassVar[Mapping[str, bool]]
    """Figures on which the verdicts of a grid are based, and whether higher is better. May be left out."""

    extractors: dict[str, str]
    """Networks whose features it compares: name -> SHA-256 of the weights."""

    def __init__(self, evaluation: Evaluation) -> None: ...

    def check(self, counts: Mapping[Source, int], *, image_size: tuple[int, int]) -> None:
        """Refuse an evaluation that cannot give its results. Called before slow work.

        Args:
            counts: number of pictures of each source.
            image_size: (H, W) of the generated pictures.

        Raises:
            ConfigError: there are too few pictures, say.
        """

    def update(self, pictures: Pictures) -> None:
        """Add a batch. Sources and pictures come in any order."""

    def state(self, source: Source) -> dict[str, Tensor]:
        """The data gathered so far from a source, as tensors on the CPU that can be sent to another rank."""

    def merge(self, state: Mapping[str, Tensor], source: Source) -> None:
        """Add the data that the same metric gathered from a source on another rank, from other pictures."""

    def forget(self, source: Source) -> None:
        """Drop the data of a source. The next sampling seed then reuses that of the real images."""

    def compute(self) -> dict[str, Any]:
        """Results by name, called after all pictures were added.

        A result is a `Figure`, a number, a dictionary of numbers, or the reason, as a string, if it cannot be computed.
        """


@runtime_checkable
class PromptMetric(Metric, Protocol):
    """A metric of prompts. Its generated pictures have `prompts`; it sees no real images."""

    needs_dataset: ClassVar[str | None]
    """Name of the captioned dataset whose models it judges; None for any model of captions."""

    def draw_prompts(self, count: int) -> list[str]:
        """The prompts of an evaluation, unless the user gives some: one for each picture; none for captions of the
        dataset."""

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that it cannot judge.

        Raises:
            ConfigError: names the first one.
        """


class MetricOfAllPictures:
    """Base class for metrics that need all pictures at once, kept on the host; subclasses implement `compute`."""

    needs_labels: ClassVar[bool] = False
    verdicts: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.extractors: dict[str, str] = {}
        self._batches: dict[str, list[dict[str, Tensor]]] = {}

    def check(self, counts: Mapping[Source, int], *, image_size: tuple[int, int]) -> None:
        """Any images will do."""

    def update(self, pictures: Pictures) -> None:
        batch = {"images": pictures.images, "numbers": pictures.numbers}
        if pictures.labels is not None:
            batch["labels"] = pictures.labels
        self.merge(batch, pictures.source)

    def state(self, source: Source) -> dict[str, Tensor]:
        batches = self._batches.get(source, [])
        return {name: torch.cat([batch[name] for batch in batches]) for name in (batches[0] if batches else ())}

    def merge(self, state: Mapping[str, Tensor], source: Source) -> None:
        if state:
            self._batches.setdefault(source, []).append(dict(state))

    def forget(self, source: Source) -> None:
        self._batches.pop(source, None)

    def images(self, source: Source) -> Tensor:
        """All images of a source, (N, C, H, W) float32 in [-1, 1], in order."""
        return self._ordered("images", source).float() / 127.5 - 1

    def labels(self, source: Source) -> Tensor:
        """Labels (N,) of `images(source)`."""
        return self._ordered("labels", source)

    def _ordered(self, name: str, source: Source) -> Tensor:
        state = self.state(source)
        return state[name][state["numbers"].argsort()]


def batches_of(
    dataset: ImageDataset,
    *,
    batch_size: int = 256,
    rank: int = 0,
    world_size: int = 1,
    corrupt_images: Literal["error", "skip"] = "error",
) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Samples (B, C, H, W) of a dataset, their labels (B,) or None, and their indices (B,).

    The batches are the same on any number of ranks; each rank gets every `world_size`-th one. With "skip", images that
    cannot be read are left out.

    Raises:
        CorruptImageError: an image cannot be read.
    """
    for start in range(rank * batch_size, len(dataset), world_size * batch_size):
        items = []
        for index in range(start, min(start + batch_size, len(dataset))):
            try:
                items.append((index, dataset[index]))
            except CorruptImageError:
                if corrupt_images == "error":
                    raise
        if not items:
            continue
        has_labels = "class_label" in items[0][1]
        labels = torch.tensor([item["class_label"] for _, item in items]) if has_labels else None
        indices = torch.tensor([index for index, _ in items])
        yield torch.stack([item["sample"] for _, item in items]), labels, indices
