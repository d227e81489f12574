# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a resumed run may change: it can train longer if its schedule allows it, on the same images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_runs
from PIL import Image

from torchditan.config.loader import load_config, to_dict
from torchditan.config.trajectory import differences, trajectory
from torchditan.run.directory import DATASET_FILES
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript, Train

KEEP_ALL = [*tiny_runs.KEEP, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]


def refused(run_script: RunScript, run: Path, *flags: str) -> str:
    """The line with which a command refuses to continue a run, which stays as it was."""
    before = (run / "config.json").read_bytes()
    code, _, err = run_script("train.py", *tiny_runs.job(run, *KEEP_ALL, *flags))
    assert code == 2 and err.count("\n") == 1 and "--metrics.experiment_name" in err
    assert (run / "config.json").read_bytes() == before
    return err


def test_a_run_on_a_folder_of_images_refuses_other_images(run_script: RunScript, train: Train, tmp_path: Path) -> None:
    for folder, names in (("cats", "abcd"), ("moved_cats", "abcd"), ("dogs", "abce")):
        (tmp_path / folder).mkdir()
        for red, name in enumerate(names):
            Image.new("RGB", (8, 8), (60 * red, 0, 0)).save(tmp_path / folder / f"{name}.png")
    for folder in ("moved_cats", "dogs"):
        Image.new("RGB", (90, 90)).save(tmp_path / folder / "b.png")
    flags = ["--dataset.dataset_name=folder", "--dataset.image_size=8"]
    others = [*flags, "--dataset.root_dir=dogs", "--training.steps=2"]
    train("pets", *KEEP_ALL, *flags, "--training.steps=1", "--dataset.root_dir=cats")
    err = refused(run_script, tmp_path / "pets", *others)
    assert "other files of dogs (added: e.png; removed: d.png; changed: b.png)" in err and "paths-" not in err
    outcome = train("pets", *KEEP_ALL, *flags, "--training.steps=2", "--dataset.root_dir=moved_cats")
    assert "warning: files since this run was started: changed: b.png\n" in outcome.out
    (tmp_path / "pets" / DATASET_FILES).write_bytes(b"damaged")
    assert "dataset.fingerprint is paths-" in refused(run_script, tmp_path / "pets", *others)


def test_a_run_trains_longer_where_its_learning_rates_stay(train: Train, tmp_path: Path) -> None:
    flags = [*KEEP_ALL, "--lr_scheduler.schedule=wsd", "--lr_scheduler.decay_ratio=0.5"]
    train("whole", "--training.steps=6", *flags)
    train("longer", "--training.steps=4", *flags)
    (tmp_path / "longer/checkpoint/step-00000004").rename(tmp_path / "late")  # as if stopped before the decay
    assert "resumed at step 2" in train("longer", "--training.steps=6", *flags).out
    losses = [[record["loss"] for record in read_metrics(tmp_path / run)] for run in ("whole", "longer")]
    assert losses[0] == losses[1]


def test_other_steps_are_refused_once_the_rate_decays_and_the_remedy_works(
    run_script: RunScript, train: Train, tmp_path: Path
) -> None:
    run, cosine = tmp_path / "short", "--lr_scheduler.schedule=cosine"
    train("short", *KEEP_ALL, cosine, "--training.steps=4")
    err = refused(run_script, run, cosine, "--training.steps=1")
    assert "training.steps = 1" in err and "is at step 4" in err
    err = refused(run_script, run, cosine, "--training.steps=6")
    assert "training.steps = 6" in err and "started with 4" in err and "cosine" in err
    remedy = err.split("from its weights: ")[1].split()
    assert remedy == ["--checkpoint.initial_load_path", str(run), "--metrics.experiment_name", "NAME"]
    assert str(run) in train("NAME", cosine, "--training.steps=1", *remedy[:2]).out


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
