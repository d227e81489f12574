# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The objective that `[diffusion]` and a model ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchditan.config import Diffusion
from torchditan.diffusion.ddpm import DDPM
from torchditan.diffusion.flow_matching import FlowMatching, Objective
from torchditan.diffusion.timesteps import timestep_sampling

if TYPE_CHECKING:
    from torchditan.models.spec import ModelSpec


def build_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """The training objective; a timestep shift that is left open is the model's own."""
    if spec.prediction == "noise":
        return DDPM(conditioning=spec.conditioning, label_dropout=config.label_dropout)
    return FlowMatching(
        conditioning=spec.conditioning,
        timesteps=timestep_sampling(
            kind=config.timestep_sampling,
            mean=config.logit_normal_mean,
            std=config.logit_normal_std,
            shift=spec.timestep_shift if config.timestep_shift is None else config.timestep_shift,
        ),
        label_dropout=config.label_dropout,
    )
