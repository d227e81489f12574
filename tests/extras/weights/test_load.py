# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan.load` and `TrainedModel.sample`: runs that moved, without their training data; and refused arguments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_runs
import torch
from PIL import Image
from random_dit import random_pipeline
from refusals import refused

from torchditan import load
from torchditan.extras.report.stored_grids import read_cells
from torchditan.extras.weights.trained_model import TrainedModel

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunScript

CLASSES = ("cat", "dog", "owl", "yak")


TINY = [
    *("--dataset.image_size=8", "--training.steps=2", "--optimizer.lr=0.01", "--checkpoint.interval=1"),
    *("--sampling.num_steps=2", "--sampling.images_per_class=2", *tiny_runs.KEEP),
]


def write_photos(folder: Path) -> Path:
    """Three images of each class."""
    colours = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(3):
            pixels = colours.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def on_photos(photos: Path) -> list[str]:
    return ["--dataset.dataset_name=folder", f"--dataset.root_dir={photos}"]


@pytest.fixture(scope="module")
def moved(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs in another folder than they were trained in, and an autoencoder; the training images are deleted."""
    project, elsewhere = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("elsewhere")
    photos = on_photos(write_photos(project / "photos"))
    random_pipeline().vae.save_pretrained(project / "autoencoder")
    online = ["--autoencoder.online", "--model.patch_size=1", "--autoencoder.shift=0", "--autoencoder.scale=1"]
    decoded = [*online, "--autoencoder.name=diffusers", f"--autoencoder.path={project / 'autoencoder'}"]
    jobs = {
        "pixels": photos,
        "unconditional": [*photos, "--dataset.num_classes=0"],
        "diffusers": [*photos, *decoded],
    }
    for name, flags in jobs.items():
        run_alone("train.py", *tiny_runs.job(project / name, *TINY, *flags), cwd=project)
    runs = {name: Path(shutil.move(project / name, elsewhere / name)) for name in jobs}
    shutil.move(project / "autoencoder", elsewhere / "autoencoder")
    shutil.rmtree(project)
    return {**runs, "autoencoder": elsewhere / "autoencoder"}


@pytest.fixture(scope="module")
def pixels(moved: dict[str, Path]) -> TrainedModel:
    return load(moved["pixels"])


def test_a_moved_run_draws_the_images_of_generate_without_the_training_data(
    moved: dict[str, Path], tmp_path: Path, run_script: RunScript
) -> None:
    script = run_script("torchditan", "generate", moved["pixels"], "--classes=dog,yak", "--seed=5", "--out=grid.png")
    assert script.code == 0
    note, *others = script.err.splitlines()
    assert others == [] and "no real images" in note and "dataset.root_dir" in note
    assert "next to real" not in script.out

    images = load(moved["pixels"]).sample(classes=["dog", 3], samples_per_class=2, seed=5)
    cells, labels = read_cells(tmp_path / "grid.png")
    enlargement = cells.shape[2] // 8
    assert labels == ["dog", "yak"]
    assert images.shape == (4, 3, 8, 8) and images.dtype == torch.uint8
    assert images.float().std() > 10
    drawn = cells[:, :, ::enlargement, ::enlargement].permute(0, 1, 4, 2, 3)
    assert torch.equal(images.unflatten(0, (2, 2)), drawn)


def test_a_folder_that_lost_a_class_is_not_compared_with_a_run(moved: dict[str, Path], tmp_path: Path) -> None:
    """Without the first class, the labels of all others shift: dogs would be compared with samples of cats."""
    photos = write_photos(tmp_path / "photos")
    trained = TrainedModel.open(moved["pixels"], device="cpu")
    trained.config = trained.config.replace({"dataset.root_dir": str(photos)})
    assert trained.open_images("train").class_names == [*CLASSES]
    shutil.rmtree(photos / "cat")
    with refused(f'dataset.root_dir = "{photos}"', "dog, owl, yak", "cat"):
        trained.open_images("train")


def test_a_run_is_found_from_another_working_directory_and_by_its_checkpoint(
    moved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(moved["pixels"].parent)
    newest = load("pixels")
    assert (newest.step, newest.weights, newest.dtype) == (2, "ema", torch.float32)
    assert load("pixels/checkpoint/step-00000001").step == load("pixels", step=1).step == 1
    raw = load("pixels", weights="raw", device="cpu").sample(classes=0)
    assert not torch.equal(raw, newest.sample(classes=0))
    halved = load("pixels", dtype=torch.bfloat16)
    assert next(halved.model.parameters()).dtype == torch.bfloat16
    assert halved.sample(classes=0).shape == (1, 3, 8, 8)


def test_a_sample_depends_on_its_seed_class_and_number_alone(pixels: TrainedModel) -> None:
    images = pixels.sample(classes=[3, 1], samples_per_class=3, seed=7)  # (3, 3, 3, 1, 1, 1)
    assert torch.equal(pixels.sample(classes=1, samples_per_class=2, seed=7), images[3:5])
    assert torch.equal(pixels.sample(classes=np.array([3, 1]), seed=7, batch_size=1), images[::3])
    assert not torch.equal(pixels.sample(classes=1, seed=8), images[3:4])
    for scalar in (np.int64(1), np.array(1), torch.tensor(1)):
        assert torch.equal(pixels.sample(classes=scalar, seed=np.int64(7)), images[3:4])  # type: ignore[arg-type]
    assert len(pixels.sample(classes=1, samples_per_class=torch.tensor(2), seed=-1)) == 2  # type: ignore[arg-type]
    assert len(images.flatten(1).unique(dim=0)) == 6
    assert len(pixels.sample()) == len(CLASSES)  # as `torchditan generate`, without classes


def test_sampling_options_hold_for_one_call(pixels: TrainedModel, moved: dict[str, Path]) -> None:
    before = pixels.sample(classes=0)
    one = pixels.sample(classes=0, num_steps=9, guidance_scale=5, sampler="heun", guidance_interval=(0.2, 0.9))
    assert not torch.equal(one, before)
    assert torch.equal(pixels.sample(classes=0), before)
    options: dict[str, Any] = {"num_steps": 9, "guidance_scale": 5, "sampler": "heun", "guidance_interval": [0.2, 0.9]}
    for_all = load(moved["pixels"], options={f"sampling.{name}": value for name, value in options.items()})
    assert torch.equal(for_all.sample(classes=0), one)


def test_images_that_are_not_finite_are_counted_in_one_line(
    moved: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    trained = load(moved["pixels"])
    trained.sample(classes=[0, 1])
    assert capfd.readouterr().err == ""
    with torch.no_grad():
        next(trained.model.parameters()).fill_(torch.nan)
    images = trained.sample(classes=[0, 1])
    assert (images == 0).all()
    assert capfd.readouterr().err == "warning: 2 of 2 images have values that are not finite\n"


def test_an_unconditional_model_draws_a_number_of_images(moved: dict[str, Path]) -> None:
    trained = load(moved["unconditional"])
    images = trained.sample(num_samples=3, seed=1)
    assert images.shape == (3, 3, 8, 8)
    assert torch.equal(trained.sample(seed=1), images[:1])
    with refused("classes = [0]", "without classes"):
        trained.sample(classes=[0])
    with refused('prompts = "a cat"', "num_samples"):
        trained.sample(prompts="a cat")


def test_an_autoencoder_that_moved_is_given_its_new_path(moved: dict[str, Path]) -> None:
    without = load(moved["diffusers"])
    latents = without.generate_rows(without.rows(classes=[0, 1]), samples_per_row=1, seed=0, batch_size=2)
    assert latents.shape == (2, 1, 4, 4, 4), "latents"
    with refused("autoencoder.path", "is not a folder"):
        without.sample(classes=[0, 1])
    trained = load(moved["diffusers"], options={"autoencoder.path": moved["autoencoder"]})
    assert trained.sample(classes=[0, 1]).shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ({"classes": 4}, "classes = [4]", ["0 to 3"]),
        ({"classes": [0, -1]}, "classes = [0, -1]", ["0 to 3"]),
        ({"classes": ["owl", "dig"]}, 'classes = "dig"', ["no class dig", "dog?"]),
        ({"classes": "flower"}, 'classes = "flower"', ["names", "cat, dog, owl, yak", "0 to 3"]),
        ({"classes": []}, "classes = []", ["0 to 3"]),
        ({"classes": [1, 1]}, "classes = [1, 1]", ["once", "samples_per_class"]),
        ({"prompts": "a dog"}, 'prompts = "a dog"', ["classes"]),
        ({"num_samples": 4}, "num_samples = 4", ["samples_per_class"]),
        ({"samples_per_class": 0}, "samples_per_class = 0", ["1"]),
        ({"num_step": 4}, "sampling.num_step", ["sampling.num_steps?"]),
        ({"num_steps": 0}, "sampling.num_steps = 0", ["1"]),
        ({"sampler": "ddim"}, 'sampling.sampler = "ddim"', ["euler, heun, dpmpp_2m"]),
    ],
)
def test_an_argument_of_sample_that_cannot_be_is_one_line(
    arguments: dict[str, Any], about: str, mentions: list[str], pixels: TrainedModel
) -> None:
    with refused(about, *mentions):
        pixels.sample(**arguments)


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ({"step": 7}, "--step = 7", ["[1, 2]"]),
        ({"weights": "EMA"}, '--weights = "EMA"', ["ema", "raw"]),
        ({"device": "cuda:99"}, 'device = "cuda:99"', ["CUDA devices"]),
        ({"options": {"autoencoder.path": "gone"}}, 'autoencoder.path = "gone"', ["pixels"]),
    ],
)
def test_an_argument_of_load_that_cannot_be_is_one_line(
    arguments: dict[str, Any], about: str, mentions: list[str], moved: dict[str, Path]
) -> None:
    with refused(about, *mentions):
        load(moved["pixels"], **arguments)
