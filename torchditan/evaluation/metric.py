# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The protocol of a metric: it receives batches of generated and real pictures, and then computes its results.

scripts/evaluate.py computes the metrics in `--metrics` (`METRICS` in registry.py); docs/extending.md adds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from torchditan.data_stream.datasets import ImageDataset

Source = Literal["train", "held_out", "generated"]
"""Source of pictures: training images, held-out images, or samples of the model."""


@dataclass(frozen=True)
class Evaluation:
    """Arguments for building a metric."""

    class_names: list[str]
    """Of the dataset; empty if the model was trained without labels."""
    seed: int
    epochs: int
    """Passes over the training images, for metrics that train a model."""


class Metric(Protocol):
    """One metric of one evaluation; built as `cls(evaluation)`."""

    needs_labels: ClassVar[bool]
    """Whether it requires a class-conditional model."""

    def __init__(self, evaluation: Evaluation) -> None: ...

    def update(self, images: torch.Tensor, labels: torch.Tensor | None, *, source: Source) -> None:
        """Add a batch.

        Args:
            images: (N, C, H, W) float32 pixels in [-1, 1] on the CPU. Any N; the sources come in any order.
            labels: (N,) int64, for generated images the requested class; None without labels.
            source: of all images of the batch.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """The data gathered so far, as tensors that can be sent to another rank."""

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        """Add the data that the same metric gathered on another rank, from other pictures."""

    def compute(self) -> dict[str, Any]:
        """Results by name, as numbers or dictionaries of them; called after all pictures were added."""


class MetricOfAllPictures:
    """Base class for metrics that need all pictures at once, kept on the host; subclasses implement `compute`."""

    needs_labels: ClassVar[bool] = False

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self._batches: dict[str, list[torch.Tensor]] = {}

    def update(self, images: torch.Tensor, labels: torch.Tensor | None, *, source: Source) -> None:
        self.merge({f"{source}.images": images} | ({} if labels is None else {f"{source}.labels": labels}))

    def state(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat(batches) for name, batches in self._batches.items()}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self._batches.setdefault(name, []).append(tensor)

    def images(self, source: Source) -> torch.Tensor:
        """All images of a source, (N, C, H, W)."""
        return torch.cat(self._batches[f"{source}.images"])

    def labels(self, source: Source) -> torch.Tensor:
        """Labels (N,) of `images(source)`."""
        return torch.cat(self._batches[f"{source}.labels"])


def batches_of(dataset: ImageDataset, *, batch_size: int = 256) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Samples (B, C, H, W) of a whole dataset and their labels (B,), None without labels."""
    for start in range(0, len(dataset), batch_size):
        items = [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))]
        labels = torch.tensor([item["class_label"] for item in items]) if "class_label" in items[0] else None
        yield torch.stack([item["sample"] for item in items]), labels
