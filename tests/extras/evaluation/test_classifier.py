# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `classifier`: what it compares and refuses, and the random numbers that it takes."""

from __future__ import annotations

import math

import pytest
import torch
from refusals import refused

from torchditan.extras.evaluation.classifier import ClassifierAccuracy, train_classifier
from torchditan.extras.evaluation.metric import Evaluation, Figure, Pictures, Source


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


def shades(counts: dict[int, int], source: Source) -> Pictures:
    """Noise of 8 x 8 pixels: dark for class 0, and bright for 1 and 2, which is rare and so is taken for 1."""
    labels = torch.tensor([label for label, count in counts.items() for _ in range(count)])
    noise = torch.randint(-60, 61, (len(labels), 1, 8, 8), generator=torch.Generator().manual_seed(0))
    images = (labels.clamp(max=1).view(-1, 1, 1, 1) * 80 + 60 + noise).clamp(0, 255).to(torch.uint8)
    return Pictures(images, labels, torch.arange(len(labels)), source)


def accuracies(*pictures: Pictures) -> tuple[Figure, Figure, dict[str, float]]:
    metric = ClassifierAccuracy(Evaluation(["dark", "bright", "rare"], seed=0, epochs=4))
    metric.update(shades({0: 60, 1: 60, 2: 6}, "train"))
    for batch in pictures:
        metric.update(batch)
    found = metric.compute()
    return found["accuracy_generated"], found["accuracy_held_out_real"], found["per_class"]


def test_the_same_images_have_one_accuracy_as_samples_and_as_held_out_images() -> None:
    few = {0: 30, 1: 20, 2: 2}
    generated, held_out, per_class = accuracies(shades(few, "generated"), shades(few, "held_out"))
    assert generated.value == held_out.value == pytest.approx(sum(per_class.values()) / 3)
    assert generated.value < 0.8, "a mean over images is 50 / 52"


def test_accuracies_are_of_the_classes_that_both_have() -> None:
    both = shades({0: 30, 1: 20}, "generated")
    expected = accuracies(both, shades({0: 30, 1: 20}, "held_out"))
    more = accuracies(shades({0: 30, 1: 20, 2: 9}, "generated"), shades({0: 30, 1: 20}, "held_out"))
    assert more[:2] == expected[:2] and list(more[2]) == ["dark", "bright", "rare"]
    assert accuracies(both, shades({0: 30, 1: 20, 2: 9}, "held_out"))[:2] == expected[:2]
    assert all(math.isnan(one.value) for one in accuracies(both, shades({2: 5}, "held_out"))[:2])
