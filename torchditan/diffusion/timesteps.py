# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Distributions of the timestep t in [0, 1]. Everywhere t = 0 is noise and t = 1 is data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


def shift_timesteps(t: torch.Tensor, shift: float) -> torch.Tensor:
    """Move timesteps towards noise: t / (t + shift (1 - t)).

    With noise level s = 1 - t this is s' = shift s / (1 + (shift - 1) s), equation 23 of Esser et al.
    2024 (arXiv 2403.03206), where shift = sqrt(m / n) for m against n values per sample.
    """
    return t / (t + shift * (1 - t))


@dataclass(frozen=True)
class Timesteps:
    """Training timesteps, by the inverse of their distribution function, and the timesteps that samplers use.

    Args:
        kind: uniform, or logit_normal (section 3.1 of Esser et al. 2024): logit(t) ~ N(mean, std^2).
        mean: mean of logit(t); a value below 0 trains more on noisy samples.
        std: standard deviation of logit(t), positive.
        shift: see `shift_timesteps`; 1 changes nothing.
        sampling_shift: number of steps -> shift in sampling. None: the same as in training.
    """

    kind: Literal["uniform", "logit_normal"]
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    sampling_shift: Callable[[int], float] | None = None

    def __call__(self, uniform: torch.Tensor) -> torch.Tensor:
        """Uniform numbers (B,) float32 in [0, 1) -> timesteps (B,) float32 in [0, 1]."""
        t = uniform
        if self.kind == "logit_normal":
            t = torch.sigmoid(self.mean + self.std * _ndtri(uniform))
        return shift_timesteps(t, self.shift)

    def grid(self, num_steps: int, *, shift: float | None = None) -> list[float]:
        """num_steps + 1 timesteps from 0 (noise) to 1 (data), with this shift instead of the usual one."""
        if shift is None:
            shift = self.shift if self.sampling_shift is None else self.sampling_shift(num_steps)
        return shift_timesteps(torch.linspace(0, 1, num_steps + 1, dtype=torch.float64), shift).tolist()


def _ndtri(uniform: torch.Tensor) -> torch.Tensor:
    """The quantile function of the normal distribution, (B,) -> (B,). On the CPU instead of MPS, which lacks it."""
    if uniform.device.type == "mps":
        return torch.special.ndtri(uniform.cpu()).to(uniform.device)
    return torch.special.ndtri(uniform)
