# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Data as people have it: splits by names, several sources in a folder, captions of other tools."""

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
from refusals import refused

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.datasets.images import HOW_TO_READ
from torchditan.datasets.splits import part_of, part_of_file
from torchditan.errors import ConfigError


def parquet(greys: list[int], *, captions: Any = None) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    buffer = io.BytesIO()
    texts = captions if captions is not None else [f"grey {grey}" for grey in greys]
    table = pyarrow.table({"image": [{"bytes": picture(grey), "path": None} for grey in greys], "text": texts})
    pytest.importorskip("pyarrow.parquet").write_table(table, buffer)
    return buffer.getvalue()


def pictures(*names: str, captions: bool = False) -> Files:
    """Image number n is of grey n."""
    files: Files = {}
    for grey, name in enumerate(names):
        files[name] = picture(grey)
        if captions:
            files[f"{name[:-4]}.txt"] = f"grey {grey}"
    return files


def opened(root: Path, name: str, split: Any = "train", **options: Any) -> Any:
    return build_dataset(Dataset(dataset_name=name, root_dir=str(root), image_size=[4], **options), split=split)


def greys(dataset: Any) -> list[int]:
    return sorted(round((dataset[i]["sample"][0, 0, 0].item() + 1) * 127.5) for i in range(len(dataset)))


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("train", ["train", "Training", "TRAIN", "train2017", "training_set", "train_images"]),
        ("validation", ["val", "valid", "Validation", "dev", "EVAL", "val2017", "validation_set"]),
        ("test", ["test", "Testing", "test_set", "test-2"]),
        (None, ["trains", "test tube", "evaluate", "my_train", "devices", "valley", "data"]),
    ],
)
def test_folders_named_after_splits(part: str | None, names: list[str]) -> None:
    assert [part_of(name) for name in names] == [part] * len(names)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ds-val-000.tar", "validation"),
        ("train-00000-of-00001.parquet", "train"),
        ("test-run-train-000.tar", "train"),
        ("my_training_TEST.tar", "test"),
        ("latest-000.tar", None),
    ],
)
def test_files_named_after_splits(name: str, part: str | None) -> None:
    assert part_of_file(name) == part


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


@pytest.mark.parametrize(
    ("paths", "right"),
    [
        (["photos/train/cat/0.png", "photos/train/dog/0.png", "photos/test/cat/0.png"], "photos"),
        (["images/train/0.png", "images/val/0.png", "labels/train/0.txt"], "images"),
        (["data/train/cat/0.png", "data/train/dog/0.png", "data/val/cat/0.png", "more/0.png"], "data"),
    ],
)
def test_a_folder_above_that_of_the_splits_is_refused(paths: list[str], right: str, tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(paths, picture(1)))
    with refused(f'dataset.root_dir = "{tmp_path}"', f"{tmp_path / right}"):
        opened(tmp_path, "folder")


def test_only_test_data_is_refused_and_named(tmp_path: Path) -> None:
    write(tmp_path / "a", pictures("test/cat/0.png", "test/dog/0.png"))
    with refused(f'dataset.root_dir = "{tmp_path / "a"}"', "test/cat/0.png"):
        opened(tmp_path / "a", "folder")
    shard = tar({"0.png": picture(1), "0.txt": "x", "0.cls": "0", "1.png": picture(2), "1.txt": "x", "1.cls": "0"})
    write(tmp_path / "b", {"ds-test-000.tar": shard})
    for name in ("captions", "webdataset"):
        with refused(f'dataset.root_dir = "{tmp_path / "b"}"', "ds-test-000.tar"):
            opened(tmp_path / "b", name)
        opened(tmp_path / "b/ds-test-000.tar", name)  # named by the user


def test_splits_inside_a_tar_are_refused(tmp_path: Path) -> None:
    files = {**pictures("Train/0.png", "Train/1.png", captions=True), "./Test/2.png": picture(2), "./Test/2.txt": "a"}
    write(tmp_path, {"photos.tar": tar(files)})
    for name in ("captions", "webdataset"):
        with refused(f'dataset.root_dir = "{tmp_path}"', "Test"):
            opened(tmp_path, name)


@pytest.mark.parametrize("names", [("ds-train-0", "ds-val-0", "ds-test-0"), ("Train/0", "Valid/0", "Testing/0")])
@pytest.mark.parametrize("kind", ["tar", "parquet", "pairs"])
def test_splits_of_captions(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    for part, name in enumerate(names):
        shades = range(10 * part, 10 * part + 3)
        if kind == "tar":
            shard: Files = {}
            for grey in shades:
                shard |= {f"{grey}.png": picture(grey), f"{grey}.txt": str(grey), f"{grey}.cls": "0"}
            write(tmp_path, {f"{name}.tar": tar(shard)})
        elif kind == "parquet":
            write(tmp_path, {f"{name}.parquet": parquet(list(shades))})
        else:
            folder = name.rpartition("/")[0] or name.split("-")[1]
            write(tmp_path, {f"{folder}/{grey}.png": picture(grey) for grey in shades})
            write(tmp_path, {f"{folder}/{grey}.txt": str(grey) for grey in shades})
    for dataset in ("captions", "webdataset") if kind == "tar" else ("captions",):
        assert greys(opened(tmp_path, dataset)) == [0, 1, 2]
        assert greys(opened(tmp_path, dataset, "validation")) == [10, 11, 12]


def test_splits_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = {"train": [0, 1], "train_small": [0], "validation": [10], "test": [20]}
    write(tmp_path / "hub", {f"data/{name}-00000-of-00001.parquet": parquet(shades) for name, shades in names.items()})
    options: dict[str, Any] = {"hub_name": str(tmp_path / "hub"), "image_size": [4]}
    found = [
        build_dataset(Dataset(dataset_name="captions", **options), split=split) for split in ("train", "validation")
    ]
    assert [greys(dataset) for dataset in found] == [[0, 1], [10]]
    for unread in ("test", "train_small"):
        assert any(unread in line and "not read" in line for line in found[0].reading), unread


def test_folders_of_images_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes `Train/` and `Test/` for one split."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "lower", {"train/a/0.png": picture(0), "train/b/1.png": picture(1), "test/a/9.png": picture(9)})
    config = Dataset(dataset_name="imagenet_hub", hub_name=str(tmp_path / "lower"), image_size=[4])
    dataset = build_dataset(config, split="train")
    assert greys(dataset) == [0, 1] and dataset.class_names == ["a", "b"]
    write(tmp_path / "upper", {"Train/a/0.png": picture(0), "Test/a/9.png": picture(9)})
    with refused("dataset.hub_name", "Test/a/9.png"):
        build_dataset(dataclasses.replace(config, hub_name=str(tmp_path / "upper")), split="train")


CAPTIONED = pictures("0.png", "1.png", captions=True)
OTHER = tar({"9.png": picture(9), "9.txt": "other"})


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ({"backup.tar": OTHER}, "1 .tar"),
        ({"empty.tar": tar({})}, "1 .tar"),
        ({"00000.parquet": b"no image table"}, "1 .parquet"),
        ({"x.cr2": b"", "y.CR2": b"", "notes.md": ""}, "2 .cr2"),
    ],
)
def test_captioned_images_come_before_other_sources_which_are_named(more: Files, unread: str, tmp_path: Path) -> None:
    dataset = opened(write(tmp_path, {**CAPTIONED, **more}), "captions")
    assert greys(dataset) == [0, 1]
    assert any(unread in line for line in dataset.reading)


def test_tars_come_before_images_without_captions_unless_a_trigger_word_makes_both_a_source(tmp_path: Path) -> None:
    write(tmp_path, {"preview.png": picture(1), "0.tar": OTHER, "0.parquet": b"", "._0.tar": b"", ".x/1.tar": b""})
    dataset = opened(tmp_path, "captions")
    assert greys(dataset) == [9]
    assert any("1 .parquet, 1 .png" in line for line in dataset.reading)
    with refused(f'dataset.root_dir = "{tmp_path}"', "0.tar"):
        opened(tmp_path, "captions", trigger_word="sks")


def test_compressed_tars_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.tar.gz": b"", "b.TGZ": b""})
    for name in ("captions", "webdataset"):
        with refused(f'dataset.root_dir = "{tmp_path}"', ".tar.gz", ".tgz"):
            opened(tmp_path, name)
    write(tmp_path, {"0.tar": OTHER})
    assert any(".tar.gz" in line for line in opened(tmp_path, "captions").reading)


def test_members_of_a_tar_that_are_not_files_are_named_and_those_of_webdataset_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.png", "__meta__/1.png", ".git/2.png", "__MACOSX/3.png"):
            info = tarfile.TarInfo(name)
            info.size = len(picture(0))
            archive.addfile(info, io.BytesIO(picture(0)))
        link = tarfile.TarInfo("4.png")
        link.type, link.linkname = tarfile.LNKTYPE, "0.png"
        archive.addfile(link)
        sparse = tarfile.TarInfo("5.png")
        sparse.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,5",
            "GNU.sparse.size": "9",
        }
        sparse.size = 5
        archive.addfile(sparse, io.BytesIO(b"12345"))
    found: dict[str, str] = {}
    for split in ("train", "validation"):
        dataset = opened(tmp_path, "webdataset", split)
        ((_, damages),) = dataset.check_files(tmp_path)
        found |= {dataset.name_of(index): damages.get(index, "") for index in range(len(dataset))}
    assert [*sorted(found)] == ["a.tar/0.png", "a.tar/4.png", "a.tar/5.png"]
    assert "link" in found["a.tar/4.png"] and "sparse" in found["a.tar/5.png"] and not found["a.tar/0.png"]


ROWS = [{"file_name": f"{n}.png", "text": f"grey, {n}"} for n in range(2)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "file_name,text\r\n" + "".join(f'{n}.png,"grey, {n}"\r\n' for n in range(2))
PLAIN = pictures("0.png", "1.png")


@pytest.mark.parametrize(
    "files",
    [
        {**PLAIN, "0.caption": "grey, 0", "1.txt": "grey, 1"},
        {**PLAIN, "0.json": '{"text": "grey, 0"}', "1.json": '\ufeff{"text": "grey, 1", "width": 4}'},
        {**PLAIN, "metadata.csv": CSV},
        {**PLAIN, "metadata.csv": "\ufeff" + CSV},
        {**PLAIN, "metadata.csv": 'file_name,text,repeats\n0.png,"grey, 0",1\n1.png,"grey, 1",1\n'},
        {"0.tar": tar({**PLAIN, "0.caption": "grey, 0", "1.json": '{"text": "grey, 1"}'})},
        {f"train/{name}": content for name, content in {**PLAIN, "metadata.jsonl": LINES}.items()},
        {
            **pictures("deep/0.png", "deep/1.png"),
            "metadata.csv": CSV.replace("\n0", "\ndeep\\0").replace("\n1", "\ndeep/1"),
        },
    ],
    ids=["caption", "json", "csv", "csv_bom", "csv_repeats", "tar", "below", "backslash"],
)
def test_captions_of_other_tools(files: Files, tmp_path: Path) -> None:
    dataset = opened(write(tmp_path, files), "captions", trigger_word="sks")
    assert [dataset[i]["caption"] for i in range(2)] == ["sks, grey, 0", "sks, grey, 1"]
    assert greys(dataset) == [0, 1]


def test_metadata_in_parquet_and_captions_as_pandas_categories(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    write(tmp_path / "a", PLAIN)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a/metadata.parquet")
    assert opened(tmp_path / "a", "captions").captions == ["grey, 0", "grey, 1"]
    categories = pyarrow.array(["x", "y", "x"]).dictionary_encode()
    write(tmp_path / "b", {"0.parquet": parquet([0, 1, 2], captions=categories)})
    assert opened(tmp_path / "b", "captions").captions == ["x", "y", "x"]


def test_names_match_in_both_forms_of_unicode(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    write(tmp_path / "a", {f"{decomposed}.png": picture(1), f"{composed}.txt": "a cup"})
    row = json.dumps({"file_name": f"{composed}.png", "text": "a cup"})
    write(tmp_path / "b", {f"{decomposed}.png": picture(1), "metadata.jsonl": row})
    row = json.dumps({"file_name": f"{decomposed}.png", "text": "a cup"})
    write(tmp_path / "c", {f"{composed}.png": picture(1), "metadata.jsonl": row})
    for folder in "abc":
        assert opened(tmp_path / folder, "captions").captions == ["a cup"]


def test_captions_are_the_names_of_files_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path, {"photos/a_red_cat.png": picture(1), "b.png": picture(2), "b.txt": "not read"})
    dataset = opened(tmp_path, "captions", caption_from="file_name")
    assert dataset.captions == ["b", "a red cat"]
    assert any("1 .txt" in line for line in dataset.reading)


@pytest.mark.parametrize("name", ["captions.json", "labels.csv", "meta.jsonl", "0.cap"])
def test_files_that_may_hold_captions_are_named_where_captions_are_missing(name: str, tmp_path: Path) -> None:
    write(tmp_path, {**PLAIN, "1.txt": "a", name: "{}"})
    with refused(f'dataset.root_dir = "{tmp_path}"', name):
        opened(tmp_path, "captions", trigger_word="sks")
    (tmp_path / name).unlink()
    dataset = opened(tmp_path, "captions", trigger_word="sks")
    assert dataset.captions == ["sks", "sks, a"]
    assert any("1 of 2 images" in line and "sks" in line for line in dataset.reading)


def test_members_of_tars_that_may_hold_captions_are_named_where_captions_are_missing(tmp_path: Path) -> None:
    write(tmp_path, {"a.tar": tar({**PLAIN, "1.txt": "a", "0.json": '{"prompt": "b"}'}), "notes.md": ""})
    with refused(f'dataset.root_dir = "{tmp_path}"', "0.json"):
        opened(tmp_path, "captions", trigger_word="sks")
    write(tmp_path, {"a.tar": tar({**PLAIN, "1.txt": "a"})})
    dataset = opened(tmp_path, "captions", trigger_word="sks")
    assert dataset.captions == ["sks", "sks, a"]
    assert [line for line in dataset.reading if "not read" in line] == ["not read: 1 .md"]


def test_a_held_out_image_without_a_caption_is_refused(tmp_path: Path) -> None:
    files = pictures(*(f"{n:02}.png" for n in range(20)), captions=True)
    held_out = opened(write(tmp_path, files), "captions", "validation")
    (tmp_path / held_out.name_of(0)).with_suffix(".txt").unlink()
    with refused(f'dataset.root_dir = "{tmp_path}"', held_out.name_of(0)):
        opened(tmp_path, "captions")


def test_images_that_need_another_library_are_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOW_TO_READ, ".xyz", "pip install xyz")
    files = {**pictures("0.png", "1.png", captions=True), "1.xyz": "", "2.xyz": "", "2.txt": "a", "2.cls": "0"}
    write(tmp_path / "a", {name: content for name, content in files.items() if name != "2.cls"})
    write(tmp_path / "b", {"0.tar": tar(files)})
    for folder in "ab":
        dataset = opened(tmp_path / folder, "captions")
        assert dataset.captions == ["grey 0", "grey 1"]
        assert any("2 .xyz (pip install xyz)" in line for line in dataset.reading)
    damages = [opened(tmp_path / "b", "webdataset", split).samples.damages for split in ("train", "validation")]
    assert "pip install xyz" in [reason for found in damages for reason in found.values()]


def test_two_captions_of_one_image_that_differ_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"0.png": picture(0), "0.txt": "a", "0.caption": "b"})
    with refused(f'dataset.root_dir = "{tmp_path}"', "0.txt", "0.caption"):
        opened(tmp_path, "captions")
    write(tmp_path, {"0.caption": "a"})
    assert opened(tmp_path, "captions").captions == ["a"]


def test_a_folder_of_what_cannot_be_read_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, {"cat/0.xyz": "", "cat/1.xyz": ""})
    for name in ("folder", "captions"):
        with pytest.raises(ConfigError, match=r"2 \.xyz"):
            opened(tmp_path, name)
