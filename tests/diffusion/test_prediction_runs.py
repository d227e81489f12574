# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs that predict x or epsilon, with min-SNR weights and a shift: from training to export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from refusals import assert_refused
from tiny_runs import KEEP, assert_same_state

from torchditan.extras.weights.trained_model import load
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript, Train

OPTIONS = ["--diffusion.prediction=x", "--diffusion.loss_weighting=min_snr", "--diffusion.timestep_shift=2"]
DRAW = ["--sampling.num_steps=4", "--sampling.max_classes=2", "--sampling.images_per_class=2"]


def curve(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def test_a_run_resumes_to_the_bit_samples_is_exported_imported_and_continued(
    train: Train, run_script: RunScript, tmp_path: Path
) -> None:
    flags = [*OPTIONS, *KEEP, *DRAW, "--training.steps=4", "--checkpoint.interval=2"]
    train("whole", *flags, "--validation.freq=4", "--validation.num_images=8")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint/step-00000004")
    assert "resumed at step 2" in train("resumed", *flags).out
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
