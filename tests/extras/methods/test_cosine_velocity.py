# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The cosine term of the velocity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused

from torchditan.config.options import Config, Diffusion, Model
from torchditan.config.rules import validate
from torchditan.diffusion.objectives import build_objective, validation_objective
from torchditan.models import build_model_spec
from torchditan.randomness import Randomness


@pytest.mark.parametrize("prediction", ["v", "x", "epsilon"])
def test_the_loss_is_the_squared_error_and_one_minus_the_cosine_over_channels(prediction: Any) -> None:
    generator = np.random.default_rng(0)
    x, noise, v = generator.normal(size=(3, 4, 3, 8, 8))
    t = np.array([0.1, 0.3, 0.6, 0.9])
    wide = t.reshape(-1, 1, 1, 1)
    x_t = (1 - wide) * noise + wide * x
    answer = {"v": v, "x": x_t + (1 - wide) * v, "epsilon": x_t - wide * v}[prediction]
    target = x - noise
    cosine = (v * target).sum(1) / np.linalg.norm(v, axis=1) / np.linalg.norm(target, axis=1)  # (B, H, W)
    expected = ((v - target) ** 2).mean((1, 2, 3)) + 0.5 * (1 - cosine).mean((1, 2))

    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(3, 8, 8), num_classes=0)
    section = Diffusion(prediction=prediction, timestep_sampling="uniform", ingredients=["cosine_velocity weight=0.5"])
    objective = build_objective(section, spec)
    draws = Randomness(
        noise=torch.from_numpy(noise).float(), timestep=torch.from_numpy(t).float(), label_dropout=torch.ones(4)
    )
    batch = {"sample": torch.from_numpy(x).float()}
    loss: Any = objective.loss(lambda *_: torch.from_numpy(answer).float(), batch, draws)  # type: ignore[arg-type]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=2e-5)
    assert not hasattr(validation_objective(section, spec), "base"), "validation has no second term"


def test_ddpm_is_refused() -> None:
    section = Diffusion(objective="ddpm", ingredients=["cosine_velocity"])
    with refused('diffusion.objective = "ddpm"', "flow_matching", "cosine_velocity"):
        validate(Config(diffusion=section))
