# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan pack`: any dataset as WebDataset shards, with the bytes of its files, continued after a kill."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused

from torchditan.config.loader import load_config
from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets import build_dataset

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript


def write_images(folder: Path, count: int = 12, *, suffix: str = ".jpg") -> dict[str, bytes]:
    """Images in the classes a, b and c; path -> bytes."""
    contents = {}
    for number in range(count):
        path = folder / "abc"[number % 3] / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((6, 6), 50 + number).convert("RGB").save(path)
        contents[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    return contents


def members_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Key -> suffix -> content, of all shards."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None and suffix not in samples.setdefault(key, {})
                samples[key][suffix] = file.read()
    return samples


def pack(run_script: RunScript, *flags: str) -> Outcome:
    outcome = run_script("torchditan", "pack", "out", *flags)
    assert outcome.code == 0, outcome.err
    return outcome


FOLDER = ("--dataset.dataset_name=folder", "--dataset.root_dir=photos", "--images_per_shard=5")


def open_packed(split: Any = "train", name: str = "webdataset", **options: Any) -> Any:
    return build_dataset(Dataset(dataset_name=name, root_dir="out", image_size=[6], **options), split=split)


def open_captions(root: str) -> Any:
    return build_dataset(Dataset(dataset_name="captions", root_dir=root, image_size=[6]), split="train")


def test_a_folder_keeps_its_bytes_labels_and_split(run_script: RunScript) -> None:
    contents = write_images(Path("photos"))
    pack(run_script, *FOLDER)
    packed = [*members_of(Path("out/train")).values(), *members_of(Path("out/validation")).values()]
    expected = sorted(("abc".index(name[0]), data) for name, data in contents.items())
    assert sorted((int(sample["cls"]), sample["jpg"]) for sample in packed) == expected
    assert len(list(Path("out/train").glob("*.tar"))) == 3
    for split in ("train", "validation"):
        source: Any = build_dataset(Dataset(dataset_name="folder", root_dir="photos", image_size=[6]), split=split)  # type: ignore[arg-type]
        found = open_packed(split)
        assert found.class_names == source.class_names == ["a", "b", "c"]
        samples = {source[i]["sample"].numpy().tobytes(): source[i]["class_label"] for i in range(len(source))}
        assert {found[i]["sample"].numpy().tobytes(): found[i]["class_label"] for i in range(len(found))} == samples


def test_a_packing_that_was_killed_continues_with_the_same_bytes(run_script: RunScript) -> None:
    write_images(Path("photos"))
    pack(run_script, *FOLDER)
    shards = sorted(Path("out/train").glob("*.tar"))
    whole = [path.read_bytes() for path in shards]
    shards[1].unlink()
    (Path("out/train") / ".shard-000001.tar.host-1.partial").write_bytes(b"killed")
    os.utime(shards[0], ns=(1, 1))
    pack(run_script, *FOLDER)
    assert shards[0].stat().st_mtime_ns == 1
    assert [path.read_bytes() for path in shards] == whole
    assert not list(Path("out/train").glob(".*.partial"))


@pytest.mark.parametrize("is_damaged_inside", [False, True])
def test_unreadable_images_are_named_and_leave_no_part_of_a_shard_or_are_left_out(
    run_script: RunScript, is_damaged_inside: bool
) -> None:
    contents = write_images(Path("photos"), suffix=".png")
    name = sorted(contents)[0]
    pixels = contents[name].index(b"IDAT") + 4
    damaged = contents[name][:pixels] + bytes(20) + contents[name][pixels + 20 :] if is_damaged_inside else b"no image"
    Path("photos", name).write_bytes(damaged)
    outcome = run_script("torchditan", "pack", "out", *FOLDER)
    assert outcome.code == 2
    about = f"photos/{name}" if is_damaged_inside else "1 file cannot be read"
    assert_refused(outcome.err, about, ["--dataset.corrupt_images"])
    assert name in outcome.err and all(len(members) == 2 for members in members_of(Path("out/train")).values())
    for _ in range(2):  # also if nothing is left to do
        outcome = pack(run_script, *FOLDER, "--dataset.corrupt_images=skip")
        assert f"warning: 1 left out: photos/{name} (" in outcome.err
        assert f"complete, {len(members_of(Path('out/train'))):,} images" in outcome.out
    assert len(members_of(Path("out/train"))) + len(members_of(Path("out/validation"))) == len(contents) - 1


def test_an_image_that_is_shown_ten_times_is_packed_once(run_script: RunScript) -> None:
    folder = Path("photos/10_dog")
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (6, 6), (60 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a dog")
    assert len(open_captions("photos")) == 30
    outcome = run_script("torchditan", "pack", "out", "--dataset.dataset_name=captions", "--dataset.root_dir=photos")
    assert outcome.code == 0 and "repeats are left out" in outcome.err
    assert len(open_captions("out")) == 3, "of 30 copies, one would be held out"


def test_several_captions_and_their_weights_survive(run_script: RunScript) -> None:
    write_images(Path("photos"), 3, suffix=".png")
    rows = [
        {"file_name": "a/0.png", "text": ["a dog", "ein Hund"], "weights": [3, 1]},
        {"file_name": "b/1.png", "text": ["a cat", "eine Katze"]},
        {"file_name": "c/2.png", "text": "snow"},
    ]
    Path("photos/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pack(run_script, "--dataset.dataset_name=captions", "--dataset.root_dir=photos")
    found, expected = (
        {each.content_key(i): (each.caption_variants(i), each.caption_weights(i)) for i in range(3)}
        for each in (open_packed(name="captions"), open_captions("photos"))
    )
    assert len(found) == 3 and found == expected
    assert (["a dog", "ein Hund"], [0.75, 0.25]) in found.values()

    rows[0]["weights"] = [1, 1]
    Path("photos/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    other = run_script("torchditan", "pack", "out", "--dataset.dataset_name=captions", "--dataset.root_dir=photos")
    assert other.code == 2
    assert_refused(other.err, "out/train", ["identity"])


class Named(ImageDataset):
    """Grey pictures with classes, and with names as captions."""

    name = "named"
    horizontal_flip = False
    class_names: ClassVar[list[str]] = ["dark", "light"]
    class_labels = np.array([0, 1, 0])
    sample_shape = (1, 6, 6)
    fingerprint = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = torch.arange(36).view(1, 6, 6) * 7 / 127.5 - 1
        return {"sample": sample, "class_label": index % 2, "caption": self.caption_of(index)}

    def caption_of(self, index: int) -> str:
        return f"picture {index}"


def build_named(config: Dataset, *, split: str, input_channels: int | None = None) -> Named:
    return Named(3)


def build_endless(config: Dataset, *, split: str, input_channels: int | None = None) -> Named:
    return Named(2**32)


def test_a_dataset_of_classes_and_captions_keeps_both_and_drawn_images_become_pngs(run_script: RunScript) -> None:
    pack(run_script, f"--dataset.dataset_name={__name__}:build_named")
    packed = members_of(Path("out/train"))
    assert [packed[f"{i:09d}"]["txt"] for i in range(3)] == [b"picture 0", b"picture 1", b"picture 2"]
    assert [packed[f"{i:09d}"]["cls"] for i in range(3)] == [b"0", b"1", b"0"]
    with Image.open(io.BytesIO(packed["000000000"]["png"])) as image:
        assert list(image.tobytes()) == list(range(0, 252, 7))


def test_the_printed_command_mirrors_only_what_the_source_mirrors(run_script: RunScript) -> None:
    write_images(Path("photos"))
    for flags, flips in (((f"--dataset.dataset_name={__name__}:build_named",), False), (FOLDER, None)):
        _, _, command = pack(run_script, *flags).out.partition("train: torchditan train CONFIG ")
        config = load_config(command.split())
        assert (config.dataset.dataset_name, config.dataset.horizontal_flip) == ("webdataset", flips)
        shutil.rmtree("out")


MISTAKES: list[tuple[list[str], str, list[str]]] = [
    (["out", *FOLDER[:2], "--images_per_shard=6"], "out/train", ["images_per_shard", "5"]),
    (["out", *FOLDER[:1], "--dataset.root_dir=others", FOLDER[2]], "out/train", ["identity"]),
    (["photos/a", "--dataset.dataset_name=dummy"], 'dataset.dataset_name = "dummy"', ["pictures"]),
    (["mine", *FOLDER], "mine/train", ["other files"]),
    (["out", "--dataset.dataset_name=imagenet_hub", "--dataset.streaming"], "dataset.streaming = true", []),
    (["new", *FOLDER, "--images_per_shard=0"], "--images_per_shard", ["1"]),
    (["new", f"--dataset.dataset_name={__name__}:build_endless"], 'dataset.dataset_name = "named"',
     ["4,294,967,296 images", "without packing"]),
]  # fmt: skip


def test_mistakes(run_script: RunScript) -> None:
    write_images(Path("photos"))
    write_images(Path("others"), 14)
    pack(run_script, *FOLDER)
    Path("mine/train").mkdir(parents=True)
    Path("mine/train/notes.txt").write_text("mine")
    for flags, about, mentions in MISTAKES:
        outcome = run_script("torchditan", "pack", *flags)
        assert outcome.code == 2
        assert_refused(outcome.err, about, mentions)
    assert not Path("new").exists()
