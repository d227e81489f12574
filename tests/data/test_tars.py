# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tar shards: their index on disk, patterns and addresses, labels and captions, damage, and resuming on other ranks."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_runs
from made_files import Files, greys, write_tar
from made_files import picture as encode
from refusals import assert_refused, refused

from torchditan.checkpoint.files import list_checkpoints, step_of
from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import CorruptImageError, read_image
from torchditan.datasets import build_dataset, remote_files, tars
from torchditan.datasets.remote_files import RemoteFile
from torchditan.datasets.tars import expand_braces, find_shards
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript, Train

REPOSITORY = Path(__file__).resolve().parents[2]


def write_shards(folder: Path, *, num_shards: int = 2, per_shard: int = 4) -> Path:
    """Image n is of grey n and has label n % 3."""
    for shard in range(num_shards):
        numbers = range(shard * per_shard, (shard + 1) * per_shard)
        files: Files = {}
        for number in numbers:
            files |= {f"{number:04d}.png": encode(number), f"{number:04d}.cls": str(number % 3)}
        write_tar(folder / f"{shard:03d}.tar", files)
    return folder


def write_held_out(folder: Path) -> None:
    """Held-out images of their own, so that none of the others is held out."""
    write_tar(folder / "val" / "v.tar", {"v.png": encode(0), "v.cls": "0"})


def open_tars(root: Path | str, split: Any = "train", *, cache: Path | None = None, **options: Any) -> Any:
    config = Dataset(**{"dataset_name": "webdataset", "root_dir": str(root), "image_size": [4], **options})
    return build_dataset(config, split=split, cache_folder=cache)


def names(dataset: Any) -> list[str]:
    return [dataset.name_of(index) for index in range(len(dataset))]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards whose members are read."""
    found: list[str] = []
    read_shard = tars.read_shard

    def recorded(place: tars.Place) -> tars.Shard:
        found.append(place.name)
        return read_shard(place)

    monkeypatch.setattr(tars, "read_shard", recorded)
    return found


def test_images_and_their_labels(tmp_path: Path) -> None:
    write_shards(tmp_path, num_shards=3, per_shard=20)
    train, held_out = open_tars(tmp_path), open_tars(tmp_path, "validation")
    assert train.class_names == held_out.class_names == ["class 0", "class 1", "class 2"]
    assert len(held_out) == 1
    assert sorted(greys(train) + greys(held_out)) == list(range(60))
    assert all(grey % 3 == train[i]["class_label"] == train.class_labels[i] for i, grey in enumerate(greys(train)))
    assert train.sample_shape == tuple(train[0]["sample"].shape) == (3, 4, 4)
    assert names(train)[0] == "000.tar/0000.png"


def test_folders_of_both_splits_and_names_of_classes(tmp_path: Path) -> None:
    write_shards(tmp_path / "train")
    write_tar(tmp_path / "val" / "x.tar", {"a.webp": encode(9, suffix=".webp"), "a.cls": "1"})
    (tmp_path / "classes.txt").write_text("cat\ndog\neel\n\n")
    assert open_tars(tmp_path).class_names == ["cat", "dog", "eel"]
    held_out = open_tars(tmp_path, "validation")
    assert (greys(held_out), held_out[0]["class_label"], len(held_out.class_names)) == ([9], 1, 3)


def test_labels_in_json_and_none_at_all(tmp_path: Path) -> None:
    files: Files = {}
    for number in range(3):
        files |= {
            f"a/{number}.png": encode(number),
            f"a/{number}.json": json.dumps({"label": number, "kind": 2 - number}),
        }
    write_tar(tmp_path / "train" / "a.tar", files)
    write_held_out(tmp_path)
    assert [open_tars(tmp_path)[i]["class_label"] for i in range(3)] == [0, 1, 2]
    assert [open_tars(tmp_path, label_key="kind")[i]["class_label"] for i in range(3)] == [2, 1, 0]
    for options in ({"label_key": "none"}, {"num_classes": 0}):
        bare = open_tars(tmp_path, **options)
        assert bare.class_names == [] and set(bare[0]) == {"sample"}


def test_the_index_is_built_once_and_only_a_changed_shard_is_read_again(tmp_path: Path, read: list[str]) -> None:
    root, cache = write_shards(tmp_path / "tars", num_shards=3), tmp_path / "cache"
    first = open_tars(root, cache=cache)
    assert read == ["000.tar", "001.tar", "002.tar"]
    again = open_tars(root, cache=cache)
    assert len(read) == 3
    assert (names(again), greys(again), again.fingerprint) == (names(first), greys(first), first.fingerprint)
    write_tar(root / "001.tar", {"x.png": encode(99), "x.cls": "1"})
    os.utime(root / "001.tar", ns=(1, 1))
    assert 99 in greys(open_tars(root, cache=cache)) and read[3:] == ["001.tar"]
    write_shards(root, num_shards=4)
    for shard in range(4):
        os.utime(root / f"{shard:03d}.tar", ns=(1, 1))
    assert len(open_tars(root, cache=cache)) == 15
    assert read[4:] == ["000.tar", "001.tar", "002.tar", "003.tar"]


def test_a_pass_that_is_killed_continues(tmp_path: Path, read: list[str]) -> None:
    root, cache = write_shards(tmp_path / "tars", num_shards=3), tmp_path / "cache"
    expected = names(open_tars(root, cache=cache))
    (index,) = (cache / "tars").glob("*.jsonl")
    whole = index.read_bytes()
    lines = whole.strip().splitlines(keepends=True)
    for torn in (lines[0], lines[0] + lines[1][:-20], lines[0] + lines[1][:5] + b"\n", b"{}\n[1]\n" + lines[0]):
        read.clear()
        index.write_bytes(torn)
        assert names(open_tars(root, cache=cache)) == expected
        assert read == ["001.tar", "002.tar"]
        read.clear()
        assert names(open_tars(root, cache=cache)) == expected
        assert read == []


def test_a_folder_that_cannot_be_written_has_no_index(tmp_path: Path, read: list[str]) -> None:
    root = write_shards(tmp_path / "tars")
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert len(open_tars(root, cache=tmp_path / "file")) == 7
    assert len(read) == 4


def test_braces_expand_to_shards(tmp_path: Path) -> None:
    assert expand_braces("a-{008..010}.{x,y}") == ["a-008.x", "a-008.y", "a-009.x", "a-009.y", "a-010.x", "a-010.y"]
    assert expand_braces("{9..11}") == ["9", "10", "11"]
    write_shards(tmp_path / "a b", num_shards=3)
    dataset = open_tars(tmp_path / "a b" / "{000..001}.tar", num_classes=0)
    assert len(dataset) == 7 and {name[:7] for name in names(dataset)} == {"000.tar", "001.tar"}
    assert len(open_tars(tmp_path / "a b" / "002.tar")) == 3
    with refused(f'dataset.root_dir = "{tmp_path}/a b/{{000..004}}.tar"', "003.tar", "004.tar", "5"):
        open_tars(tmp_path / "a b" / "{000..004}.tar")
    write_shards(tmp_path / "c", num_shards=1)
    both = open_tars(tmp_path / "{a b,c}" / "000.tar")
    assert {name.split("/")[0] for name in names(both)} == {"a b", "c"}


def test_members_with_long_names_and_of_every_format(tmp_path: Path) -> None:
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        folder = "é" * 20 + "/" + "long" * (30 if format != tarfile.USTAR_FORMAT else 5)
        root = tmp_path / str(format)
        write_tar(root / "a.tar", {f"{folder}/{n}.png": encode(n) for n in range(3)}, format=format)
        dataset = open_tars(root)
        assert len(dataset) == 2 and all(name.startswith(f"a.tar/{folder}/") for name in names(dataset))


DAMAGED: list[tuple[str, Files]] = [
    ("train/a.tar/1.png (it has no label)", {"0.png": encode(0), "0.cls": "0", "1.png": encode(1)}),
    ("train/a.tar/1 (its image is missing)", {"0.png": encode(0), "0.cls": "0", "1.cls": "1"}),
    ("train/a.tar/1.png (its .cls is not an integer)",
     {"0.png": encode(0), "0.cls": "0", "1.png": encode(1), "1.cls": "cat"}),
    ('train/a.tar/1.png (its label is "cat", not an integer)',
     {"0.png": encode(0), "0.cls": "0", "1.png": encode(1), "1.json": '{"label": "cat"}'}),
    ("train/a.tar/1.png (its .json is not a JSON object)",
     {"0.png": encode(0), "0.cls": "0", "1.png": encode(1), "1.json": "{"}),
    ("train/a.tar/1.png (unknown format)", {"0.png": encode(0), "0.cls": "0", "1.png": b"no", "1.cls": "1"}),
    ("train/a.tar/1.png (image file is truncated)",
     {"0.png": encode(0), "0.cls": "0", "1.png": encode(1)[:-30], "1.cls": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("named", "files"), DAMAGED, ids=[named for named, _ in DAMAGED])
def test_what_is_damaged_or_missing_keeps_its_number(named: str, files: Files, tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "a.tar", files)
    write_held_out(tmp_path)
    dataset = open_tars(tmp_path)
    ((done, damages),) = dataset.check_files(tmp_path)
    assert (len(dataset), done) == (2, 2)
    assert [f"{dataset.name_of(index)} ({reason})" for index, reason in damages.items()] == [named]
    with pytest.raises(CorruptImageError, match=f"^{named.split(' ')[0]}: "):
        dataset[1]
    item = read_image(dataset, 1, num_classes=0, corrupt_images="skip")
    assert (item["place"], list(item["skipped"])) == (0, [1])


def test_the_missing_end_of_a_shard_is_found_wherever_it_was_cut(tmp_path: Path) -> None:
    def shard_of(data: bytes) -> tars.Shard:
        (tmp_path / "cut.tar").write_bytes(data)
        (shard,) = find_shards(str(tmp_path / "cut.tar"), cache_folder=None).open("train")
        return shard

    whole = write_tar(tmp_path / "whole.tar", {f"{n}.png": encode(n) for n in range(3)})
    with tarfile.open(whole) as tar:
        ends = [member.offset_data + member.size for member in tar]
    data = whole.read_bytes()
    assert shard_of(data).damage is None
    boundary = 512 * (ends[1] // 512 + 1)  # where the headers of the last member begin
    for length in (boundary, boundary + 100, boundary + 700, ends[2] - 10, ends[2]):
        shard = shard_of(data[:length])
        last = "1.png" if length < ends[2] - 100 else "2.png"
        assert shard.damage == f"truncated or damaged after the start of {last}"
        assert shard.members[".png"].damages == ({"2": "incomplete"} if length == ends[2] - 10 else {})
    header = data[:boundary] + b"x" * 512 + data[boundary + 512 :]
    assert shard_of(header).damage == "truncated or damaged after the start of 1.png"
    assert str(shard_of(b"").damage).startswith("not a readable, uncompressed tar")


def test_two_images_of_one_key_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.png": encode(1), "a.jpg": encode(2, suffix=".jpg")})
    with refused(f'dataset.root_dir = "{tmp_path}/a.tar"', "a.tar/a.png", "a.tar/a.jpg"):
        open_tars(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"), [("a.cls", "a.alt.cls"), ("a.fine.cls", "a.coarse.cls"), ("a.json", "a.meta.json")]
)
def test_two_labels_of_one_key_are_refused_unless_they_are_equal(first: str, second: str, tmp_path: Path) -> None:
    one, two = ("1", "7") if first.endswith("cls") else ('{"label": 1}', '{"label": 7, "score": 2}')
    write_tar(tmp_path / "a.tar", {"a.png": encode(1), first: one, second: two})
    with refused(f'dataset.root_dir = "{tmp_path}/a.tar"', f"a.tar/{first}", f"a.tar/{second}"):
        open_tars(tmp_path)
    write_held_out(tmp_path)
    write_tar(tmp_path / "a.tar", {"a.png": encode(1), first: one, second: one, "b.png": encode(2), "b.x.cls": "2"})
    assert open_tars(tmp_path).class_labels.tolist() == [1, 2]


def open_captions(root: Path | str, split: Any = "train", **options: Any) -> Any:
    return open_tars(root, split, dataset_name="captions", **options)


def test_what_captions_lack_is_refused_or_skipped(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"a.png": encode(1), "a.txt": "a", "b.png": encode(2), "c.txt": "c"})
    with refused(f'dataset.root_dir = "{tmp_path}"', "0.tar/c.txt"):
        open_captions(tmp_path)
    data = write_tar(tmp_path / "1.tar", {"d.png": encode(4), "d.txt": "d"}).read_bytes()
    (tmp_path / "1.tar").write_bytes(data[: data.index(b"d.txt")])
    with refused(f'dataset.root_dir = "{tmp_path}"', "1.tar", "truncated", "--dataset.corrupt_images"):
        open_captions(tmp_path)
    dataset = open_captions(tmp_path, corrupt_images="skip")
    assert dataset.captions == ["a"]
    (line,) = [line for line in dataset.reading if "1.tar is truncated" in line]
    assert "0.tar/c has no image" in line and "0.tar/b.png has no caption" in line
    with refused(f'dataset.root_dir = "{tmp_path}/2.tar"', "2.tar/a.json", "JSON"):
        open_captions(write_tar(tmp_path / "2.tar", {"a.png": encode(1), "a.json": "no"}))


@pytest.mark.parametrize(
    ("first", "second"), [("a.txt", "a.orig.txt"), ("a.txt", "a.caption"), ("a.json", "a.meta.json")]
)
def test_two_captions_of_one_key_are_refused_unless_they_are_equal(first: str, second: str, tmp_path: Path) -> None:
    one, two = ("a", "b") if first.endswith("txt") else ('{"text": "a"}', '{"text": "b"}')
    write_tar(tmp_path / "a.tar", {"a.png": encode(1), first: one, second: two})
    with refused(f'dataset.root_dir = "{tmp_path}"', f"a.tar/{first}", f"a.tar/{second}"):
        open_captions(tmp_path)
    write_tar(tmp_path / "a.tar", {"a.png": encode(1), first: one, second: one})
    assert open_captions(tmp_path).captions == ["a"]


@pytest.mark.parametrize("kept", [True, False])
def test_shards_at_an_address(tmp_path: Path, read: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr(remote_files, "_BLOCK_SIZE", 1000)
    write_shards(tmp_path / "tars", num_shards=3)
    for path in (tmp_path / "tars").iterdir():
        memory.pipe(f"/bucket/train/{path.name}", path.read_bytes())
    memory.pipe("/bucket/val/x.tar", (tmp_path / "tars" / "000.tar").read_bytes())
    memory.pipe("/bucket/classes.txt", b"x\ny\nz\n")
    cache = tmp_path / "cache" if kept else None
    try:
        local = open_tars(tmp_path / "tars")
        dataset = open_tars("memory://bucket", cache=cache)
        assert greys(dataset) == list(range(12)) and dataset.class_names == ["x", "y", "z"]
        assert len(open_tars("memory://bucket", "validation", cache=cache)) == 4
        pattern = open_tars("memory://bucket/train/{000..002}.tar", cache=cache)
        assert (names(pattern), greys(pattern)) == (names(local), greys(local))
        num_read = len(read)
        open_tars("memory://bucket", cache=cache)
        assert len(read) == num_read + (0 if kept else 3)
        assert any(tmp_path.glob("cache/tars/blocks/*/*")) == kept
        changed = write_tar(tmp_path / "x.tar", {"x.png": encode(99), "x.cls": "0"})
        memory.pipe("/bucket/train/001.tar", changed.read_bytes())
        assert 99 in greys(open_tars("memory://bucket", cache=cache))
        with refused('dataset.root_dir = "memory://bucket/train/{000..004}.tar"', "003.tar", "5"):
            open_tars("memory://bucket/train/{000..004}.tar")
        memory.pipe("/bucket/other/000.tar", (tmp_path / "tars" / "000.tar").read_bytes())
        assert len(open_tars("memory://bucket/{train,other}/000.tar", cache=cache)) == 7
        with refused('dataset.root_dir = "memory://nowhere"', "read"):
            open_tars("memory://nowhere")
        with refused('dataset.root_dir = "nothing://x"', "nothing"):
            open_tars("nothing://x")
    finally:
        memory.store.clear()


def test_blocks_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setattr(remote_files, "_BLOCK_SIZE", 1000)
    data = np.random.default_rng(0).bytes(10_500)
    (tmp_path / "file").write_bytes(data)
    fetched: list[int] = []
    fetch = RemoteFile._fetch
    monkeypatch.setattr(RemoteFile, "_fetch", lambda self, number: fetched.append(number) or fetch(self, number))
    file = RemoteFile(f"file://{tmp_path}/file", len(data), tmp_path / "blocks" / "a", limit=3000)
    for start in (0, 999, 1000, 4321, 10_400):
        assert file.read_at(start, 2500) == data[start : start + 2500]
        assert sum(path.stat().st_size for path in (tmp_path / "blocks").rglob("*") if path.is_file()) <= 3000
    fetched.clear()
    assert file.read_at(10_000, 500) == data[10_000:] and fetched == []
    (tmp_path / "file").write_bytes(data[:5000])
    with refused(f'dataset.root_dir = "file://{tmp_path}/file"', "changed"):
        file.read_at(7500, 10)


KILLED = """
import json, os, signal, sys
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *{arguments!r}]
from torchditan.commands import train
from torchditan.data_stream.loader import TrainingStream
from torchditan.supervision.exit_status import run_job

batches, rank = TrainingStream.batches, os.environ.get("RANK", "0")

def recorded(self, position):
    for number, (batch, randomness) in enumerate(batches(self, position)):
        if number == {steps} and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        names = self.stream.dataset.samples.names[self.stream.locate(batch["index"].numpy())]
        with open(f"{folder}/{leg}.{{rank}}", "a") as file:
            rows = zip(batch["index"].tolist(), (name.decode() for name in names.tolist()))
            file.write(json.dumps(list(rows)) + "\\n")
        yield batch, randomness

TrainingStream.batches = recorded
sys.exit(run_job(train.main))
"""


@pytest.mark.slow
def test_killed_runs_on_tars_continue_on_other_ranks_and_neither_lose_nor_repeat_an_image(
    tmp_path: Path, run_distributed: RunDistributed, train: Train
) -> None:
    write_shards(tmp_path / "tars" / "train", num_shards=4, per_shard=36)
    write_held_out(tmp_path / "tars")
    flags = ["--dataset.dataset_name=webdataset", f"--dataset.root_dir={tmp_path / 'tars'}", "--dataset.image_size=4"]
    flags += ["--training.global_batch_size=12", "--training.steps=12", "--checkpoint.interval=2", *tiny_runs.KEEP]
    seen: list[tuple[int, str]] = []
    done = 0
    for leg, (world_size, steps) in enumerate([(2, 5), (4, 3), (1, 0)]):
        script = tmp_path / "killed.py"
        values = {"arguments": tiny_runs.job(tmp_path / "run", *flags), "steps": steps, "folder": tmp_path, "leg": leg}
        script.write_text(KILLED.format(repository=str(REPOSITORY), **values))
        result = run_distributed([script], world_size)
        assert (result.returncode == 0) == (world_size == 1), result.stderr
        checkpoints = list_checkpoints(tmp_path / "run" / "checkpoint")
        rows = [row for file in tmp_path.glob(f"{leg}.*") for line in file.open() for row in json.loads(line)]
        start, done = done, step_of(checkpoints[-1])
        (index,) = (tmp_path / "cache" / "tars").glob("*.jsonl")
        assert len(index.read_text().split()) == 4  # one rank read each shard, once
        seen += [(position, name) for position, name in rows if 12 * start <= position < 12 * done]
    assert sorted(position for position, _ in seen) == list(range(144))
    assert len({name for _, name in seen}) == 144
    train("alone", *flags)
    curves = [[record["loss"] for record in read_metrics(tmp_path / run)] for run in ("run", "alone")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and len(curves[0]) == 12


def test_a_resumed_run_on_tars_equals_one_that_was_not_stopped_to_the_bit(tmp_path: Path, train: Train) -> None:
    write_shards(tmp_path / "tars", num_shards=3, per_shard=10)
    flags = ["--dataset.dataset_name=webdataset", f"--dataset.root_dir={tmp_path / 'tars'}", "--dataset.image_size=4"]
    train("resumed", *flags, *tiny_runs.KEEP, "--training.steps=3")
    (tmp_path / "cache").mkdir(exist_ok=True)
    train("resumed", *flags, *tiny_runs.KEEP, f"--cache.folder={tmp_path / 'elsewhere'}")
    train("whole", *flags, *tiny_runs.KEEP)
    tiny_runs.assert_same_state(tmp_path / "resumed", tmp_path / "whole", step=6)


def test_the_command_names_what_is_damaged_or_skips_it(tmp_path: Path, run_script: RunScript) -> None:
    write_shards(tmp_path / "tars" / "train", num_shards=3, per_shard=4)
    write_held_out(tmp_path / "tars")
    write_tar(tmp_path / "tars" / "train" / "001.tar", {"x.png": encode(7), "y.png": b"no", "y.cls": "1"})
    cut = tmp_path / "tars" / "train" / "002.tar"
    cut.write_bytes(cut.read_bytes()[:4000])
    flags = tiny_runs.job(tmp_path / "run", "--dataset.dataset_name=webdataset", "--dataset.image_size=4")
    flags.append(f"--dataset.root_dir={tmp_path / 'tars'}")
    outcome = run_script("train.py", *flags)
    assert outcome.code == 2
    named = ["train/001.tar/x.png", "train/001.tar/y.png", "unknown format", "002.tar", "--dataset.corrupt_images"]
    assert_refused(outcome.err, "3 files cannot be read", named)
    assert not (tmp_path / "run").exists()
    outcome = run_script("train.py", *flags, "--dataset.corrupt_images=skip", "--training.steps=2")
    assert outcome.code == 0, outcome.err
    assert "warning: 3 files cannot be read: train/001.tar/x.png" in outcome.out + outcome.err
