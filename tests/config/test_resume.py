# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a resumed run may change: it can train longer if its schedule allows it, on the same images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from torchditan.config.loader import load_config, to_dict
from torchditan.config.trajectory import differences, trajectory
from torchditan.run.directory import DATASET_FILES
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

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


def resume(run_script: RunScript, name: str, *flags: str) -> tuple[int, str, str]:
    return run_script("train.py", *SETTINGS, "--metrics.experiment_name", name, *flags)


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


def test_fewer_steps_than_were_trained_are_refused(run_script: RunScript) -> None:
    assert resume(run_script, "run", "--training.steps=4")[0] == 0
    before = Path("outputs/run/config.json").read_bytes()
    code, _, err = resume(run_script, "run", "--training.steps=1")
    assert code == 2
    assert "training.steps = 1" in err and "is at step 4" in err and "--metrics.experiment_name" in err
    assert Path("outputs/run/config.json").read_bytes() == before


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


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
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
