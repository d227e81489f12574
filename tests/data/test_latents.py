# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The dataset of latents: splits, normalisation, whole batches, and refused folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import BatchedDataset, ImageDataset
from torchditan.data_stream.latent_shards import to_sample
from torchditan.datasets import build_dataset
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders.haar import HaarAutoencoder
from torchditan.extras.latents.encoding import describe_encoding
from torchditan.extras.latents.writer import LatentWriter, Shard

NUM = {"train": 9, "validation": 5}


def latents_of(split: str, *, flipped: bool = False) -> torch.Tensor:
    """(N, 12, 2, 3) in bf16; the splits have other means."""
    draws = torch.Generator().manual_seed(len(split) + flipped)
    mean = 2.0 if split == "train" else -1.0
    return (torch.randn(NUM[split], 12, 2, 3, generator=draws) * 3 + mean).bfloat16()


class Photos(ImageDataset):
    """What the latents pretend to come from."""

    name = "photos"
    sample_shape = (3, 4, 6)
    horizontal_flip = True

    def __init__(self, length: int, class_names: list[str]) -> None:
        self.length = length
        self.class_names = class_names

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("no image is read")


def write_split(folder: Path, split: str, *, flipped: bool, **changes: Any) -> None:
    class_names = ["cat", "dog", "eel"]
    encoding = describe_encoding(
        Photos(NUM[split], class_names),
        HaarAutoencoder(downsampling=2, image_channels=3, device=torch.device("cpu")),
        split=split,
        crop="center",
        dtype="bf16",
        flipped=flipped,
        posterior=False,
        shard_size=4,
    )
    writer = LatentWriter(folder, dataclasses.replace(encoding, **changes))
    writer.open()
    for number in range(writer.num_shards):
        rows = torch.arange(4 * number, min(4 * number + 4, NUM[split]))
        tensors = {"latents": latents_of(split)[rows], "labels": rows % 3, "index": rows}
        if flipped:
            tensors["latents_flipped"] = latents_of(split, flipped=True)[rows]
        writer.write(number, Shard(tensors, ()))
    writer.finalise()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    write_split(folder / "train", "train", flipped=True)
    write_split(folder / "validation", "validation", flipped=False)
    return folder


def open_latents(root: Path | None, split: Any = "train", *, name: str = "latents", **options: Any) -> Any:
    config = Dataset(dataset_name=name, root_dir=None if root is None else str(root), **options)
    return build_dataset(config, split=split)


def refuse(message: str, root: Path | None, split: Any = "train", **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        open_latents(root, split, **options)
    assert "\n" not in str(error.value)


def normalised(latents: torch.Tensor) -> torch.Tensor:
    """By the mean and standard deviation of all training latents, mirrored ones included."""
    train = torch.cat([latents_of("train"), latents_of("train", flipped=True)]).double().transpose(0, 1).flatten(1)
    shift, std = train.mean(1), train.std(1, correction=0)
    return ((latents.double() - shift[:, None, None]) / std[:, None, None]).float()


def test_items_are_normalised_latents_with_their_labels(root: Path) -> None:
    dataset = open_latents(root)
    assert (len(dataset), dataset.sample_shape, dataset.name) == (9, (12, 2, 3), "latents")
    assert dataset.class_names == ["cat", "dog", "eel"]
    assert dataset.horizontal_flip
    for index in range(9):
        item = dataset[index]
        assert set(item) == {"sample", "class_label"}
        assert item["sample"].dtype == torch.float32 and item["class_label"] == index % 3
        torch.testing.assert_close(item["sample"], normalised(latents_of("train"))[index])


def test_held_out_latents_are_normalised_like_the_training_latents(root: Path) -> None:
    dataset = open_latents(root, "validation")
    assert len(dataset) == 5 and not dataset.horizontal_flip
    torch.testing.assert_close(dataset[3]["sample"], normalised(latents_of("validation"))[3])
    assert dataset.index.shift == open_latents(root).index.shift
    assert dataset.index.split == "validation"


def test_a_batch_is_the_stored_rows_with_the_mirrored_pair_where_asked(root: Path) -> None:
    dataset = open_latents(root)
    assert isinstance(dataset, BatchedDataset)
    indices, flips = np.array([7, 0, 7]), np.array([True, False, False])
    batch = dataset.read_batch(indices, flips)
    assert set(batch) == {"latent", "class_label"}
    expected = torch.stack([latents_of("train", flipped=True)[7], latents_of("train")[0], latents_of("train")[7]])
    assert torch.equal(batch["latent"], expected)
    assert batch["class_label"].dtype == torch.int64 and batch["class_label"].tolist() == [1, 0, 1]
    index = dataset.index
    sample = to_sample(batch, shift=torch.tensor(index.shift), scale=torch.tensor(index.scale))
    torch.testing.assert_close(sample, normalised(expected))


def test_a_folder_may_be_one_split_alone(root: Path) -> None:
    assert len(open_latents(root / "train")) == 9
    refuse("has no validation latents; encode them with --split validation", root / "train", "validation")


def test_what_latents_cannot_be_is_refused(root: Path, tmp_path: Path) -> None:
    refuse(r"dataset.image_size = \[32, 32\]: latents is 2 x 3; leave it out", root, image_size=[32, 32])
    refuse('dataset.hub_name = "x": latents does not read it', root, hub_name="x")
    refuse("dataset.num_classes = 2: latents has 3 classes", root, num_classes=2)
    refuse("dataset.root_dir = none: latents .*folder .*torchditan encode wrote", None)
    refuse("does not exist; latents needs a folder", root / "gone")
    refuse("holds no latents", tmp_path)
    write_split(tmp_path / "pairs/train", "train", flipped=False)
    assert not open_latents(tmp_path / "pairs").horizontal_flip
    message = "dataset.horizontal_flip = true: .*latents .*mirrored images; encode them without --no_flip"
    refuse(message, tmp_path / "pairs", horizontal_flip=True)
    for name, value in (("fingerprint", "haar-2-9"), ("class_names", ("cat", "eel"))):
        folder = shutil.copytree(root, tmp_path / name)
        shutil.rmtree(folder / "validation")
        write_split(folder / "validation", "validation", flipped=False, **{name: value})
        refuse(f"its {name} differs from that of the training latents", folder, "validation")
    path = shutil.copytree(root, tmp_path / "labels") / "train" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"class_names": ["cat", "dog"]}))
    refuse("labels .*latents range .*0 to 2; .*0 to 1, .*2 classes", tmp_path / "labels")
    path.rename(path.with_name("encoding.json"))
    refuse('train": .*encoding .*finished; rerun', tmp_path / "labels")


def write_public(path: Path, labels: list[int]) -> torch.Tensor:
    latents = torch.randint(-90, 90, (len(labels), 16, 2, 2), dtype=torch.int8)
    save_file({"latents": latents, "labels": torch.tensor(labels).short()}, path)
    return latents


def test_without_a_place_the_public_file_in_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse("dataset.root_dir = none: .*imagenet_ci8x8.safetensors.*--dataset.dataset_name dummy", None)
    latents = write_public(tmp_path / "imagenet_ci8x8.safetensors", [0, 2, 1, 2])
    held_out = write_public(tmp_path / "imagenet_ci8x8_val.safetensors", [1, 0])
    for root in (None, tmp_path, tmp_path / "imagenet_ci8x8.safetensors"):
        dataset = open_latents(root)
        assert (len(dataset), dataset.sample_shape, dataset.horizontal_flip) == (4, (16, 2, 2), False)
        assert dataset.class_names == ["class 0", "class 1", "class 2"]
        assert dataset[1]["class_label"] == 2
        shift, scale = (torch.tensor(values)[:, None, None] for values in (dataset.index.shift, dataset.index.scale))
        torch.testing.assert_close(dataset[1]["sample"], (latents[1] * (16 / 255) - shift) * scale)
        validation = open_latents(root, "validation")
        torch.testing.assert_close(validation[0]["sample"], (held_out[0] * (16 / 255) - shift) * scale)
    (tmp_path / "imagenet_ci8x8_val.safetensors").unlink()
    refuse("has no validation latents", tmp_path, "validation")
