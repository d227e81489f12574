# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The two datasets of every installation."""

from __future__ import annotations

import torch

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset


def test_digits_are_all_there_once() -> None:
    train, validation = (build_dataset(Dataset(), split=split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1498, 299)
    rows = [dataset[i]["sample"].flatten() for dataset in (train, validation) for i in range(len(dataset))]
    assert len({tuple(row.tolist()) for row in rows}) == 1797
    assert not train.horizontal_flip


def test_every_digit_is_in_both_splits() -> None:
    for split in ("train", "validation"):
        dataset = build_dataset(Dataset(), split=split)
        assert {dataset[i]["class_label"] for i in range(len(dataset))} == set(range(10))


def test_dummy_is_standard_normal_of_any_shape() -> None:
    dummy = build_dataset(Dataset(dataset_name="dummy", image_size=[48, 64]), split="train", input_channels=16)
    sample = dummy[0]["sample"]
    assert tuple(sample.shape) == (16, 48, 64)
    assert abs(sample.mean()) < 0.02
    assert abs(sample.std() - 1) < 0.02


def test_dummy_defaults_are_latents_of_1000_classes() -> None:
    dummy = build_dataset(Dataset(dataset_name="dummy"), split="train")
    assert dummy.sample_shape == (4, 32, 32)
    assert len(dummy.class_names) == 1000
    assert len(dummy) == 10000
    assert len({dummy[i]["class_label"] for i in range(50)}) > 30


def test_dummy_items_depend_on_nothing_but_split_and_index() -> None:
    config = Dataset(dataset_name="dummy")
    first, second = build_dataset(config, split="train"), build_dataset(config, split="train")
    second[0]
    assert torch.equal(first[7]["sample"], second[7]["sample"])
    assert first[7]["class_label"] == second[7]["class_label"]
    assert not torch.equal(first[7]["sample"], first[8]["sample"])
    assert not torch.equal(first[7]["sample"], build_dataset(config, split="validation")[7]["sample"])


def test_dummy_zeros_keep_their_labels() -> None:
    config = Dataset(dataset_name="dummy", dummy_fill="zeros")
    zeros, normal = build_dataset(config, split="train"), build_dataset(Dataset(dataset_name="dummy"), split="train")
    assert zeros[3]["sample"].abs().max() == 0
    assert zeros[3]["class_label"] == normal[3]["class_label"]


def test_dummy_without_classes_has_no_label() -> None:
    assert set(build_dataset(Dataset(dataset_name="dummy", num_classes=0), split="train")[0]) == {"sample"}


def test_dummy_takes_the_place_of_a_dataset_with_a_folder() -> None:
    assert len(build_dataset(Dataset(dataset_name="dummy", root_dir="/nowhere"), split="train")) == 10000
