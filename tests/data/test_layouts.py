# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Data as people have it, one small input per layout: splits by names, captions of many tools, several sources."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from made_files import Files, picture, tar, write
from made_files import greys as greys_in_order
from refusals import refused

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.datasets.images import HOW_TO_READ
from torchditan.datasets.splits import part_of, part_of_file


def parquet(*rows: Any, bare: bool = False) -> bytes:
    """Image number n is of grey n; its caption is row n."""
    pyarrow = pytest.importorskip("pyarrow")
    images: list[Any] = [picture(grey) if bare else {"bytes": picture(grey), "path": None} for grey in range(len(rows))]
    captions = rows if not isinstance(rows[0], pyarrow.Scalar) else pyarrow.array(rows).dictionary_encode()
    buffer = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"image": images, "text": captions}), buffer)
    return buffer.getvalue()


def pictures(*names: str, captions: bool = False) -> Files:
    """Image number n is of grey n."""
    files: Files = {name: picture(grey) for grey, name in enumerate(names)}
    return files | ({f"{name[:-4]}.txt": f"grey, {grey}" for grey, name in enumerate(names)} if captions else {})


def opened(root: Path, name: str, split: Any = "train", **options: Any) -> Any:
    return build_dataset(Dataset(dataset_name=name, root_dir=str(root), image_size=[4], **options), split=split)


def greys(dataset: Any) -> list[int]:
    return sorted(greys_in_order(dataset))


def test_names_of_splits() -> None:
    folders = {
        "train": ["train", "Training", "TRAIN", "train2017", "training_set", "train_images"],
        "validation": ["val", "valid", "Validation", "dev", "EVAL", "val2017", "validation_set"],
        "test": ["test", "Testing", "test_set", "test-2"],
        None: ["trains", "test tube", "evaluate", "my_train", "devices", "valley", "data"],
    }
    assert all(part_of(name) == part for part, names in folders.items() for name in names)
    files = {"ds-val-000.tar": "validation", "train-00000-of-00001.parquet": "train", "latest-000.tar": None}
    files |= {"test-run-train-000.tar": "train", "my_training_TEST.tar": "test"}
    assert {name: part_of_file(name) for name in files} == files


SPLIT_FOLDERS: list[tuple[str, str, str, str]] = [
    # images; those of training, those that are held out by their folder, and the classes
    ("train/cat/0 train/dog/0 valid/cat/0 test/cat/0", "train/cat/0 train/dog/0", "valid/cat/0", "cat dog"),
    ("Training/cat/0 Training/dog/0 Testing/cat/0", "Training/cat/0 Training/dog/0", "", "cat dog"),
    ("TRAIN/0 DEV/0 cover", "TRAIN/0", "DEV/0", ""),
    ("cat/train/0 cat/test/0 dog/train/0 dog/val/0", "cat/train/0 dog/train/0", "dog/val/0", "cat dog"),
    ("cat/0 dog/0 test/cat/0", "cat/0 dog/0", "", "cat dog"),
    ("cat/0 dog/0 test/0", "cat/0 dog/0", "", "cat dog"),
    ("Anna/0 Dev/0 Maria/0", "Anna/0 Dev/0 Maria/0", "", "Anna Dev Maria"),
    ("seg_train/seg_train/cat/0 seg_train/seg_train/dog/0 seg_test/seg_test/cat/0 seg_pred/0",
     "seg_train/seg_train/cat/0 seg_train/seg_train/dog/0", "", "cat dog"),
    ("training_set/training_set/cat/0 training_set/training_set/dog/0 validation_set/validation_set/cat/0",
     "training_set/training_set/cat/0 training_set/training_set/dog/0", "validation_set/validation_set/cat/0",
     "cat dog"),
    ("train/cat/0 train/test/0 test/cat/0 test/test/0", "train/cat/0 train/test/0", "", "cat test"),
    ("trainA/0 trainB/0 testA/0 testB/0", "trainA/0 trainB/0", "", ""),
    ("DIV2K_train_HR/0 DIV2K_valid_HR/0", "DIV2K_train_HR/0", "DIV2K_valid_HR/0", ""),
    ("train-clean-100/0 train-clean-360/0 dev-clean/0", "train-clean-100/0 train-clean-360/0", "dev-clean/0", ""),
    ("train/cat/0 train/dog/0 holdout/cat/0", "train/cat/0 train/dog/0", "holdout/cat/0", "cat dog"),
    ("dev_team/0 test_team/0 test_tube/0 train_track/0", "dev_team/0 test_team/0 test_tube/0 train_track/0", "",
     "dev_team test_team test_tube train_track"),
    ("bullet_train/0 plane/0", "bullet_train/0 plane/0", "", "bullet_train plane"),
    ("plane/0 train/0", "plane/0 train/0", "", "plane train"),
    ("train/cat/0 val/cat/0 scripts/x/0 __MACOSX/train/cat/0 train/@eaDir/0 train/cat/._0", "train/cat/0", "val/cat/0",
     "cat"),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "train", "validation", "classes"), SPLIT_FOLDERS)
def test_splits_of_a_folder(paths: str, train: str, validation: str, classes: str, tmp_path: Path) -> None:
    names = paths.split()
    write(tmp_path, {f"{name}.png": picture(grey) for grey, name in enumerate(names)})
    dataset = opened(tmp_path, "folder")
    found = {part: [path[:-4] for path in sizes] for part, sizes in dataset.file_sizes().items()}
    assert dataset.class_names == classes.split()
    if validation:
        assert found == {"train": train.split(), "validation": validation.split()}
        held_out = opened(tmp_path, "folder", "validation")
        assert greys(held_out) == sorted(map(names.index, validation.split()))
    else:
        assert sorted(found["train"] + found["validation"]) == train.split()


@pytest.mark.parametrize("names", [("ds-train-0", "ds-val-0", "ds-test-0"), ("Train/0", "Valid/0", "Testing/0")])
@pytest.mark.parametrize("kind", ["tar", "parquet", "pairs"])
def test_splits_of_captions(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    for part, name in enumerate(names):
        count = 3 - part
        pairs = pictures(*(f"{grey}.png" for grey in range(count)), captions=True)
        if kind == "tar":
            write(tmp_path, {f"{name}.tar": tar({**pairs, **{f"{grey}.cls": "0" for grey in range(count)}})})
        elif kind == "parquet":
            write(tmp_path, {f"{name}.parquet": parquet(*"abc"[:count])})
        else:
            write(tmp_path / (name.rpartition("/")[0] or name.split("-")[1]), pairs)
    for dataset in ("captions", "webdataset") if kind == "tar" else ("captions",):
        assert greys(opened(tmp_path, dataset)) == [0, 1, 2]
        assert greys(opened(tmp_path, dataset, "validation")) == [0, 1]


def test_splits_and_folders_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = {"train": "abc", "train_small": "a", "validation": "ab", "test": "a"}
    write(tmp_path / "hub", {f"data/{name}-00000-of-00001.parquet": parquet(*rows) for name, rows in names.items()})
    config = Dataset(dataset_name="captions", hub_name=str(tmp_path / "hub"), image_size=[4])
    train, held_out = (build_dataset(config, split=split) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert (greys(train), greys(held_out)) == ([0, 1, 2], [0, 1])
    for unread in ("test", "train_small"):
        assert any(unread in line and "not read" in line for line in train.reading), unread
    write(tmp_path / "lower", pictures("train/a/0.png", "train/b/1.png", "test/a/9.png"))
    config = Dataset(dataset_name="imagenet_hub", hub_name=str(tmp_path / "lower"), image_size=[4])
    dataset = build_dataset(config, split="train")
    assert greys(dataset) == [0, 1] and dataset.class_names == ["a", "b"]
    write(tmp_path / "upper", pictures("Train/a/0.png", "Test/a/9.png"))  # `datasets` takes both for one split
    with refused("dataset.hub_name", "Test/a/9.png"):
        build_dataset(dataclasses.replace(config, hub_name=str(tmp_path / "upper")), split="train")


PLAIN = pictures("0.png", "1.png")
PAIRS = pictures("0.png", "1.png", captions=True)
ROWS = [{"file_name": f"{n}.png", "text": f"grey, {n}"} for n in range(2)]
LINES = "\n\n".join(map(json.dumps, ROWS)) + "\n"
CSV = "file_name,text\r\n" + "".join(f'{n}.png,"grey, {n}"\r\n' for n in range(2))
NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
NOT_UTF8 = "caf\udce9"  # as Python reads a name in Latin-1
OTHER = tar({"9.png": picture(9), "9.txt": "other"})
THREE = pictures("0.png", "1.png", "2.png")
SEG = {"1/k.tag.png": picture(0), "1/k.txt": "grey, 0", "2/k.txt": "grey, 1", "2/k.png": picture(1)}


def metadata_parquet() -> bytes:
    buffer, pyarrow = io.BytesIO(), pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), buffer)
    return buffer.getvalue()


def categories() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return parquet(*[pyarrow.scalar(text) for text in ("grey, 0", "grey, 1", "grey, 0")])


# Files -> captions in the order of the images, whose greys are 0, 1, ...; options; and a line of the summary.
CAPTIONS: dict[str, tuple[Any, list[str], dict[str, Any], str]] = {
    "pairs": ({**PAIRS, "1.txt": "\ufeff grey,\n 1 ", ".hidden.txt": "no", ".git/x.png": b"no"}, [], {}, "2 of 2"),
    "webp below": ({"a.png": picture(0), "a.txt": "grey, 0", "b/c.webp": picture(1, suffix=".webp", lossless=True),
                    "b/c.txt": "grey, 1"}, [], {}, ""),
    "any script": ({"собака/猫🐶.png": picture(0), "собака/猫🐶.txt": "一只猫 🐶", "أحمر.png": picture(1),
                    "أحمر.txt": "grey, 1"}, ["一只猫 🐶", "grey, 1"], {}, ""),
    "not UTF-8": ({f"{NOT_UTF8}.png": picture(0), f"{NOT_UTF8}.txt": "café"}, ["café"], {}, ""),
    "caption": ({**PLAIN, "0.caption": "grey, 0", "1.txt": "grey, 1"}, [], {}, ""),
    "equal files": ({**PAIRS, "1.caption": "grey, 1"}, [], {}, ""),
    "json": ({**PLAIN, "0.json": '{"text": "grey, 0"}', "1.json": '\ufeff{"text": "grey, 1", "width": 4}'}, [], {}, ""),
    "jsonl": ({**PLAIN, "metadata.jsonl": LINES, "0.txt": "no"}, [], {}, ""),
    "jsonl in a split": ({**pictures("train/0.png", "train/1.png"), "train/metadata.jsonl": LINES}, [], {}, ""),
    "another key": ({**PLAIN, "metadata.jsonl": LINES.replace('"text"', '"prompt"')}, [], {"caption_key": "prompt"},
                    ""),
    "csv": ({**PLAIN, "metadata.csv": CSV}, [], {}, ""),
    "csv with a mark": ({**PLAIN, "metadata.csv": "\ufeff" + CSV}, [], {}, ""),
    "csv with repeats": ({**PLAIN, "metadata.csv": 'file_name,text,repeats\n0.png,"grey, 0",1\n1.png,"grey, 1",1\n'},
                         [], {}, ""),
    "csv of Windows": ({**pictures("deep/0.png", "deep/1.png"),
                        "metadata.csv": CSV.replace("\n0", "\ndeep\\0").replace("\n1", "\ndeep/1")}, [], {}, ""),
    "metadata.parquet": (lambda: {**PLAIN, "metadata.parquet": metadata_parquet()}, [], {}, ""),
    "NFD": ({f"{NFD}.png": picture(0), f"{NFC}.txt": "a cup"}, ["a cup"], {}, ""),
    "NFC in jsonl": ({f"{NFD}.png": picture(0), "metadata.jsonl": json.dumps({"file_name": f"{NFC}.png", "text": "a"})},
                     ["a"], {}, ""),
    "NFD in jsonl": ({f"{NFC}.png": picture(0), "metadata.jsonl": json.dumps({"file_name": f"{NFD}.png", "text": "a"})},
                     ["a"], {}, ""),
    "file names": ({"b.png": picture(0), "photos/a_red_cat.png": picture(1), "b.txt": "no"}, ["b", "a red cat"],
                   {"caption_from": "file_name"}, "1 .txt"),
    "trigger word": ({**PLAIN, "1.txt": "a"}, ["sks", "sks, a"], {"trigger_word": "sks"}, "1 of 2 images"),
    "tar": ({"0.tar": tar(SEG), "1.tar": tar({"x.jpg": picture(2, suffix=".jpg"), "x.txt": "x", "x.json": "{}"})},
            ["grey, 0", "grey, 1", "x"], {}, ""),
    "tar of captions and json": ({"0.tar": tar({**PLAIN, "0.caption": "grey, 0", "1.json": '{"text": "grey, 1"}'})},
                                 [], {}, ""),
    "txt before json": ({"0.tar": tar({**PAIRS, "0.json": '{"text": "no"}', "1.json": '{"other": "x"}'})}, [], {}, ""),
    "tar with a trigger word": ({"a.tar": tar({**PLAIN, "1.txt": "a"}), "notes.md": ""}, ["sks", "sks, a"],
                                {"trigger_word": "sks"}, "not read: 1 .md"),
    "parquet": (lambda: {"data/0.parquet": parquet("grey, 0", "grey, 1")}, [], {}, ""),
    "parquet of bytes": (lambda: {"0.parquet": parquet("grey, 0", "grey, 1", bare=True)}, [], {}, ""),
    "parquet of lists": (lambda: {"0.parquet": parquet(["a dog", "ein Hund"], ["一只猫"], None)},
                         ["sks, a dog", "sks, 一只猫", "sks"], {"trigger_word": "sks"}, ""),
    "parquet of pandas' categories": (lambda: {"0.parquet": categories()}, ["grey, 0", "grey, 1", "grey, 0"], {}, ""),
    "pairs before tars": ({**PAIRS, "backup.tar": OTHER}, [], {}, "1 .tar"),
    "pairs and an empty tar": ({**PAIRS, "empty.tar": tar({})}, [], {}, "1 .tar"),
    "pairs before parquet": ({**PAIRS, "00000.parquet": b"no image table"}, [], {}, "1 .parquet"),
    "pairs and others": ({**PAIRS, "x.cr2": b"", "y.CR2": b"", "notes.md": ""}, [], {}, "2 .cr2"),
    "tars before bare images": ({"preview.png": picture(1), "0.tar": tar({"0.png": picture(0), "0.txt": "a"}),
                                 "0.parquet": b"", "._0.tar": b"", ".x/1.tar": b""}, ["a"], {}, "1 .parquet, 1 .png"),
    "tars and a compressed one": ({"0.tar": tar(PAIRS), "1.tar.gz": b""}, [], {}, "1 .tar.gz"),
    "images for other readers": ({**PAIRS, "1.xyz": "", "2.xyz": "", "2.txt": "a"}, [], {}, "2 .xyz (pip install xyz)"),
    "members for other readers": ({"0.tar": tar({**PAIRS, "1.xyz": "", "2.xyz": "", "2.txt": "a"})}, [], {},
                                  "2 .xyz (pip install xyz)"),
}  # fmt: skip


@pytest.mark.parametrize("layout", CAPTIONS)
def test_captions(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOW_TO_READ, ".xyz", "pip install xyz")
    files, captions, options, line = CAPTIONS[layout]
    dataset = opened(write(tmp_path, files() if callable(files) else files), "captions", **options)
    assert dataset.captions == (captions or ["grey, 0", "grey, 1"])
    assert [dataset[i]["caption"] for i in range(len(dataset))] == dataset.captions
    assert greys_in_order(dataset) == list(range(len(dataset)))
    assert any(line in read for read in dataset.reading), dataset.reading


MANY = pictures(*(f"{n:02}.png" for n in range(20)), captions=True)
TEST_SHARD = {"ds-test-0.tar": tar({**PAIRS, "0.cls": "0", "1.cls": "0"})}
INSIDE = {
    "photos.tar": tar({**pictures("Train/0.png", captions=True), "./Test/2.png": picture(2), "./Test/2.txt": "a"})
}
# Datasets, files, options, and what the refusal names; {root} is the folder.
REFUSED: list[tuple[str, Files, dict[str, Any], list[str]]] = [
    ("folder", pictures("photos/train/cat/0.png", "photos/train/dog/0.png", "photos/test/cat/0.png"), {},
     ["{root}/photos"]),
    ("folder", {**pictures("images/train/0.png", "images/val/0.png"), "labels/train/0.txt": ""}, {}, ["{root}/images"]),
    ("folder", pictures("data/train/cat/0.png", "data/train/dog/0.png", "data/val/cat/0.png", "more/0.png"), {},
     ["{root}/data"]),
    ("folder", pictures("test/cat/0.png", "test/dog/0.png"), {}, ["test/cat/0.png"]),
    ("captions webdataset", TEST_SHARD, {}, ["ds-test-0.tar"]),
    ("webdataset", {"notes.md": ""}, {}, [".tar"]),
    ("captions webdataset", INSIDE, {}, ["Test"]),
    ("captions webdataset", {"a.tar.gz": b"", "b.TGZ": b""}, {}, [".tar.gz", ".tgz"]),
    ("folder captions", {"cat/0.xyz": "", "cat/1.xyz": ""}, {}, ["2 .xyz"]),
    ("captions", {"preview.png": picture(1), "0.tar": OTHER}, {"trigger_word": "sks"}, ["0.tar"]),
    *[("captions", {**PLAIN, "1.txt": "a", name: "{}"}, {"trigger_word": "sks"}, [name])
      for name in ("captions.json", "labels.csv", "meta.jsonl", "0.cap")],
    ("captions", {"a.tar": tar({**PLAIN, "1.txt": "a", "0.json": '{"prompt": "b"}'})}, {"trigger_word": "sks"},
     ["0.json"]),
    ("captions", {name: data for name, data in MANY.items() if name != "07.txt"}, {}, ["07.png"]),
    ("captions", {"0.png": picture(0), "0.txt": "a", "0.caption": "b"}, {}, ["0.txt", "0.caption"]),
]  # fmt: skip


@pytest.mark.parametrize(("names", "files", "options", "mentions"), REFUSED)
def test_what_is_ambiguous_or_not_there_is_refused(
    names: str, files: Files, options: dict[str, Any], mentions: list[str], tmp_path: Path
) -> None:
    write(tmp_path, files)
    for name in names.split():
        with refused(f'dataset.root_dir = "{tmp_path}"', *(word.format(root=tmp_path) for word in mentions)):
            opened(tmp_path, name, **options)


def test_a_shard_that_the_user_names_is_read_whatever_its_name(tmp_path: Path) -> None:
    for name in ("captions", "webdataset"):
        opened(write(tmp_path, TEST_SHARD) / "ds-test-0.tar", name)


def test_members_of_a_tar_that_are_not_files_are_named_and_those_of_webdataset_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HOW_TO_READ, ".xyz", "pip install xyz")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.png", "__meta__/1.png", ".git/2.png", "__MACOSX/3.png", "6.xyz"):
            info = tarfile.TarInfo(name)
            info.size = len(picture(0))
            archive.addfile(info, io.BytesIO(picture(0)))
        link = tarfile.TarInfo("4.png")
        link.type, link.linkname = tarfile.LNKTYPE, "0.png"
        archive.addfile(link)
        sparse = tarfile.TarInfo("5.png")
        keys = {"major": "0", "minor": "1", "map": "0,5", "size": "9"}
        sparse.pax_headers = {f"GNU.sparse.{key}": value for key, value in keys.items()}
        sparse.size = 5
        archive.addfile(sparse, io.BytesIO(b"12345"))
    found: dict[str, str] = {}
    for split in ("train", "validation"):
        dataset = opened(tmp_path, "webdataset", split)
        ((_, damages),) = dataset.check_files(tmp_path)
        found |= {dataset.name_of(index): damages.get(index, "") for index in range(len(dataset))}
    assert [*sorted(found)] == ["a.tar/0.png", "a.tar/4.png", "a.tar/5.png", "a.tar/6"]
    assert "link" in found["a.tar/4.png"] and "sparse" in found["a.tar/5.png"] and not found["a.tar/0.png"]
    assert found["a.tar/6"] == "pip install xyz"
