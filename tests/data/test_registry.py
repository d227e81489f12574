# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The contract of every dataset, and the errors of the registry for options without effect."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import (
    Batch,
    CorruptImageError,
    ImageDataset,
    read_image,
)
from torchditan.data_stream.loader import TrainingStream
from torchditan.data_stream.order import BatchPlan
from torchditan.datasets import DATASETS, build_dataset
from torchditan.errors import ConfigError


def refuse(message: str, *, input_channels: int | None = None, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_dataset(Dataset(**options), split="train", input_channels=input_channels)
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list() -> None:
    refuse(
        f'"digit": must be one of {", ".join(DATASETS)}, or module:name; did you mean digits\\?', dataset_name="digit"
    )


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"dataset.image_size = \[48\]: must be 32 or 64", {"dataset_name": "scenes", "image_size": [48]}),
        (r"dataset.image_size = \[48\]: must be 32 or 64", {"dataset_name": "earth", "image_size": [48]}),
        ("dataset.num_classes = 3: scenes has no labels", {"dataset_name": "scenes", "num_classes": 3}),
        ("dataset.streaming = true: digits is not a SequentialDataset; must be false", {"streaming": True}),
        (r"dataset.image_size = \[32\]: digits is 8 x 8", {"image_size": [32]}),
        ("dataset.num_classes = 9: digits has 10", {"num_classes": 9}),
        ('dataset.root_dir = "x": digits does not read it', {"root_dir": "x"}),
        ('dataset.hub_name = "x": digits does not read it', {"hub_name": "x"}),
        ('dataset.crop = "adm": digits does not read it; leave it out', {"crop": "adm"}),
    ],
)
def test_what_a_dataset_cannot_be_is_refused(message: str, options: dict[str, Any]) -> None:
    refuse(message, **options)


def batch_of(dataset: Any) -> Batch:
    """The first batch of the training stream, as the trainer reads it."""
    stream = TrainingStream(
        dataset,
        plan=BatchPlan(batch_size=2, global_batch_size=2),
        seed=0,
        num_classes=len(dataset.class_names),
        horizontal_flip=None,
        corrupt_images="error",
        num_workers=0,
        pin_memory=False,
    )
    return next(iter(stream.batches(0)))[0]


def test_no_classes_means_no_labels() -> None:
    labelled = build_dataset(Dataset(), split="train")
    bare = build_dataset(Dataset(num_classes=0), split="train")
    assert bare.class_names == []
    assert len(bare) == len(labelled)
    assert set(batch_of(labelled)) - set(batch_of(bare)) == {"class_label"}
    assert set(read_image(bare, 3, num_classes=0, corrupt_images="error")) == {"sample", "place", "skipped"}
    assert torch.equal(bare[3]["sample"], labelled[3]["sample"])


def test_more_classes_than_the_dataset_has_are_named() -> None:
    names = build_dataset(Dataset(num_classes=13), split="train").class_names
    assert names[9:] == ["9", "class 10", "class 11", "class 12"]


class Mine(ImageDataset):
    """What a user wrote."""

    name = "mine"
    sample_shape = (3, 4, 4)
    horizontal_flip = False

    def __init__(self, *, num: int, class_names: list[str], labels: list[int] | None = None) -> None:
        self.num = num
        self.class_names = class_names
        if labels is not None:
            self.class_labels = np.array(labels)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample": torch.zeros(self.sample_shape), "class_label": 0}


def test_one_line_adds_a_dataset_and_it_is_checked_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(dataset: Mine) -> None:
        monkeypatch.setitem(DATASETS, "mine", lambda config, *, split, input_channels: dataset)

    register(Mine(num=2, class_names=[]))
    assert len(build_dataset(Dataset(dataset_name="mine"), split="train")) == 2
    refuse("num_classes = 5: mine .*labels", dataset_name="mine", num_classes=5)
    register(Mine(num=0, class_names=[]))
    refuse('"mine": .*train images', dataset_name="mine")
    register(Mine(num=2, class_names=["a", "b"], labels=[0, 2]))
    refuse("labels .*mine range .*0 to 2; .*0 to 1, .*2 classes", dataset_name="mine")
    register(Mine(num=2, class_names=["a", "b"], labels=[-1, 1]))
    refuse("labels .*mine range .*-1", dataset_name="mine")


def test_a_dataset_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flowers(ImageDataset):
        name, class_names, horizontal_flip = "flowers", (), False
        __len__ = __getitem__ = None

    for flowers, lacks in ((Flowers(), "has no sample_shape"), (object(), "must inherit from ImageDataset")):
        monkeypatch.setitem(DATASETS, "mine", lambda config, *, split, input_channels, it=flowers: it)
        refuse(rf'dataset.dataset_name = "mine": its class \w+ {lacks}.*; see docs/extending.md$', dataset_name="mine")


RAMP = torch.linspace(-1, 1, 48).view(3, 4, 4)
BYTES = (RAMP * 127.5 + 127.5).round()


@pytest.mark.parametrize(
    ("item", "found"),
    [
        ({"sample": BYTES.byte(), "class_label": 0}, r"torch.Tensor uint8 \(3, 4, 4\), from 0 to 255"),
        ({"sample": BYTES, "class_label": 0}, r"torch.Tensor float32 \(3, 4, 4\), from 0 to 255"),
        ({"sample": RAMP.numpy(), "class_label": 0}, r"numpy.ndarray float32 \(3, 4, 4\)"),
        ({"sample": RAMP / RAMP.abs().round(), "class_label": 0}, "not finite"),
        ({"sample": RAMP}, "no class_label; must be an integer, 0 to 1"),
        ({"sample": RAMP, "class_label": 2}, "class_label 2; must be an integer, 0 to 1"),
        ((RAMP, 0), "a tuple; must be a dict"),
    ],
)
def test_a_dataset_whose_first_item_breaks_the_contract_is_refused(
    item: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = [item]
    mine: Any = type("Theirs", (Mine,), {"__getitem__": lambda self, index: given[0]})
    monkeypatch.setitem(DATASETS, "mine", lambda config, **options: mine(num=2, class_names=["a", "b"]))
    refuse(f'dataset.dataset_name = "mine": .*first item.* {found}', dataset_name="mine")
    given[0] = {"sample": RAMP, "class_label": np.int64(1)}
    assert len(build_dataset(Dataset(dataset_name="mine"), split="train")) == 2


def test_the_first_item_may_be_latents_of_one_of_several_shapes_or_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Latents(Mine):
        sample_shape = (4, 2, 3)

        def groups(self) -> list[np.ndarray]:
            return [np.array([0]), np.array([1])]

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"sample": torch.full((4, 3, 2), 7.0)}

    class Unreadable(Mine):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise CorruptImageError("a.png: not a readable image")

    for kind in (Latents, Unreadable):
        monkeypatch.setitem(DATASETS, "mine", lambda config, kind=kind, **options: kind(num=2, class_names=[]))
        assert len(build_dataset(Dataset(dataset_name="mine"), split="train")) == 2


@pytest.mark.parametrize(("low", "num_lines"), [(0.0, 1), (-1.0, 0)])
def test_samples_that_may_be_in_0_to_1_get_a_line(
    low: float, num_lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bright pictures are accepted: the last sample has negative values."""

    class Bright(Mine):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"sample": torch.linspace(low if index == self.num - 1 else 0, 1, 48).view(3, 4, 4)}

    monkeypatch.setitem(DATASETS, "mine", lambda config, **options: Bright(num=3, class_names=[]))
    build_dataset(Dataset(dataset_name="mine"), split="train")
    assert capsys.readouterr().err.count("note: ") == num_lines


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuse(re.escape("pip install 'torchditan[hub]'"), dataset_name="imagenet_hub")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse(re.escape("pip install 'torchditan[earth]'"), dataset_name="earth")
