# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs of older versions resume, options evolve, and a run can train longer if its schedule allows it.

`tests/fixtures/run_36e2f02.tar.xz` is a run that commit 36e2f02 trained for 6 steps (`curve.json`), cut back to its
checkpoint of step 2.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from torchditan.config.loader import from_dict, load_config, to_dict
from torchditan.config.options import Config, flatten
from torchditan.config.trajectory import TRAJECTORY_KEYS, VALUES_BEFORE, differences, trajectory
from torchditan.run.directory import DATASET_FILES
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "run_36e2f02.tar.xz"

SETTINGS = [
    "--model.flavor=debugmodel",
    "--dataset.num_workers=0",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-3",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
]


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path / "outputs", filter="data")
    return tmp_path / "outputs" / "run_36e2f02"


def resume(run_script: RunScript, name: str, *flags: str) -> tuple[int, str, str]:
    return run_script("train.py", *SETTINGS, "--metrics.experiment_name", name, *flags)


def test_a_run_of_commit_36e2f02_resumes_and_follows_its_curve(old_run: Path, run_script: RunScript) -> None:
    expected = json.loads((old_run / "curve.json").read_text())
    code, _, err = resume(run_script, old_run.name, "--training.steps=6", "--lr_scheduler.schedule=cosine")
    assert code == 0, err
    assert "lr_scheduler.decay_until = last_step" in err
    curve = list(read_metrics(old_run))
    assert [record["step"] for record in curve] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr"):
        assert [record[key] for record in curve] == pytest.approx([record[key] for record in expected], rel=1e-5)
    assert read_config(old_run)["trajectory"]["lr_scheduler.decay_until"] == "last_step"
    # Its config.json is of this version now; it resumes a second time, from an earlier step.
    (old_run / "checkpoint" / "step-00000006").rename(old_run / "late")
    code, out, err = resume(run_script, old_run.name, "--training.steps=6", "--lr_scheduler.schedule=cosine")
    assert code == 0, err
    assert "resumed at step 4" in out
    assert [record["loss"] for record in read_metrics(old_run)] == [record["loss"] for record in curve]


def test_an_old_run_keeps_its_schedule_when_asked_for_another(old_run: Path, run_script: RunScript) -> None:
    code, _, err = resume(run_script, old_run.name, "--training.steps=6", "--lr_scheduler.schedule=linear")
    assert code == 2
    assert "lr_scheduler.schedule is cosine there and linear here" in err
    assert "decay_until is" not in err


def test_every_trajectory_option_has_a_meaning_in_runs_of_commit_36e2f02(old_run: Path) -> None:
    """An option that was added since is in VALUES_BEFORE, or no run of before could resume."""
    sections = read_config(old_run)["config"]
    stored = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    read = (*TRAJECTORY_KEYS, *(option for option in flatten(Config()) if option.startswith("sampling.")))
    assert {option for option in read if option not in stored} == set(VALUES_BEFORE)


def test_a_key_that_an_old_run_lacks_means_the_value_before_it_existed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = trajectory(Config())
    there = {option: value for option, value in here.items() if option != "ema.warmup"}
    assert differences(there, here) == ["ema.warmup is absent there and True here"]
    monkeypatch.setitem(VALUES_BEFORE, "ema.warmup", True)
    assert differences(there, here) == []
    monkeypatch.setitem(VALUES_BEFORE, "ema.warmup", False)
    assert differences(there, here) == ["ema.warmup is False there and True here"]


def test_a_run_on_a_folder_of_images_refuses_other_images(run_script: RunScript, tmp_path: Path) -> None:
    for folder, names in (("cats", "abcd"), ("moved_cats", "abcd"), ("dogs", "abce")):
        (tmp_path / folder).mkdir()
        for red, name in enumerate(names):
            Image.new("RGB", (8, 8), (60 * red, 0, 0)).save(tmp_path / folder / f"{name}.png")
    for folder in ("moved_cats", "dogs"):
        Image.new("RGB", (90, 90)).save(tmp_path / folder / "b.png")
    flags = ["--dataset.dataset_name=folder", "--dataset.image_size=8", "--training.steps"]
    assert resume(run_script, "pets", *flags, "2", "--dataset.root_dir=cats")[0] == 0
    code, _, err = resume(run_script, "pets", *flags, "4", "--dataset.root_dir=dogs")
    assert code == 2
    assert "other files of dogs (added: e.png; removed: d.png; changed: b.png)" in err and "paths-" not in err
    assert "--metrics.experiment_name" in err and err.count("\n") == 1
    code, out, _ = resume(run_script, "pets", *flags, "4", "--dataset.root_dir=moved_cats")
    assert code == 0 and "warning: files since this run was started: changed: b.png\n" in out
    (tmp_path / "outputs" / "pets" / DATASET_FILES).write_bytes(b"damaged")
    code, _, err = resume(run_script, "pets", *flags, "4", "--dataset.root_dir=dogs")
    assert code == 2 and "dataset.fingerprint is paths-" in err and "--metrics.experiment_name" in err
    # Earlier versions recorded no fingerprint of a folder.
    assert differences({"dataset.fingerprint": None}, {"dataset.fingerprint": "paths-0"}) == []


def test_an_old_configuration_is_read_with_the_values_of_its_time(old_run: Path) -> None:
    config = from_dict(read_config(old_run)["config"])
    assert config.lr_scheduler.decay_until == "last_step"
    assert Config().lr_scheduler.decay_until == "after_last_step"
    assert flatten(config).keys() == flatten(Config()).keys()


def test_fewer_steps_than_were_trained_are_refused(old_run: Path, run_script: RunScript) -> None:
    before = (old_run / "config.json").read_bytes()
    code, _, err = resume(run_script, old_run.name, "--training.steps=1", "--lr_scheduler.schedule=cosine")
    assert code == 2
    assert "training.steps = 1" in err and "is at step 2" in err and "--metrics.experiment_name" in err
    assert (old_run / "config.json").read_bytes() == before


def test_options_of_old_runs_without_effect_are_refused_when_given(run_script: RunScript) -> None:
    for flag, why in (
        ("dataset.bucket_order=random", "aspect_buckets"),
        ("lr_scheduler.decay_until=last_step", "cons"),
    ):
        code, _, err = resume(run_script, "new", f"--{flag}")
        assert code == 2
        assert flag.split("=")[0] in err and why in err and "leave it out" in err


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_run_trains_longer_where_its_learning_rates_stay(schedule: str, run_script: RunScript) -> None:
    flags = [f"--lr_scheduler.schedule={schedule}", "--lr_scheduler.decay_ratio=0.5"]
    assert resume(run_script, "whole", "--training.steps=6", *flags)[0] == 0
    assert resume(run_script, "longer", "--training.steps=4", *flags)[0] == 0
    for late in Path("outputs/longer/checkpoint").glob("step-00000004"):  # as if stopped before the decay
        late.rename("late")
    code, out, err = resume(run_script, "longer", "--training.steps=6", *flags)
    assert code == 0, err
    assert "resumed at step 2" in out
    losses = [[record["loss"] for record in read_metrics(Path("outputs") / run)] for run in ("whole", "longer")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_training_longer_is_refused_once_the_rate_decays_and_the_remedy_works(
    schedule: str, run_script: RunScript
) -> None:
    flags = [f"--lr_scheduler.schedule={schedule}", "--training.steps=4"]
    assert resume(run_script, "short", *flags)[0] == 0
    flags[-1] = "--training.steps=6"
    code, _, err = resume(run_script, "short", *flags)
    assert code == 2
    assert "training.steps = 6" in err and "started with 4" in err and schedule in err
    remedy = err.split("from its weights: ")[1].split()
    assert remedy == ["--checkpoint.initial_load_path", "outputs/short", "--metrics.experiment_name", "NAME"]
    code, out, err = resume(run_script, "NAME", *flags, *remedy[:2])
    assert code == 0, err
    assert "outputs/short" in out


@pytest.mark.parametrize(
    ("flags", "stated"),
    [
        ("", "--diffusion.prediction=v"),
        ("--diffusion.objective=ddpm", "--diffusion.prediction=epsilon --diffusion.noise_schedule=linear"),
        ("--model.name=sdxl --diffusion.objective=ddpm", "--diffusion.noise_schedule=scaled_linear"),
    ],
)
def test_stating_what_the_objective_does_anyway_is_the_same_run(flags: str, stated: str) -> None:
    if "sdxl" in flags:
        flags += " --model.flavor=debugmodel"
    left_open, explicit = (load_config([*flags.split(), *more.split()]) for more in ("", stated))
    assert trajectory(left_open) == trajectory(explicit)
    for there, here in ((left_open, explicit), (explicit, left_open)):
        assert differences(to_dict(there), to_dict(here)) == []
    other = load_config([*flags.split(), "--diffusion.objective=ddpm", "--model.name=dit", "--diffusion.prediction=x"])
    assert any("diffusion.prediction" in line for line in differences(to_dict(left_open), to_dict(other)))
