# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Samplers of flows by name, for tests."""

from __future__ import annotations

import torch

from torchditan.diffusion.samplers import Velocity
from torchditan.registry import SAMPLERS, registered


def solve(velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], method: str) -> torch.Tensor:
    sampler = registered(SAMPLERS, method)()
    return sampler.flow(velocity, noise, timesteps=timesteps, step_noise=lambda step: torch.zeros_like(noise))
