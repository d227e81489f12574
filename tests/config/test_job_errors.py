# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""User errors that depend on data, ranks, device or disk: one line, exit code 2, and no files.

Errors visible in the configuration are in test_configuration_errors.py. Most jobs run in this process, with the code
of `python train.py`; a few run in separate processes, some under torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
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

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
DATASETS = "captions, cifar10, digits, dummy, earth, folder, imagenet, imagenet_hub, latents"
DATASETS += ", scenes, webdataset"
SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2"]
SMALL += ["--training.steps=4", "--metrics.log_freq=1", "--metrics.enable_sampling=false"]
FOLDER = ["--dataset.dataset_name=folder", "--dataset.root_dir=images", "--dataset.image_size=8"]


RunHere = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run_here(run_script: RunScript) -> RunHere:
    """`run_here("--model.flavor=DiT-S")`: a small job of train.py; its exit code and the lines of stderr."""

    def run(*flags: str) -> tuple[int, list[str]]:
        outcome = run_script("train.py", *SMALL, *flags)
        return outcome.code, outcome.err.splitlines()

    return run


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: the bytes of files, None for folders."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def write_images(folder: Path, count: int = 8) -> None:
    """`count` images of 8 x 8 in each of the classes a and b."""
    for number in range(2 * count):
        path = folder / "ab"[number % 2] / f"{number // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 7 * number, dtype=np.uint8)).save(path)


def image_at(folder: Path, position: int) -> Path:
    """The image at this position of the training stream, seed 0."""
    config = Dataset(dataset_name="folder", root_dir=str(folder), image_size=[8, 8])
    dataset: Any = build_dataset(config, split="train")
    stream = OrderedDataset(dataset, seed=0, num_classes=2, horizontal_flip=False, corrupt_images="error")
    return folder / dataset.paths[stream.locate(np.array([position]))[0]].decode()


def corrupt(images: Path, position: int, *, inside: bool = False) -> str:
    """Damage the image at this position, with `inside` between its header and its end; its name in messages of a job
    that reads the folder "images"."""
    path = image_at(images, position)
    data = path.read_bytes()
    path.write_bytes(data[:12] + bytes(len(data) - 24) + data[-12:] if inside else b"no image")
    return str(Path("images") / path.relative_to(images))


def assert_names_image(line: str, name: str) -> None:
    assert line.startswith("error: ")
    assert_refused(line, "", [name, "--dataset.corrupt_images skip"])


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        ("--dataset.dataset_name=digit", 'dataset.dataset_name = "digit"', [DATASETS, "digits?"]),
        (
            "--dataset.dataset_name=latents",
            "dataset.root_dir = none",
            ["torchditan encode", "imagenet_ci8x8.safetensors", "fal/cosmos-imagenet", "--dataset.dataset_name"],
        ),
        ("--dataset.dataset_name=folder", "dataset.root_dir = none", ["images"]),
        ("--dataset.dataset_name=folder --dataset.root_dir=gone", 'dataset.root_dir = "gone"', ["images"]),
        ("--dataset.dataset_name=folder --dataset.root_dir=file", 'dataset.root_dir = "file"', ["images"]),
        (
            "--dataset.dataset_name=cifar10 --dataset.root_dir=gone.parquet",
            'dataset.root_dir = "gone.parquet"',
            ["data_batch_*.bin", "dataset.hub_name", "uoft-cs/cifar10"],
        ),
        ("--dataset.dataset_name=imagenet --dataset.root_dir=empty", 'dataset.root_dir = "empty"', ["train"]),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=one --validation.freq=1",
            'dataset.root_dir = "one"',
            ["validation"],
        ),
        ("--model.patch_size=3", "model.patch_size = 3", ["8 x 8"]),
        ("--dataset.image_size=16", "dataset.image_size = [16, 16]", ["8 x 8"]),
        ("--model.input_channels=3", "model.input_channels = 3", ["1"]),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=one --model.input_channels=4",
            "model.input_channels = 4",
            ["3", "1"],
        ),
        ("--dataset.num_classes=5", "dataset.num_classes = 5", ["10"]),
        ("--dataset.dataset_name=cifar10 --dataset.root_dir=cifar", "dataset.num_classes = none", ["10", "9"]),
        ("--float8.enable_float8_linear", "float8.enable_float8_linear = true", ["8.9", "4090", "--float8.emulate"]),
        (
            "--dataset.streaming --dataset.dataset_name=cifar10 --validation.freq=5",
            "validation.freq = 5",
            ["dataset.streaming", "0"],
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(
    flags: str, about: str, mentions: list[str], tmp_path: Path, run_here: RunHere
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    Image.new("RGB", (300, 300)).save(tmp_path / "one" / "1.png")
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1.bin").write_bytes(bytes(3073) + bytes([10]) + bytes(3072))
    before = contents(tmp_path)
    code, (line,) = run_here(*flags.split())
    assert code == 2 and line.startswith("error: ")
    assert_refused(line, about, mentions)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("world_size", "flags", "about", "mentions"),
    [
        (1, "--training.data_parallel_replicate_degree=2", "training.data_parallel_replicate_degree = 2", ["1"]),
        (8, "--training.data_parallel_replicate_degree=3", "training.data_parallel_replicate_degree = 3", ["8"]),
        (
            8,
            "--training.data_parallel_replicate_degree=2 --training.data_parallel_shard_degree=2",
            "training.data_parallel_shard_degree = 2",
            ["data_parallel_replicate_degree", "2", "4", "8", "-1"],
        ),
        (
            4,
            "--training.batch_size=8 --training.global_batch_size=16",
            "training.global_batch_size = 16",
            ["32", "4", "8", "1, 2 ranks"],
        ),
        (
            3,
            "--training.batch_size=none --training.global_batch_size=20",
            "training.global_batch_size = 20",
            ["3", "1, 2, 4, 5, 10, 20 ranks"],
        ),
    ],
)
def test_degrees_and_batches_that_do_not_fit_the_ranks_are_refused(
    world_size: int,
    flags: str,
    about: str,
    mentions: list[str],
    tmp_path: Path,
    run_here: RunHere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    code, (line,) = run_here(*flags.split())
    assert code == 2
    assert_refused(line, about, mentions)
    assert contents(tmp_path) == {}


def test_a_folder_of_another_run_is_refused_and_left_as_it_was(tmp_path: Path, run_here: RunHere) -> None:
    assert run_here("--training.steps=1") == (0, [])
    before = contents(tmp_path)
    code, (line,) = run_here("--training.steps=1", "--optimizer.lr=0.5", "--training.batch_size=4")
    assert code == 2
    assert_refused(line, "outputs/digits-debugmodel", ["optimizer.lr", "0.0001", "0.5", "--metrics.experiment_name"])
    assert contents(tmp_path) == before


def test_a_corrupt_image_in_the_first_batch_is_named_and_nothing_is_left(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    images = tmp_path / "images"
    name = corrupt(images, 1, inside=True)
    before = contents(tmp_path)
    code, (line,) = run_here(*FOLDER)
    assert code == 2
    assert_names_image(line, name)
    assert contents(tmp_path) == before


def test_corrupt_images_are_all_named_before_the_first_step(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    names = [corrupt(tmp_path / "images", position) for position in (1, 7, 9)]
    before = contents(tmp_path)
    code, (line,) = run_here(*FOLDER)
    assert code == 2
    for name in names:
        assert_names_image(line, name)
    assert contents(tmp_path) == before


def test_a_mistake_in_the_first_step_leaves_nothing_either(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    corrupt(tmp_path / "images", 3, inside=True)
    before = contents(tmp_path)
    code, errors = run_here(*FOLDER, "--training.global_batch_size=4")  # found in its second micro-batch
    assert (code, len(errors)) == (2, 1)
    assert contents(tmp_path) == before


def test_a_run_that_a_mistake_would_continue_stays_as_it_was(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    flags = [*FOLDER, "--checkpoint.enable_checkpoint"]
    assert run_here(*flags, "--training.steps=1") == (0, [])
    corrupt(tmp_path / "images", 3)
    before = contents(tmp_path)
    code, errors = run_here(*flags, "--training.steps=2")
    assert (code, len(errors)) == (2, 1)
    assert contents(tmp_path) == before


def test_a_corrupt_image_found_while_training_is_named_in_the_status(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    images = tmp_path / "images"
    name = corrupt(images, 5, inside=True)
    code, (line,) = run_here(*FOLDER, "--dataset.num_workers=2")  # which add nothing to the line
    assert code == 2
    assert_names_image(line, name)
    run = tmp_path / "outputs" / "folder-debugmodel"
    status = read_status(run)
    assert status is not None
    assert (status["state"], status["step"], f"error: {status['reason']}") == ("error", 2, line)
    assert [record["step"] for record in read_metrics(run)] == [1, 2]


def test_corrupt_images_are_skipped_and_counted_where_the_config_says_so(tmp_path: Path, run_script: RunScript) -> None:
    write_images(tmp_path / "images")
    found = corrupt(tmp_path / "images", 1)
    drawn = corrupt(tmp_path / "images", 5, inside=True)
    (tmp_path / "images" / "a" / "camera.cr2").write_bytes(b"")
    flags = ["--dataset.corrupt_images=skip", "--validation.freq=1", "--metrics.enable_sampling=true"]
    flags += ["--sampling.num_steps=1", "--training.steps=30"]  # several epochs
    code, out, err = run_script("train.py", *SMALL, *FOLDER, *flags)
    assert (code, err) == (0, "")
    assert f"warning: 1 file cannot be read: {found} (unknown format); the next images replace them" in out
    assert "not read: 1 .cr2" in out
    records = read_metrics(tmp_path / "outputs" / "folder-debugmodel")
    counts = [record["corrupt_images_rank0"] for record in records]
    assert (counts[0], counts[-1]) == (1, 2)  # files, however often they are drawn
    assert out.count(drawn) == 1 and out.count(found) == 1
    (listed,) = (tmp_path / "outputs" / "folder-debugmodel" / UNREADABLE_FILE).read_text().splitlines()
    assert listed.startswith(f"{drawn} (")


def test_held_out_images_are_skipped_too(tmp_path: Path, run_here: RunHere) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split, 2)
    (tmp_path / "images" / "val" / "a" / "0.png").write_bytes(b"no image")
    flags = [*FOLDER, "--validation.freq=1", "--training.steps=1"]
    code, errors = run_here(*flags)
    assert (code, len(errors)) == (2, 1)
    assert_names_image(errors[0], "images/val/a/0.png")
    assert run_here(*flags, "--dataset.corrupt_images=skip") == (0, [])


def test_the_default_job_runs_without_any_option(tmp_path: Path, run_here: RunHere) -> None:
    flags = ["--model.flavor=DiT-S", "--training.batch_size=16", "--dataset.num_workers=2"]  # the defaults
    assert run_here(*flags, "--training.steps=1") == (0, [])
    assert read_status(tmp_path / "outputs" / "digits-dit-s")["state"] == "completed"


def test_python_train_py_exits_with_2_and_prints_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAIN), "--dataset.dataset_name=folder", "--dataset.root_dir=gone"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.endswith("\n")
    assert_refused(result.stderr, 'dataset.root_dir = "gone"', ["images"])
    assert contents(tmp_path) == {}


def test_every_rank_finds_the_mistake_and_rank_0_says_it_once(tmp_path: Path, run_distributed: RunDistributed) -> None:
    flags = [*SMALL, "--training.data_parallel_shard_degree=3"]
    result = run_distributed([TRAIN, *flags], 2, cwd=tmp_path)
    assert result.returncode != 0
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error:")]
    assert_refused(line, "training.data_parallel_shard_degree = 3", ["2 rank", "-1"])
    assert result.stdout == "starting outputs/digits-debugmodel\n"
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_before_the_first_step_stops_all(
    tmp_path: Path, run_distributed: RunDistributed
) -> None:
    write_images(tmp_path / "images")
    name = corrupt(tmp_path / "images", 3)
    before = contents(tmp_path)
    result = run_distributed([TRAIN, *SMALL, *FOLDER], 2, cwd=tmp_path)  # rank 1 reads positions 2 and 3
    assert result.returncode != 0
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error:")]
    assert_names_image(line, name)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_while_training_is_its_to_report(
    tmp_path: Path, run_distributed: RunDistributed
) -> None:
    write_images(tmp_path / "images")
    name = corrupt(tmp_path / "images", 7, inside=True)
    result = run_distributed([TRAIN, *SMALL, *FOLDER], 2, cwd=tmp_path)  # rank 1 reads 6 and 7 in its second step
    assert result.returncode != 0
    # Rank 0 sees a lost connection, or is ended before it does; neither becomes the reason.
    status = read_status(tmp_path / "outputs" / "folder-debugmodel")
    assert status is not None
    assert (status["state"], status["rank"]) == ("error", 1)
    line = f"error: {status['reason']}"
    assert_names_image(line, name)
    assert line in result.stderr.splitlines()
    assert [text for text in result.stderr.splitlines() if text.startswith("RuntimeError")] == []
