# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Folders of images: classes, splits, held-out images, and errors of invalid folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_files import greys
from PIL import Image

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.datasets.file_check import damage_of
from torchditan.errors import ConfigError


def write_image(path: Path, grey: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (grey,) * 3).save(path)


def open_folder(root: Path, split: Any = "train", name: str = "folder", **options: Any) -> Any:
    return build_dataset(Dataset(dataset_name=name, root_dir=str(root), image_size=[4], **options), split=split)


def test_subfolders_are_classes_in_sorted_order_and_labels_belong_to_their_images(tmp_path: Path) -> None:
    names = ["dog/a.png", "cat/b.JPG", "cat/deep/c.webp", "eel/.hidden.png", "eel/d.bmp"]
    for grey, name in enumerate(names):
        write_image(tmp_path / name, 40 * grey)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    train, validation = open_folder(tmp_path), open_folder(tmp_path, "validation")
    assert train.class_names == validation.class_names == ["cat", "dog", "eel"]
    found = {
        grey: dataset[i]["class_label"] for dataset in (train, validation) for i, grey in enumerate(greys(dataset))
    }
    assert found == {0: 1, 40: 0, 80: 0, 160: 2}
    assert train.horizontal_flip


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for index in range(5):
        write_image(tmp_path / f"{index}.png", 10 * index)
    dataset = open_folder(tmp_path)
    assert dataset.class_names == []
    assert set(dataset[0]) == {"sample"}


def test_two_percent_are_held_out_wherever_the_folder_is(tmp_path: Path) -> None:
    for place in ("here", "there"):
        for index in range(150):
            write_image(tmp_path / place / f"{index:03}.png", index)
    train, validation = (greys(open_folder(tmp_path / "here", split)) for split in ("train", "validation"))
    assert len(validation) == 3 and sorted(train + validation) == list(range(150))
    assert greys(open_folder(tmp_path / "there", "validation")) == validation


def test_labels_of_held_out_images_are_numbered_as_in_training(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "a" / "1.png", 1)
    write_image(tmp_path / "train" / "b" / "2.png", 2)
    write_image(tmp_path / "val" / "b" / "3.png", 3)
    validation = open_folder(tmp_path, "validation")
    assert greys(validation) == [3] and validation[0]["class_label"] == 1  # `a` is missing here


def test_grey_is_made_where_the_model_asks_for_one_channel(tmp_path: Path) -> None:
    write_image(tmp_path / "1.png", 128)
    config = Dataset(dataset_name="folder", root_dir=str(tmp_path), image_size=[4, 8])
    dataset = build_dataset(config, split="train", input_channels=1)
    assert tuple(dataset[0]["sample"].shape) == (1, 4, 8)
    with pytest.raises(ConfigError, match=r"model.input_channels = 16: folder .*3 \(colour\) .*1 \(grey\)"):
        build_dataset(config, split="train", input_channels=16)


FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF"]


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_file_without_its_end_is_found_and_one_with_more_is_whole(image_format: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    Image.effect_noise((64, 64), 50).save(file, image_format)
    data = file.read_bytes()
    for content in (data, data + b"what a camera appends" * 9):
        file.write_bytes(content)
        assert damage_of(str(file)) is None
    file.write_bytes(b"")
    assert damage_of(str(file)) == "unknown format"
    file.write_bytes(data[: len(data) // 2])
    assert (damage_of(str(file)) is None) == (image_format in ("BMP", "PPM", "TIFF"))  # without an end marker
    file.unlink()
    assert damage_of(str(file)) == "No such file or directory"


def refuse(message: str, root: Path | None, *, split: Any = "train", **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_dataset(Dataset(root_dir=root and str(root), **options), split=split)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["folder", "imagenet", "cifar10"])
def test_a_missing_folder_is_refused(tmp_path: Path, name: str) -> None:
    refuse(f"dataset.root_dir = none: {name} needs a folder", None, dataset_name=name)
    refuse(f'dataset.root_dir = ".*gone": does not exist; {name} needs', tmp_path / "gone", dataset_name=name)


def test_what_a_folder_cannot_be_is_refused(tmp_path: Path) -> None:
    refuse("dataset.root_dir = .*: .*train images", tmp_path, dataset_name="folder")
    write_image(tmp_path / "1.png")
    refuse("dataset.root_dir = .*: .*validation images", tmp_path, split="validation", dataset_name="folder")
    refuse("is a file; folder needs a folder", tmp_path / "1.png", dataset_name="folder")
    refuse("num_classes = 3: folder .*labels", tmp_path, dataset_name="folder", num_classes=3)
    refuse('dataset.hub_name = "a/b": folder', tmp_path, dataset_name="folder", hub_name="a/b")
    write_image(tmp_path / "a" / "2.png")
    refuse(r"1\.png .*in .*folder .*training class \(a, \.\.\.\)", tmp_path, dataset_name="folder")


def test_a_link_to_a_folder_is_followed_unless_it_leads_back(tmp_path: Path) -> None:
    write_image(tmp_path / "images/a/1.png", 1)
    write_image(tmp_path / "elsewhere/2.png", 2)
    (tmp_path / "images/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images/c").symlink_to(tmp_path / "elsewhere")
    dataset = open_folder(tmp_path / "images")
    assert dataset.class_names == ["a", "b", "c"]
    assert greys(dataset) + greys(open_folder(tmp_path / "images", "validation")) in ([1, 2, 2], [2, 2, 1], [2, 1, 2])
    for target, named in ((tmp_path, "loop"), (tmp_path / "images", "loop"), (tmp_path / "elsewhere", "b/loop")):
        link = tmp_path / "images" / named
        link.symlink_to(target)
        message = rf"{named} is a link to {target.resolve()}, .*contains it; remove"
        refuse(message, tmp_path / "images", dataset_name="folder")
        refuse(message, tmp_path / "images", dataset_name="captions", image_size=[8])
        link.unlink()


def test_imagenet_is_a_tree_with_train_and_val(tmp_path: Path) -> None:
    refuse("train/", tmp_path, dataset_name="imagenet")
    write_image(tmp_path / "train" / "1.png")
    refuse("train/ .*subfolder per class", tmp_path, dataset_name="imagenet")
    (tmp_path / "train" / "1.png").unlink()
    write_image(tmp_path / "train" / "n01" / "1.JPEG", 50)
    write_image(tmp_path / "train" / "n02" / "1.JPEG", 60)
    write_image(tmp_path / "val" / "n02" / "1.JPEG", 70)
    train, validation = (open_folder(tmp_path, split, name="imagenet") for split in ("train", "validation"))
    assert train.class_names == ["n01", "n02"]
    assert (greys(train), greys(validation)) == ([50, 60], [70])
    config = Dataset(dataset_name="imagenet", root_dir=str(tmp_path))
    assert tuple(build_dataset(config, split="train")[0]["sample"].shape) == (3, 256, 256)
    write_image(tmp_path / "val" / "flat.JPEG")
    refuse(r"flat\.JPEG .*in .*folder .*training class", tmp_path, split="validation", dataset_name="imagenet")


@pytest.mark.parametrize("name", ["folder", "imagenet"])
def test_the_crop_and_the_number_of_the_image_reach_the_decoder(tmp_path: Path, name: str) -> None:
    ramp = Image.new("RGB", (40, 4))
    ramp.putdata([(x, x, x) for _ in range(4) for x in range(40)])
    for split in ("train", "val"):
        for number in range(30):
            path = tmp_path / split / "a" / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            ramp.save(path)
    assert set(greys(open_folder(tmp_path, name=name))) == {18}
    lefts = greys(open_folder(tmp_path, name=name, crop="random"))
    assert len(set(lefts)) > 10 and lefts == greys(open_folder(tmp_path, name=name, crop="random"))
