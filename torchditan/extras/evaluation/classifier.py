# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `classifier`: a small classifier of real images predicts the class of each generated one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.errors import ConfigError
from torchditan.extras.evaluation.metric import Figure, MetricOfAllPictures, Source
from torchditan.run.progress import Advance, report_progress


class ClassifierAccuracy(MetricOfAllPictures):
    """Share of generated images that a classifier of the training images assigns to their requested class."""

    needs_labels = True
    verdicts: ClassVar[Mapping[str, bool]] = {"accuracy_generated": True}

    def check(self, counts: Mapping[Source, int], *, image_size: tuple[int, int]) -> None:
        """Refuse a dataset without training images, to train the classifier, or held-out images, to test it.

        Raises:
            ConfigError: there are none.
        """
        names: dict[Source, str] = {"train": "training images", "held_out": "held-out images"}
        for source, name in names.items():
            if not counts[source]:
                raise ConfigError(f"metric classifier: needs {name}, and the dataset has none; choose other metrics")

    def compute(self) -> dict[str, Any]:
        """All in 0..1: `accuracy_generated`, `accuracy_held_out_real`, `chance` and, of samples, `per_class`.

        Both accuracies are means over the classes that have generated and held-out images: each class counts equally,
        however many images it has. The halves have every second image of each class.
        """
        names = self.evaluation.class_names
        epochs, seed = self.evaluation.epochs, self.evaluation.seed
        with report_progress("training the classifier", total=epochs, unit="epochs") as advance:
            images, labels = self.images("train"), self.labels("train")
            classifier = train_classifier(
                images, labels, num_classes=len(names), epochs=epochs, seed=seed, advance=advance
            )
        of_class: dict[Source, dict[int, Tensor]] = {}
        total = len(self.labels("generated")) + len(self.labels("held_out"))
        with report_progress("classifying images", total=total, unit="images") as advance:
            for source in ("generated", "held_out"):
                labels = self.labels(source)
                correct = is_recognised(classifier, self.images(source), labels, advance=advance)
                of_class[source] = {label: correct[labels == label] for label in labels.unique().tolist()}
        generated, held_out = of_class["generated"], of_class["held_out"]
        compared = sorted(generated.keys() & held_out.keys())
        return {
            "accuracy_generated": class_mean([generated[label] for label in compared], with_halves=True),
            "accuracy_held_out_real": class_mean([held_out[label] for label in compared]),
            "chance": 1 / len(names),
            "per_class": {names[label]: rows.mean().item() for label, rows in generated.items()},
        }


class Classifier(nn.Module):
    """Four convolutions with group norm, then global average pooling; for images of 8 x 8 or larger."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels_in, channels_out, stride in (
            (in_channels, width, 1),
            (width, width, 2),
            (width, 2 * width, 1),
            (2 * width, 2 * width, 2),
        ):
            layers += [
                nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1),
                nn.GroupNorm(8, channels_out),
                nn.SiLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1] -> logits (B, num_classes)."""
        return self.head(self.features(images).mean((2, 3)))


def train_classifier(
    images: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    epochs: int = 20,
    batch_size: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
    advance: Advance = lambda amount: None,
) -> Classifier:
    """Fit a classifier on images (N, C, H, W) and their labels (N,), with small random shifts.

    `advance` is called after each batch with its fraction of an epoch.
    """
    # The global generator keeps its state. Only the one of the CPU is used.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Classifier(in_channels=images.shape[1], num_classes=num_classes)
        steps = epochs * -(-len(images) // batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
        for _ in range(epochs):
            for rows in torch.randperm(len(images)).split(batch_size):
                shift = torch.randint(-1, 2, (2,)).tolist()
                batch = torch.roll(images[rows], shift, dims=(2, 3))
                loss = F.cross_entropy(model(batch), labels[rows], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                advance(epochs / steps)
    return model.eval()


@torch.no_grad()
def is_recognised(
    model: Classifier, images: Tensor, labels: Tensor, *, advance: Advance = lambda amount: None
) -> Tensor:
    """(N,) float64: 1 for each image (N, C, H, W) whose label (N,) the classifier predicts, else 0."""
    predictions = []
    for batch in images.split(256):
        predictions.append(model(batch).argmax(1))
        advance(len(batch))
    return (torch.cat(predictions) == labels).double()


def class_mean(correct: list[Tensor], *, with_halves: bool = False) -> Figure:
    """The mean of the means of each class, NaN of no class.

    Args:
        correct: 0 or 1 for each image (N,) of each class.
        with_halves: also of every second image from the first and from the second on, if each class has two.
    """

    def mean(classes: list[Tensor]) -> float:
        return statistics.fmean(rows.mean().item() for rows in classes) if classes else math.nan

    halves = None
    if with_halves and all(len(rows) > 1 for rows in correct):
        halves = (mean([rows[0::2] for rows in correct]), mean([rows[1::2] for rows in correct]))
    return Figure(mean(correct), sum(map(len, correct)), halves)
