# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The two datasets of every installation."""

from __future__ import annotations

from typing import Any

import torch

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset


def test_digits_are_all_there_once_and_every_digit_is_in_both_splits() -> None:
    datasets = [build_dataset(Dataset(), split="train"), build_dataset(Dataset(), split="validation")]
    assert [len(dataset) for dataset in datasets] == [1498, 299]
    rows = [dataset[i]["sample"].flatten() for dataset in datasets for i in range(len(dataset))]
    assert len({tuple(row.tolist()) for row in rows}) == 1797
    assert all({dataset[i]["class_label"] for i in range(len(dataset))} == set(range(10)) for dataset in datasets)
    assert not datasets[0].horizontal_flip


def dummy(split: Any = "train", *, input_channels: int | None = None, **options: Any) -> Any:
    config = Dataset(dataset_name="dummy", root_dir="/nowhere", **options)  # it replaces a dataset with a folder
    return build_dataset(config, split=split, input_channels=input_channels)


def test_dummy_is_standard_normal_of_any_shape_by_default_latents_of_1000_classes() -> None:
    sample = dummy(image_size=[48, 64], input_channels=16)[0]["sample"]
    assert tuple(sample.shape) == (16, 48, 64)
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 1) < 0.02
    latents = dummy()
    assert (latents.sample_shape, len(latents.class_names), len(latents)) == ((4, 32, 32), 1000, 10000)
    assert len({latents[i]["class_label"] for i in range(50)}) > 30
    assert set(dummy(num_classes=0)[0]) == {"sample"}


def test_dummy_items_depend_on_nothing_but_split_and_index() -> None:
    first, second, zeros = dummy(), dummy(), dummy(dummy_fill="zeros")
    second[0]
    assert torch.equal(first[7]["sample"], second[7]["sample"])
    assert first[7]["class_label"] == second[7]["class_label"] == zeros[7]["class_label"]
    assert not torch.equal(first[7]["sample"], first[8]["sample"])
    assert not torch.equal(first[7]["sample"], dummy("validation")[7]["sample"])
    assert zeros[3]["sample"].abs().max() == 0
