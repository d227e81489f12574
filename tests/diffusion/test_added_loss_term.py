# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs with a loss term of a plug-in, whose head on a named block only training has: `minimal_parts.Aligned`.

tests/trainer compares its curve on several ranks, tests/extras/planner its memory, and tests/extras/weights its
exports.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from minimal_parts import ALIGNED
from refusals import refused
from tiny_runs import KEEP, assert_same_state

from torchditan.checkpoint.loading import read_state
from torchditan.config.loader import load_config
from torchditan.config.options import Diffusion, Model
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import build_objective
from torchditan.models import build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Train

TERM = f"--diffusion.ingredients={ALIGNED} weight=0.7"


def curve(run: Path) -> list[tuple[float, ...]]:
    return [tuple(record[key] for key in ("loss", "distance", "grad_norm")) for record in read_metrics(run)]


def test_a_run_resumes_to_the_bit_and_trains_the_head(tmp_path: Path, train: Train) -> None:
    flags = [TERM, *KEEP, "--checkpoint.interval=3", "--activation_checkpoint.mode=full"]
    train("whole", *flags)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoint/step-00000006")
    assert "resumed at step 3" in train("parts", *flags).out
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(parts) == curve(whole) and curve(whole)[-1][1] < curve(whole)[0][1]
    assert_same_state(whole, parts, step=6)
    first, last = (read_state(whole / f"checkpoint/step-{step:08d}") for step in (3, 6))
    for name in ("model.heads.early.weight", "ema.heads.early.weight"):
        assert not torch.equal(first[name], last[name]), name


def test_its_part_is_logged_and_the_other_losses_are_those_of_a_run_without_it(tmp_path: Path, train: Train) -> None:
    flags = ["--training.steps=1", "--validation.freq=1", "--validation.num_images=8", "--optimizer.lr=0"]
    train("aligned", TERM, *flags)
    train("plain", *flags)
    (aligned,), (plain,) = (read_metrics(tmp_path / name) for name in ("aligned", "plain"))
    assert aligned["distance"] > 0.1 and "distance" not in plain
    equal = [key for key in plain if key == "loss" or key.startswith("validation_loss")]
    assert len(equal) > 2 and {key: aligned[key] for key in equal} == {key: plain[key] for key in equal}


def test_flops_count_the_head() -> None:
    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(2, 8, 8), num_classes=10)
    config = Diffusion(ingredients=[ALIGNED])
    trained = spec.with_heads(build_objective(config, spec).heads)
    head = 6 * 64 * 2 * spec.config.patch_size**2  # forward, and gradients of input and weight
    assert count_loss_flops(config, trained).total == count_model_flops(spec).total + head * spec.num_tokens


def test_two_terms_that_call_the_model_are_refused() -> None:
    with refused("diffusion.ingredients = ", ALIGNED, "leave one of them out"):
        load_config(["--diffusion.ingredients", ALIGNED, ALIGNED])
