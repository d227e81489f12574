# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs with self-alignment: resume, what they have in common with other runs, and other ingredients."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import KEEP, assert_same_state

from torchditan.checkpoint.loading import read_state
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Train

ALIGNED = ["--diffusion.ingredients=self_alignment", "--ema.decay=0.9"]
FAST = ["--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
FULL = "--activation_checkpoint.mode=full"
STEPS = 4


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_killed_run_resumes_to_the_bit(compiled: bool, tmp_path: Path, train: Train) -> None:
    flags = [*ALIGNED, *FAST, *KEEP, "--checkpoint.interval=2", FULL]
    flags += ["--training.compile", "--compile.backend=aot_eager"] if compiled else []
    train("whole", *flags, f"--training.steps={STEPS}")
    train("parts", *flags, "--training.steps=3")
    shutil.rmtree(tmp_path / "parts/checkpoint/step-00000003")
    assert "resumed at step 2" in train("parts", *flags, f"--training.steps={STEPS}").out
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(parts) == curve(whole)
    assert_same_state(whole, parts, step=STEPS)
    first, expected = (read_state(whole / f"checkpoint/step-{step:08d}") for step in (2, STEPS))
    for name in ("model.heads.alignment.0.weight", "ema.heads.alignment.4.weight"):
        assert not torch.equal(first[name], expected[name]), name


def test_runs_that_align_and_others_compare_in_validation_and_flops(tmp_path: Path, train: Train) -> None:
    flags = ["--training.steps=1", "--validation.freq=1", "--validation.num_images=8", "--optimizer.lr=0"]
    train("aligned", *ALIGNED, *flags)
    train("plain", *flags)
    ((aligned,), (plain,)) = (read_metrics(tmp_path / name) for name in ("aligned", "plain"))
    assert aligned["loss"] == plain["loss"] and aligned["alignment_loss"] > 0.1
    per_image = [record["tflops_per_device"] / record["images_per_second"] for record in (aligned, plain)]
    assert per_image[0] > 1.3 * per_image[1]  # a third of forward and backward, and the head
    validated = [key for key in plain if key.startswith("validation_loss")]
    assert len(validated) > 1 and {key: aligned[key] for key in validated} == {key: plain[key] for key in validated}


def test_it_trains_together_with_the_other_ingredients(tmp_path: Path, train: Train) -> None:
    """Contrastive flow matching needs pairs, and FLOPs are counted with one sample, without its term."""
    flags = ["--training.steps=2", *FAST, "--diffusion.prediction=x", "--diffusion.loss_weighting=min_snr"]
    flags += ["--model.block=value_residual", "--model.conditioning=adaln_single", "--optimizer.name=Muon"]
    train("aligned", *ALIGNED, *flags)
    train("contrasted", "--diffusion.ingredients", "self_alignment", "contrastive", "--ema.decay=0.9", *flags)
    aligned, contrasted = (read_metrics(tmp_path / name) for name in ("aligned", "contrasted"))
    assert contrasted[0]["loss"] == aligned[0]["loss"] and contrasted[1]["loss"] != aligned[1]["loss"]
    per_image = [run[0]["tflops_per_device"] / run[0]["images_per_second"] for run in (aligned, contrasted)]
    assert per_image[0] == pytest.approx(per_image[1])
