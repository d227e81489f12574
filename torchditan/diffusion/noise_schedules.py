# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The noise levels of a denoising diffusion, and the distributions of one level given the next.

Level k of 1000 is x_k = a_k x + s_k noise, with a_k^2 = prod(1 - beta) up to k and a_k^2 + s_k^2 = 1 (Ho et al. 2020,
arXiv 2006.11239). A sampler may use fewer levels: they are a diffusion with larger betas (Nichol and Dhariwal 2021,
arXiv 2102.09672).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

NUM_LEVELS = 1000
_MAX_BETA = 0.999

Schedule = Literal["linear", "cosine", "scaled_linear"]
Spacing = Literal["trailing", "leading", "linspace"]


class Levels(NamedTuple):
    """Some or all levels, from data to noise: (n,) each, or one value of each.

    The posterior is q(x_before | x_k, x), where x_before is the level before k in this list, or x itself.
    """

    signal: torch.Tensor
    """a_k."""
    noise: torch.Tensor
    """s_k."""
    posterior_of_sample: torch.Tensor
    """Coefficient of x in the mean of the posterior."""
    posterior_of_state: torch.Tensor
    """Coefficient of x_k in the mean of the posterior."""
    log_posterior_variance: torch.Tensor
    """That of the first level, which is -infinity, is replaced by that of the second."""
    log_beta: torch.Tensor
    """Of the noise that leads from the level before to this one."""


def betas(schedule: Schedule) -> torch.Tensor:
    """Variance of the noise that leads from level k - 1 to level k: (1000,) float64.

    linear is Ho et al. (2020), cosine is equation 17 of Nichol and Dhariwal (2021) with betas of at most 0.999, and
    scaled_linear, whose roots are evenly spaced, is Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752).
    """
    if schedule == "linear":
        return torch.linspace(1e-4, 0.02, NUM_LEVELS, dtype=torch.float64)
    if schedule == "scaled_linear":
        return torch.linspace(0.00085**0.5, 0.012**0.5, NUM_LEVELS, dtype=torch.float64) ** 2
    t = torch.arange(NUM_LEVELS + 1, dtype=torch.float64) / NUM_LEVELS
    squared_signal = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - squared_signal[1:] / squared_signal[:-1]).clamp(max=_MAX_BETA)


def levels_of(schedule: Schedule, kept: Sequence[int] | None = None) -> Levels:
    """The tables of a schedule, computed in float64 and returned as (n,) float32 on the CPU.

    Args:
        schedule: see `betas`.
        kept: increasing levels; None keeps all.
    """
    squared = torch.cumprod(1 - betas(schedule), dim=0)  # a_k^2
    if kept is not None:
        squared = squared[list(kept)]
    before = torch.cat([squared.new_ones(1), squared[:-1]])
    beta = 1 - squared / before
    variance = (1 - before) / (1 - squared) * beta
    variance[0] = variance[min(1, len(variance) - 1)]
    found = Levels(
        signal=squared.sqrt(),
        noise=(1 - squared).sqrt(),
        posterior_of_sample=before.sqrt() * beta / (1 - squared),
        posterior_of_state=(1 - beta).sqrt() * (1 - before) / (1 - squared),
        log_posterior_variance=variance.log(),
        log_beta=beta.log(),
    )
    return Levels(*(table.float() for table in found))


def levels_at(schedule: Schedule, level: torch.Tensor) -> Levels:
    """The values at levels (B,) int64, each (B,) float32 on the device of `level`."""
    if level.device.type == "meta":  # every trace of a step must contain the same operators, cached or not
        return Levels(*torch.empty(len(Levels._fields), NUM_LEVELS, device="meta")[:, level])
    return Levels(*_stacked(schedule, level.device)[:, level])


@functools.lru_cache(maxsize=8)
def _stacked(schedule: Schedule, device: torch.device) -> torch.Tensor:
    """All tables, (6, 1000). Cached, because a copy to a device makes the host wait."""
    return torch.stack(levels_of(schedule)).to(device)


def spaced_levels(spacing: Spacing, num_steps: int) -> list[int]:
    """The increasing levels of a sampler with `num_steps` from 1 to 1000.

    For 10 steps: trailing 99, 199, ..., 999 (Lin et al. 2023, arXiv 2305.08891); leading 0, 100, ..., 900 (DDIM and
    ADM's "ddim10"); linspace 0, 111, ..., 999 (ADM's and DiT's "10", "250"). Where `num_steps` does not divide 1000,
    trailing rounds down and leading has the stride 1000 // num_steps; other programs may differ by one level.
    """
    if spacing == "trailing":
        return [NUM_LEVELS * (i + 1) // num_steps - 1 for i in range(num_steps)]
    if spacing == "leading":
        return [i * (NUM_LEVELS // num_steps) for i in range(num_steps)]
    if num_steps == 1:
        return [NUM_LEVELS - 1]
    return [round(i * (NUM_LEVELS - 1) / (num_steps - 1)) for i in range(num_steps)]
