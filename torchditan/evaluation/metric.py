# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The protocol of a metric: it sees batches of generated and of real pictures, and says at the end what it found.

scripts/evaluate.py computes those that `--metrics` names (`METRICS` in registry.py); docs/extending.md adds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from torchditan.data_stream.datasets import ImageDataset

Source = Literal["train", "held_out", "generated"]
"""Where pictures come from: the images that the model learned from, those it never saw, or its samples."""


@dataclass(frozen=True)
class Evaluation:
    """What a metric is built from."""

    class_names: list[str]
    """Of the dataset; empty where the model was trained without labels."""
    seed: int
    epochs: int
    """Passes over the training images, for a metric that fits a model of its own."""


class Metric(Protocol):
    """One metric of one evaluation; built as `cls(evaluation)`."""

    needs_labels: ClassVar[bool]
    """Whether it applies to models of classes alone."""

    def __init__(self, evaluation: Evaluation) -> None: ...

    def update(self, images: torch.Tensor, labels: torch.Tensor | None, *, source: Source) -> None:
        """Take a batch.

        Args:
            images: (N, C, H, W) float32 pixels in [-1, 1] on the CPU. Any N; the sources come in any order.
            labels: (N,) int64, of generated images the class that was asked for; None without labels.
            source: of all images of the batch.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """What it gathered so far, as tensors that can be sent to another rank."""

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        """Add what the same metric gathered on another rank, from other pictures."""

    def compute(self) -> dict[str, Any]:
        """Results by name, numbers or dictionaries of them, once all pictures were taken."""


class MetricOfAllPictures:
    """A metric that needs all pictures at once and keeps them on the host; a subclass gives `compute`."""

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
