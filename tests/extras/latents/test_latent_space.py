# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Training in a latent space: stored latents and online encoding in the trainer, sample grids, and refused options."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_runs
import torch
import zoo as zoo_of_runs
from course_toml import COURSE_TOML
from PIL import Image
from safetensors.torch import save_file

from torchditan import load
from torchditan.config import options
from torchditan.datasets import build_dataset
from torchditan.errors import ConfigError
from torchditan.extras.evaluation.during_training import TrainingEvaluation
from torchditan.extras.latents.latent_space import build_sample_space
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.run.reading import read_config, read_metrics
from torchditan.sampling.grid_picture import save_grid

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

CPU = torch.device("cpu")
JOB = [*zoo_of_runs.KEPT, *zoo_of_runs.DRAWN, "--model.patch_size=1", "--dataset.horizontal_flip=false"]
HAAR = ["--dataset.dataset_name=digits", "--autoencoder.name=haar", "--autoencoder.downsampling=2"]


@pytest.fixture(scope="module")
def stored_run(zoo: zoo_of_runs.Zoo) -> Path:
    """A run on latents of the digits, (4, 4, 4) each."""
    return zoo("latents")


@pytest.fixture(scope="module")
def latents(stored_run: Path) -> Path:
    return stored_run.parent / "inputs" / "latents"


def open_latents(folder: Path) -> Any:
    return build_dataset(options.Dataset(dataset_name="latents", root_dir=str(folder)), split="train")


def is_picture(path: Path) -> bool:
    """Digits of 8 px are shown at 64; a grid of bare latents would show 4 x 4 cells of 16."""
    grid = np.asarray(Image.open(path).convert("L"), dtype=np.int16)
    cells = grid[100:, 100:]
    edges = np.abs(np.diff(cells, axis=1)).max(axis=0) > 24  # columns where something changes
    places = np.flatnonzero(edges)
    return 8 in np.diff(places)  # neighbouring pixels of an enlarged digit


def test_a_run_on_stored_latents_trains_draws_pictures_and_says_all_that_decoding_needs(
    stored_run: Path, latents: Path
) -> None:
    records = read_metrics(stored_run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert "validation_loss" in records[-1] and "encoding_percent" not in records[-1]
    assert is_picture(stored_run / "samples" / "step_00000006.png")
    section = read_config(stored_run)["config"]["autoencoder"]
    index = open_latents(latents).index
    assert (section["name"], section["downsampling"], section["fingerprint"]) == ("haar", 2, index.fingerprint)
    assert section["shift"] == list(index.shift) and section["scale"] == list(index.scale)


def test_a_moved_run_draws_pictures_without_its_latents(
    stored_run: Path, tmp_path: Path, run_script: RunScript
) -> None:
    moved = shutil.copytree(stored_run, tmp_path / "moved")
    content = json.loads((moved / "config.json").read_text())
    content["config"]["dataset"]["root_dir"] = str(tmp_path / "deleted")
    (moved / "config.json").write_text(json.dumps(content))
    assert load(moved).sample(classes=[3, 5]).shape == (2, 1, 8, 8)
    drawn = run_script("torchditan", "generate", "moved", "--out=grid.png", "--sampling.images_per_class=2")
    assert drawn.code == 0 and "no real images" in drawn.err
    assert is_picture(tmp_path / "grid.png")


def test_latents_of_another_normalisation_are_not_compared_with_a_run(
    stored_run: Path, latents: Path, tmp_path: Path
) -> None:
    trained = TrainedModel.open(stored_run, device="cpu")
    assert len(trained.open_images("train")) > 0
    others = shutil.copytree(latents, tmp_path / "others")
    for index in others.glob("*/index.json"):
        content = json.loads(index.read_text())
        content["normalization"]["scale"] = [2 * value for value in content["normalization"]["scale"]]
        index.write_text(json.dumps(content))
    trained.config = trained.config.replace({"dataset.root_dir": str(others)})
    with pytest.raises(ConfigError, match=r"autoencoder\.scale = .*normalised by their index"):
        trained.open_images("train")


def test_online_encoding_follows_the_curve_of_stored_latents_and_resumes(
    stored_run: Path, tmp_path: Path, run_script: RunScript
) -> None:
    stored = read_config(stored_run)["config"]["autoencoder"]
    flags = [*JOB, *HAAR, "--autoencoder.online"]
    flags += [f"--autoencoder.{key}={','.join(map(str, stored[key]))}" for key in ("shift", "scale")]
    run = tmp_path / "online"
    result = run_script("train.py", *tiny_runs.job(run, *flags, "--training.steps=3"))
    assert result.code == 0, result.err
    assert "1x8x8, encoded to 4x4x4" in result.out
    assert "resumed at step 3" in run_script("train.py", *tiny_runs.job(run, *flags)).out
    for online, offline in zip(read_metrics(run), read_metrics(stored_run), strict=True):
        assert online["loss"] == pytest.approx(offline["loss"], rel=2e-3), "bf16 shards round by 2^-9"
        assert 0 < online["encoding_percent"] < 100
        if online["images_per_second"] and offline["images_per_second"]:
            by_speed = online["tflops_per_device"] / online["images_per_second"]
            assert by_speed == pytest.approx(offline["tflops_per_device"] / offline["images_per_second"]), "model only"
    assert is_picture(run / "samples" / "step_00000006.png")
    drawn = run_script("torchditan", "generate", "online", "--out=grid.png")
    assert drawn.code == 0 and "decoded in" in drawn.out, drawn.err
    assert is_picture(tmp_path / "grid.png")


def test_a_run_continues_with_moved_latents_and_refuses_others(
    stored_run: Path, latents: Path, tmp_path: Path, run_script: RunScript
) -> None:
    run = shutil.copytree(stored_run, tmp_path / "run")
    shutil.copytree(latents, tmp_path / "moved")
    assert run_script("torchditan", "encode", "other", *HAAR, "--dtype=int8").code == 0
    flags = [*JOB, *zoo_of_runs.VALIDATED, "--dataset.dataset_name=latents", "--training.steps=7"]
    result = run_script("train.py", *tiny_runs.job(run, *flags, "--dataset.root_dir=moved"))
    assert result.code == 0 and "resumed at step 6" in result.out, result.err
    result = run_script("train.py", *tiny_runs.job(run, *flags, "--dataset.root_dir=other"))
    assert result.code == 2
    assert "dataset.fingerprint is latents-" in result.err and result.err.count("\n") == 1


@pytest.mark.slow
def test_one_curve_on_latents_with_any_ranks_and_workers(
    stored_run: Path, latents: Path, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    data = ["--dataset.dataset_name=latents", f"--dataset.root_dir={latents}", "--metrics.enable_sampling=false"]
    for world_size, workers in ((2, 2), (4, 0)):
        run = tmp_path / f"ranks{world_size}"
        flags = [*JOB, *data, f"--dataset.num_workers={workers}"]
        result = run_distributed(["train.py", *tiny_runs.job(run, *flags)], world_size)
        assert result.returncode == 0, result.stderr
        for here, there in zip(read_metrics(run), read_metrics(stored_run), strict=True):
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)


def refused(match: str, *, dataset: Any, needs_decoder: bool = True, **section: Any) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        build_sample_space(options.Autoencoder(**section), dataset, device=CPU, needs_decoder=needs_decoder)
    assert "\n" not in str(caught.value)


def test_what_the_section_cannot_mean_is_refused_in_one_line(latents: Path) -> None:
    stored = open_latents(latents)
    pixels = build_dataset(options.Dataset(dataset_name="digits"), split="train")
    refused("autoencoder.online = true: latents holds latents", dataset=stored, online=True, name="haar")
    refused('autoencoder.name = "haar": digits holds pixels; encode them', dataset=pixels, name="haar")
    refused("autoencoder.name = none: must be given", dataset=pixels, online=True)
    refused("autoencoder.scale = none: haar publishes no normalisation", dataset=pixels, online=True, name="haar")
    refused("sample_posterior = true: these latents have no variance", dataset=stored, sample_posterior=True)
    normalised = {"shift": [0.0], "scale": [1.0], "online": True, "name": "haar"}
    refused("sample_posterior = true: haar has no variance", dataset=pixels, sample_posterior=True, **normalised)
    refused("autoencoder.scale = .* normalised by their index; leave it out", dataset=stored, scale=[1.0])
    refused('autoencoder.name = "sd-vae": these latents come from haar', dataset=stored, name="sd-vae")
    refused("these latents have 2; leave it out", dataset=stored, downsampling=4)
    refused("these latents come from haar", dataset=stored, fingerprint="diffusers-0123456789abcdef")
    stored.index = dataclasses.replace(stored.index, fingerprint="diffusers-0123456789abcdef")
    refused("latents come from diffusers-0123456789abcdef, this decoder is haar", dataset=stored, name="haar")


def test_a_decoder_that_only_the_latents_name_may_be_missing(latents: Path, tmp_path: Path) -> None:
    dataset = open_latents(latents)
    gone = str(tmp_path / "gone")
    dataset.index = dataclasses.replace(dataset.index, autoencoder_name="diffusers", autoencoder_path=gone)
    space = build_sample_space(options.Autoencoder(), dataset, device=CPU, needs_decoder=True)
    assert space.missing_decoder is not None and "gone" in space.missing_decoder
    latents_themselves = torch.rand(1, 2, 4, 4, 4)
    assert torch.equal(space.to_pixels(latents_themselves), latents_themselves)
    save_grid(tmp_path / "grid.png", latents_themselves.repeat(3, 4, 1, 1, 1), None, ["a", "b", "c"], title="latents")
    assert not is_picture(tmp_path / "grid.png")
    refused("gone", dataset=dataset, name="diffusers", path=gone)
    config = options.Config(autoencoder=space.config, evaluation=options.Evaluation(freq=1, metrics=["classifier"]))
    with pytest.raises(ConfigError, match="gone"):  # an evaluation during training needs it, and says so before
        TrainingEvaluation(config, dataset=dataset, held_out=dataset, space=space, device=CPU)


@pytest.mark.parametrize("config", ["llama3_latent_diffusion", "course.toml"])
def test_the_jobs_of_the_course_project_train_on_the_public_file_as_it_is(
    tmp_path: Path, config: str, run_script: RunScript
) -> None:
    size = 64 if config == "course.toml" else 32
    latents = torch.randint(-128, 128, (6, 16, size, size), dtype=torch.int8)
    labels = torch.tensor([0, 999, 5, 5, 1, 2], dtype=torch.int16)
    save_file({"latents": latents, "labels": labels}, tmp_path / "imagenet_ci8x8.safetensors")
    (tmp_path / "course.toml").write_text(COURSE_TOML, encoding="utf-8")
    flags = [f"--job.config_file={config}", "--training.steps=1", "--training.batch_size=2", "--dataset.num_workers=0"]
    flags += ["--model.flavor=debugmodel", "--model.patch_size=8", "--metrics.enable_sampling=false"]
    if config == "course.toml":  # its own root_dir is another machine's
        flags += ["--dataset.dataset_name=imagenet", "--dataset.root_dir=imagenet_ci8x8.safetensors"]
    result = run_script("train.py", *flags, f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run")
    assert result.code == 0, result.err
    section = read_config(tmp_path / "run")["config"]["autoencoder"]
    assert section["name"] == "cosmos-ci8x8"
    values = latents.double() * 16 / 255
    assert section["shift"] == pytest.approx(values.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert section["scale"] == pytest.approx((1 / values.std((0, 2, 3), correction=0)).tolist(), rel=1e-6)
