# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The embedding of t at scale 1 that replaces one of another scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import assert_refused, refused

from torchditan.extras.weights.refit_time import fit_embedder, open_data, refit_time, validation_loss
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.models.dit import DiTConfig, TimestepEmbedder


def embedder(*, scale: float, largest_angle: float, frequencies: str = "dit") -> TimestepEmbedder:
    """Random weights that only read the features whose angle at t = 1 is at most `largest_angle`."""
    config = DiTConfig(
        depth=1,
        width=64,
        num_heads=4,
        patch_size=2,
        input_channels=1,
        image_size=(8, 8),
        num_classes=0,
        timestep_frequencies=frequencies,
    )
    torch.manual_seed(0)
    made = TimestepEmbedder(config, scale)
    angles = scale * 10000.0 ** (-torch.arange(128) / 128)
    first, last = (made.mlp[i].weight.data for i in (0, 2))  # type: ignore[union-attr]
    first.normal_().mul_((angles <= largest_angle).repeat(2))
    last.normal_()
    return made


@pytest.mark.parametrize("frequencies", ["dit", "diffusers"])
def test_a_smooth_embedding_is_fitted_also_in_bfloat16(frequencies: str) -> None:
    old = embedder(scale=1000.0, largest_angle=6.0, frequencies=frequencies)
    new, error = fit_embedder(old)
    t = torch.rand(500)
    expected, found, half = old(t), new(t), new.bfloat16()(t).float()
    variation = (expected - expected.mean(0)).square().mean().sqrt()
    assert error < 0.03 and new.scale == 1 and old.scale == 1000
    assert (found - expected).square().mean().sqrt() < 0.05 * variation
    assert (half - expected).square().mean().sqrt() < 0.08 * variation


def test_what_oscillates_faster_than_the_units_is_left_out_and_reported() -> None:
    _, smooth = fit_embedder(embedder(scale=1000.0, largest_angle=6.0))
    _, rough = fit_embedder(embedder(scale=1000.0, largest_angle=1000.0))
    assert rough > 5 * smooth


def test_the_loss_of_a_model_of_captions_reads_their_masks() -> None:
    pytest.importorskip("wordllama")
    trained = TrainedModel.open("scenes", device="cpu")
    trained.config = trained.config.replace({"validation.num_images": 8})
    job = open_data(trained)
    seen = []
    trained.model.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    assert validation_loss(trained, job) < 0.1
    assert all("prompt_attention_mask" in condition for condition in seen) and seen


def test_a_missing_run_and_a_wrong_name_are_refused(tmp_path: Path, run_script) -> None:  # type: ignore[no-untyped-def]
    with refused(str(tmp_path / "no")):
        refit_time(tmp_path / "no", tmp_path / "w.safetensors")
    outcome = run_script("torchditan", "refit_time", "no", "w.pt")
    assert outcome.code == 2
    assert_refused(outcome.err, 'OUT = "w.pt"', [".safetensors"])
