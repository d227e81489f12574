# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From noise to samples: solvers of dx/dt = velocity(x, t) from t = 0 to t = 1, and guidance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torchditan.models.spec import Condition, Conditioning

Prediction = Callable[[torch.Tensor, float], torch.Tensor]
"""(x (B, ...) float32, t) -> the model's prediction (B, ...) float32."""
Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(x (B, ...) float32, t) -> dx/dt (B, ...) float32."""


def solve(velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], method: str) -> torch.Tensor:
    """Integrate the flow through these timesteps.

    Args:
        velocity: the vector field, including guidance.
        noise: (B, ...) float32, the state at t = 0.
        timesteps: increasing, from 0 to 1.
        method: euler (one evaluation per step), heun (two in every step, including the last) or dpmpp_2m (one).
    """
    if method == "dpmpp_2m":
        from torchditan.diffusion.dpm_solver import solve_dpmpp_2m

        return solve_dpmpp_2m(velocity, noise, timesteps=timesteps)
    assert method in ("euler", "heun"), method
    x = noise
    for t, t_next in itertools.pairwise(timesteps):
        dt = t_next - t
        slope = velocity(x, t)
        x_next = x + dt * slope
        if method == "heun":
            x_next = x + dt * 0.5 * (slope + velocity(x_next, t_next))
        x = x_next
    return x


def guided_prediction(
    model: nn.Module,
    *,
    conditioning: Conditioning,
    cond: Condition,
    guidance_scale: float,
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    guidance_channels: int | None = None,
) -> Prediction:
    """Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598): null + scale (conditional - null).

    Args:
        model: `forward(x_t, t, cond)`; its objective defines what it predicts.
        conditioning: provides the null condition for `cond`.
        cond: the condition of every sample.
        guidance_scale: 1 disables guidance, which saves one of two evaluations.
        guidance_interval: model times with guidance, a closed interval (Kynkaanniemi et al. 2024, arXiv 2404.07724).
        guidance_channels: guide only the first n channels, as the official DiT does (3); None guides those of x. A
            learned variance in further channels is the conditional one.
    """
    low, high = guidance_interval

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        t_batch = torch.full((x.shape[0],), t, dtype=torch.float32, device=x.device)  # (B,)
        if not cond or guidance_scale == 1 or not low <= t <= high:
            return model(x, t_batch, cond).float()
        null = conditioning.null(cond)
        both = {key: torch.cat([cond[key], null[key]]) for key in cond}
        prediction = model(torch.cat([x, x]), t_batch.repeat(2), both).float()  # (2B, C, H, W)
        conditional, unconditional = prediction.chunk(2)
        guided = unconditional + guidance_scale * (conditional - unconditional)
        n = min(guidance_channels or x.shape[1], x.shape[1])
        return torch.cat([guided[:, :n], conditional[:, n:]], dim=1)

    return predict
