# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Unreadable images stop a job with their names, before the first step if possible, or are skipped and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from refusals import assert_refused

from torchditan.config.options import Dataset
from torchditan.data_stream.order import OrderedDataset
from torchditan.datasets import build_dataset
from torchditan.run.directory import UNREADABLE_FILE
from torchditan.run.reading import read_metrics, read_status

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

JOB = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2", "--training.steps=4"]
JOB += ["--metrics.log_freq=1", "--metrics.enable_sampling=false", "--metrics.experiment_name=run"]
JOB += ["--dataset.dataset_name=folder", "--dataset.root_dir=images", "--dataset.image_size=8"]

Refuse = Callable[..., str]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """8 images of 8 x 8 in each of the classes a and b."""
    return write_images(tmp_path / "images", 16)


def write_images(folder: Path, count: int) -> Path:
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 7 * number, dtype=np.uint8)).save(path)
    return folder


@pytest.fixture
def refused(run_script: RunScript, tmp_path: Path) -> Refuse:
    """`refused("--training.steps=2")`: the line with which the job ends; by default it must leave nothing."""

    def run(*flags: str, leaves_nothing: bool = True) -> str:
        before = contents(tmp_path)
        outcome = run_script("train.py", *JOB, *flags)
        assert outcome.code == 2
        assert contents(tmp_path) == before or not leaves_nothing
        (line,) = outcome.err.splitlines()
        return line

    return run


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: the bytes of files, None for folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def corrupt(images: Path, position: int, *, inside: bool = False) -> str:
    """Damage the image at this position of the stream, with `inside` between its header and its end; its name in
    messages."""
    config = Dataset(dataset_name="folder", root_dir=str(images), image_size=[8, 8])
    dataset: Any = build_dataset(config, split="train")
    stream = OrderedDataset(dataset, seed=0, num_classes=2, horizontal_flip=False, corrupt_images="error")
    path = images / dataset.paths[stream.locate(np.array([position]))[0]].decode()
    data = path.read_bytes()
    path.write_bytes(data[:12] + bytes(len(data) - 24) + data[-12:] if inside else b"no image")
    return str(path.relative_to(images.parent))


def assert_names_image(line: str, *names: str) -> None:
    assert_refused(line, "", [*names, "--dataset.corrupt_images skip"])


def test_all_that_cannot_be_opened_are_named_before_the_first_step(images: Path, refused: Refuse) -> None:
    names = [corrupt(images, position) for position in (1, 7, 9)]
    assert_names_image(refused(), *names)


def test_one_that_cannot_be_decoded_in_the_first_step_leaves_nothing(images: Path, refused: Refuse) -> None:
    name = corrupt(images, 3, inside=True)
    assert_names_image(refused("--training.global_batch_size=4"), name)  # in its second micro-batch


def test_a_run_that_it_would_continue_stays_as_it_was(images: Path, refused: Refuse, run_script: RunScript) -> None:
    keep = "--checkpoint.enable_checkpoint"
    assert run_script("train.py", *JOB, keep, "--training.steps=1").code == 0
    name = corrupt(images, 3)
    assert_names_image(refused(keep, "--training.steps=2"), name)


def test_one_that_is_found_while_training_is_named_in_the_status(images: Path, refused: Refuse, tmp_path: Path) -> None:
    name = corrupt(images, 5, inside=True)
    line = refused("--dataset.num_workers=2", leaves_nothing=False)  # workers add nothing to the line
    assert_names_image(line, name)
    status: Any = read_status(tmp_path / "outputs" / "run")
    assert (status["state"], status["step"], f"error: {status['reason']}") == ("error", 2, line)
    assert [record["step"] for record in read_metrics(tmp_path / "outputs" / "run")] == [1, 2]


def test_they_are_skipped_and_counted_where_the_config_says_so(
    images: Path, run_script: RunScript, tmp_path: Path
) -> None:
    found, drawn = corrupt(images, 1), corrupt(images, 5, inside=True)
    (images / "a" / "camera.cr2").write_bytes(b"")
    flags = ["--dataset.corrupt_images=skip", "--validation.freq=1", "--metrics.enable_sampling=true"]
    flags += ["--sampling.num_steps=1", "--training.steps=10"]  # more than an epoch
    code, out, err = run_script("train.py", *JOB, *flags)
    assert (code, err) == (0, "")
    assert f"warning: 1 file cannot be read: {found} (unknown format); the next images replace them" in out
    assert "not read: 1 .cr2" in out
    counts = [record["corrupt_images_rank0"] for record in read_metrics(tmp_path / "outputs" / "run")]
    assert (counts[0], counts[-1]) == (1, 2)  # files, however often they are drawn
    assert out.count(drawn) == 1 and out.count(found) == 1
    (listed,) = (tmp_path / "outputs" / "run" / UNREADABLE_FILE).read_text().splitlines()
    assert listed.startswith(f"{drawn} (")


def test_held_out_images_are_checked_too(tmp_path: Path, refused: Refuse, run_script: RunScript) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split, 4)
    (tmp_path / "images" / "val" / "a" / "0.png").write_bytes(b"no image")
    flags = ["--validation.freq=1", "--training.steps=1"]
    assert_names_image(refused(*flags), "images/val/a/0.png")
    assert run_script("train.py", *JOB, *flags, "--dataset.corrupt_images=skip").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("position", [3, 7])  # rank 1 reads positions 2 and 3 in its first step, then 6 and 7
def test_one_that_rank_1_finds_stops_all_ranks(
    position: int, images: Path, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    name = corrupt(images, position, inside=position == 7)
    before = contents(tmp_path)
    result = run_distributed(["train.py", *JOB], 2, cwd=tmp_path)
    assert result.returncode != 0
    errors = result.stderr.splitlines()
    if position == 3:
        (line,) = [text for text in errors if text.startswith("error:")]
        assert_names_image(line, name)
        assert contents(tmp_path) == before
        return
    # Rank 0 sees a lost connection, or is ended before it does; neither becomes the reason.
    status: Any = read_status(tmp_path / "outputs" / "run")
    assert (status["state"], status["rank"]) == ("error", 1)
    line = f"error: {status['reason']}"
    assert_names_image(line, name)
    assert line in errors and not [text for text in errors if text.startswith("RuntimeError")]
