# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A user's mistake that data, ranks, device or disk show: one line, exit code 2, nothing left behind.

Mistakes that the configuration alone shows are in test_configuration_errors.py. Most jobs run in this process, by the
code that `python train.py` runs; a few in processes of their own, under torchrun too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from data import build_dataset
from torchditan.config.options import FLAVOR_NAMES, Dataset
from torchditan.data_stream.order import OrderedDataset
from torchditan.run.reading import read_metrics, read_status

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
DATASETS = "captions, cifar10, digits, dummy, earth, emoji, folder, imagenet, imagenet_dummy, imagenet_hub, latents"
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


def corrupt(path: Path) -> str:
    """Damage an image; the line that names it."""
    path.write_bytes(b"no image")
    return (
        f"error: {path}: not a readable image (of no known format); repair or remove it, or skip such with "
        "--dataset.corrupt_images skip"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--dataset.dataset_name=digit",
            f'dataset.dataset_name = "digit": must be one of {DATASETS}; did you mean digits?',
        ),
        (
            "--dataset.dataset_name=latents",
            "dataset.root_dir = none: latents needs a folder that scripts/encode_latents.py wrote, or the file "
            "imagenet_ci8x8.safetensors (dataset fal/cosmos-imagenet on the Hugging Face hub); for a benchmark without "
            "it use --dataset.dataset_name dummy",
        ),
        (
            "--dataset.dataset_name=folder",
            "dataset.root_dir = none: folder needs a folder of images, or of one subfolder per class",
        ),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=gone",
            'dataset.root_dir = "gone": does not exist; folder needs a folder of images, or of one subfolder per class',
        ),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=file",
            'dataset.root_dir = "file": is a file; folder needs a folder of images',
        ),
        (
            "--dataset.dataset_name=cifar10 --dataset.root_dir=gone.parquet",
            'dataset.root_dir = "gone.parquet": does not exist; cifar10 needs a folder of data_batch_*.bin, a parquet '
            "file or folder, or dataset.hub_name uoft-cs/cifar10",
        ),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=empty",
            'dataset.root_dir = "empty": holds no train images',
        ),
        (
            "--dataset.dataset_name=imagenet --dataset.root_dir=empty",
            'dataset.root_dir = "empty": has no folder train/ with one subfolder per class',
        ),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=one --validation.freq=1",
            'dataset.root_dir = "one": holds no validation images',
        ),
        ("--model.patch_size=3", "model.patch_size = 3: must divide the samples' height and width, 8 x 8"),
        ("--dataset.image_size=16", "dataset.image_size = [16, 16]: digits is 8 x 8; leave it out"),
        ("--model.input_channels=3", "model.input_channels = 3: digits has 1 channel(s); leave it out"),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=one --model.input_channels=4",
            "model.input_channels = 4: folder gives 3 (colour) or 1 (grey)",
        ),
        (
            "--dataset.num_classes=5",
            "dataset.num_classes = 5: digits has 10 classes; must be at least that, or 0 to train without labels",
        ),
        (
            "--dataset.dataset_name=folder --dataset.root_dir=one --dataset.num_classes=5",
            "dataset.num_classes = 5: folder has no labels; must be 0",
        ),
        (
            "--dataset.dataset_name=cifar10 --dataset.root_dir=cifar",
            "dataset.num_classes = none: the labels of cifar10 run from 0 to 10; must be 0 to 9, its 10 classes",
        ),
        (
            "--model.preset=official --model.learn_sigma=false --model.rope_theta=100",
            "model.rope_theta = 100.0: has no effect with sincos positions; leave it out, or set --model.position rope",
        ),
        (
            "--float8.enable_float8_linear",
            "float8.enable_float8_linear = true: a CPU has no float8 products; needs compute capability 8.9 (H100, "
            "L40S, RTX 4090), or --float8.emulate to compute them slowly",
        ),
        (
            "--profiling.enable_memory_snapshot",
            "profiling.enable_memory_snapshot = true: needs CUDA, this run is on cpu; leave it out",
        ),
        (
            "--job.dump_folder=file",
            'job.dump_folder = "file": file/digits-debugmodel is no folder that can be written (Not a directory); '
            "choose another",
        ),
        (
            "--dataset.streaming --dataset.dataset_name=cifar10 --validation.freq=5",
            "validation.freq = 5: reads held-out images in an order of its own, which dataset.streaming cannot give; "
            "must be 0",
        ),
        ("--job.config_file=torn.toml", "{tmp_path}/torn.toml, line 2, column 9: Invalid value"),
        (
            "--model.flavor=DiT-XXL",
            f'model.flavor = "DiT-XXL": must be one of {", ".join(FLAVOR_NAMES)}; did you mean DiT-XL?',
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(
    flags: str, message: str, tmp_path: Path, run_here: RunHere
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    Image.new("RGB", (300, 300)).save(tmp_path / "one" / "1.png")
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1.bin").write_bytes(bytes(3073) + bytes([10]) + bytes(3072))
    (tmp_path / "torn.toml").write_text("[training]\nsteps = = 5\n")
    before = contents(tmp_path)
    message = message.replace("{tmp_path}", str(tmp_path))
    assert run_here(*flags.split()) == (2, [f"error: {message}"])
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (
            1,
            "--training.data_parallel_replicate_degree=2",
            "training.data_parallel_replicate_degree = 2: must divide the 1 rank(s) of this job",
        ),
        (
            8,
            "--training.data_parallel_replicate_degree=3",
            "training.data_parallel_replicate_degree = 3: must divide the 8 rank(s) of this job",
        ),
        (
            8,
            "--training.data_parallel_replicate_degree=2 --training.data_parallel_shard_degree=2",
            "training.data_parallel_shard_degree = 2: times data_parallel_replicate_degree 2 is 4, but this job has 8 "
            "rank(s); must be 4 or -1",
        ),
        (
            4,
            "--training.batch_size=8 --training.global_batch_size=16",
            "training.global_batch_size = 16: must be a multiple of 32: 4 rank(s) x training.batch_size 8",
        ),
    ],
)
def test_degrees_and_batches_that_do_not_fit_the_ranks_are_refused(
    world_size: int, flags: str, message: str, tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert run_here(*flags.split()) == (2, [f"error: {message}"])
    assert contents(tmp_path) == {}


def test_a_folder_of_another_run_is_refused_and_left_as_it_was(tmp_path: Path, run_here: RunHere) -> None:
    assert run_here("--training.steps=1") == (0, [])
    before = contents(tmp_path)
    assert run_here("--training.steps=1", "--optimizer.lr=0.5", "--training.batch_size=4") == (
        2,
        [
            "error: outputs/digits-debugmodel holds a run with other settings: optimizer.lr is 0.0001 there and 0.5 "
            "here. To resume it use its settings, else name a new run with --metrics.experiment_name"
        ],
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_image_in_the_first_batch_is_named_and_nothing_is_left(
    num_workers: int, tmp_path: Path, run_here: RunHere
) -> None:
    write_images(tmp_path / "images")
    images = tmp_path / "images"
    line = corrupt(image_at(images, 1)).replace(str(images), "images")
    before = contents(tmp_path)
    assert run_here(*FOLDER, f"--dataset.num_workers={num_workers}") == (2, [line])
    assert contents(tmp_path) == before


def test_a_mistake_in_the_first_step_leaves_nothing_either(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    corrupt(image_at(tmp_path / "images", 3))
    before = contents(tmp_path)
    code, errors = run_here(*FOLDER, "--training.global_batch_size=4")  # found in its second micro-batch
    assert (code, len(errors)) == (2, 1)
    assert contents(tmp_path) == before


def test_a_run_that_a_mistake_would_continue_stays_as_it_was(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    flags = [*FOLDER, "--checkpoint.enable_checkpoint"]
    assert run_here(*flags, "--training.steps=1") == (0, [])
    corrupt(image_at(tmp_path / "images", 3))
    before = contents(tmp_path)
    code, errors = run_here(*flags, "--training.steps=2")
    assert (code, len(errors)) == (2, 1)
    assert contents(tmp_path) == before


def test_a_corrupt_image_found_while_training_is_named_in_the_status(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    images = tmp_path / "images"
    line = corrupt(image_at(images, 5)).replace(str(images), "images")
    assert run_here(*FOLDER) == (2, [line])
    run = tmp_path / "outputs" / "folder-debugmodel"
    status = read_status(run)
    assert status is not None
    assert (status["state"], status["step"], f"error: {status['reason']}") == ("error", 2, line)
    assert [record["step"] for record in read_metrics(run)] == [1, 2]


def test_corrupt_images_are_skipped_and_counted_where_the_config_says_so(tmp_path: Path, run_here: RunHere) -> None:
    write_images(tmp_path / "images")
    for position in (1, 5):
        corrupt(image_at(tmp_path / "images", position))
    flags = ["--dataset.corrupt_images=skip", "--validation.freq=1", "--metrics.enable_sampling=true"]
    flags += ["--sampling.num_steps=1", "--training.steps=3"]
    assert run_here(*FOLDER, *flags) == (0, [])
    counts = [
        record.get("corrupt_images_rank0", 0) for record in read_metrics(tmp_path / "outputs" / "folder-debugmodel")
    ]
    assert counts[0] >= 1, "the next image may be corrupt as well"
    assert counts[1] == counts[0]
    assert counts[2] > counts[1]


def test_held_out_images_are_skipped_too(tmp_path: Path, run_here: RunHere) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / "images" / split, 2)
    corrupt(tmp_path / "images" / "val" / "a" / "0.png")
    flags = [*FOLDER, "--validation.freq=1", "--training.steps=1"]
    code, errors = run_here(*flags)
    assert (code, len(errors)) == (2, 1)
    assert "images/val/a/0.png: not a readable image" in errors[0]
    assert run_here(*flags, "--dataset.corrupt_images=skip") == (0, [])


def test_the_default_job_runs_without_any_option(tmp_path: Path, run_here: RunHere) -> None:
    flags = ["--model.flavor=DiT-S", "--training.batch_size=16", "--dataset.num_workers=2"]  # the defaults
    assert run_here(*flags, "--training.steps=1") == (0, [])
    assert read_status(tmp_path / "outputs" / "digits-dit-s")["state"] == "completed"


def test_a_job_that_only_prints_its_configuration_writes_nothing(tmp_path: Path, run_here: RunHere) -> None:
    assert run_here("--job.print_config") == (0, [])
    assert contents(tmp_path) == {}


def in_own_process(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRAIN), *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_python_train_py_exits_with_2_and_prints_one_line(tmp_path: Path) -> None:
    result = in_own_process(tmp_path, "--dataset.dataset_name=folder", "--dataset.root_dir=gone")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        'error: dataset.root_dir = "gone": does not exist; folder needs a folder of images, or of one subfolder per '
        "class\n"
    )
    assert contents(tmp_path) == {}


def test_loader_workers_add_nothing_to_the_line(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    line = corrupt(image_at(tmp_path / "images", 5)).replace(str(tmp_path / "images"), "images")
    result = in_own_process(tmp_path, *SMALL, *FOLDER, "--dataset.num_workers=2")
    assert (result.returncode, result.stderr) == (2, line + "\n")


def test_every_rank_finds_the_mistake_and_rank_0_says_it_once(tmp_path: Path, run_distributed: RunDistributed) -> None:
    flags = [*SMALL, "--training.data_parallel_shard_degree=3"]
    result = run_distributed([TRAIN, *flags], 2, cwd=tmp_path)
    assert result.returncode != 0
    line = (
        "error: training.data_parallel_shard_degree = 3: times data_parallel_replicate_degree 1 is 3, but this job has "
        "2 rank(s); must be 2 or -1"
    )
    assert [text for text in result.stderr.splitlines() if text.startswith("error:")] == [line]
    assert result.stdout == ""
    assert contents(tmp_path) == {}


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_before_the_first_step_stops_all(
    tmp_path: Path, run_distributed: RunDistributed
) -> None:
    write_images(tmp_path / "images")
    line = corrupt(image_at(tmp_path / "images", 3)).replace(str(tmp_path / "images"), "images")
    before = contents(tmp_path)
    result = run_distributed([TRAIN, *SMALL, *FOLDER], 2, cwd=tmp_path)  # rank 1 reads positions 2 and 3
    assert result.returncode != 0
    assert [text for text in result.stderr.splitlines() if text.startswith("error:")] == [line]
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_mistake_that_one_rank_finds_while_training_is_its_to_report(
    tmp_path: Path, run_distributed: RunDistributed
) -> None:
    write_images(tmp_path / "images")
    line = corrupt(image_at(tmp_path / "images", 7)).replace(str(tmp_path / "images"), "images")
    result = run_distributed([TRAIN, *SMALL, *FOLDER], 2, cwd=tmp_path)  # rank 1 reads 6 and 7 in its second step
    assert result.returncode != 0
    assert line in result.stderr.splitlines()
    # Rank 0 sees a lost connection, or is ended before it does; neither becomes the reason.
    status = read_status(tmp_path / "outputs" / "folder-debugmodel")
    assert status is not None
    assert (status["state"], status["rank"], f"error: {status['reason']}") == ("error", 1, line)
    assert [text for text in result.stderr.splitlines() if text.startswith("RuntimeError")] == []


STOPPED = "stopped by SIGINT after step {step}; without checkpoint.enable_checkpoint nothing was saved\n"


def test_ctrl_c_is_interrupted_and_resumable(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAIN), *SMALL, "--training.steps=100000", "--dataset.num_workers=1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the loader's workers too
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, errors) == (
        75,
        STOPPED.format(step=read_status(tmp_path / "outputs" / "digits-debugmodel")["step"]),
    )
    status = read_status(tmp_path / "outputs" / "digits-debugmodel")
    assert status is not None
    assert status["state"] == "interrupted"
    assert status["step"] >= 1
