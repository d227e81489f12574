# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `classifier`: what it refuses, and the random numbers that it takes."""

from __future__ import annotations

import pytest
import torch
from refusals import refused

from torchditan.evaluation.classifier import ClassifierAccuracy, train_classifier
from torchditan.evaluation.metric import Evaluation, Source


@pytest.mark.parametrize("missing", ["train", "held_out"])
def test_a_dataset_without_training_or_held_out_images_is_one_line(missing: Source) -> None:
    metric = ClassifierAccuracy(Evaluation(["a", "b"], seed=0))
    counts: dict[Source, int] = {"train": 5, "held_out": 5, "generated": 5}
    metric.check(counts, image_size=(8, 8))
    name = {"train": "training images", "held_out": "held-out images"}[missing]
    with refused("metric classifier: needs", name, "has none"):
        metric.check({**counts, missing: 0}, image_size=(8, 8))


def test_training_a_classifier_leaves_the_global_generator_as_it_was() -> None:
    images, labels = torch.linspace(-1, 1, 8 * 64).view(8, 1, 8, 8), torch.arange(8) % 2
    torch.manual_seed(7)
    expected = torch.rand(3)
    weights = []
    for seed_before in (7, 8):
        torch.manual_seed(seed_before)
        classifier = train_classifier(images, labels, num_classes=2, epochs=1, seed=3)
        weights.append(classifier.head.weight)
        if seed_before == 7:
            assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*weights)
