# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs that predict x or epsilon, with min-SNR weights and a shift by dimension: from training to export, on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from refusals import assert_refused
from tiny_runs import KEEP, assert_same_state, job

from torchditan.extras.weights.trained_model import load
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript, Train

OPTIONS = ["--diffusion.prediction=x", "--diffusion.loss_weighting=min_snr", "--diffusion.timestep_shift=2"]
DRAW = ["--sampling.num_steps=4", "--sampling.max_classes=2", "--sampling.images_per_class=2"]


def curve(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def test_a_run_resumes_to_the_bit_samples_is_exported_imported_and_continued(
    train: Train, run_script: RunScript, tmp_path: Path
) -> None:
    train("whole", *OPTIONS, *KEEP, *DRAW, "--training.steps=4", "--validation.freq=4", "--validation.num_images=8")
    train("resumed", *OPTIONS, *KEEP, "--training.steps=2")
    outcome = train("resumed", *OPTIONS, *KEEP, "--training.steps=4")
    assert "resumed at step 2" in outcome.out
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert curve(whole) == curve(resumed)
    assert_same_state(whole, resumed, step=4)

    assert read_config(whole)["config"]["diffusion"]["timestep_shift"] == 2.0
    objective = load(whole).objective
    assert (objective.prediction, objective.timesteps.shift) == ("x", 2.0)  # type: ignore[attr-defined]
    assert run_script("torchditan", "generate", whole, f"--out={tmp_path / 'grid.png'}").code == 0

    exported, imported = tmp_path / "whole.safetensors", tmp_path / "imported"
    assert run_script("torchditan", "export", whole, exported).code == 0
    assert run_script("torchditan", "import", exported, imported).code == 0
    assert load(imported).objective == objective
    outcome = train("continued", *OPTIONS, "--training.steps=1", f"--checkpoint.initial_load_path={imported}")
    assert "diffusion.prediction" not in outcome.out
    outcome = train("other", "--training.steps=1", f"--checkpoint.initial_load_path={imported}")
    assert "diffusion.prediction is x there and None here" in outcome.out

    outcome = run_script("torchditan", "export", whole, tmp_path / "folder", "--format", "diffusers")
    assert outcome.code == 2 and not (tmp_path / "folder").exists()
    assert_refused(outcome.err, '--format = "diffusers"', ["diffusion.objective", "ddpm", "flow_matching"])


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_one_curve_on_any_number_of_ranks(
    world_size: int, train: Train, run_distributed: RunDistributed, tmp_path: Path
) -> None:
    train("alone", *OPTIONS, "--training.steps=4")
    jobs = [job(tmp_path / "ranks", *OPTIONS, "--training.steps=4")]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    assert curve(tmp_path / "ranks") == pytest.approx(curve(tmp_path / "alone"), rel=1e-5)
