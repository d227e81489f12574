# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Denoising diffusion with a fixed table of noise levels and noise prediction (Ho et al. 2020, arXiv 2006.11239).

Level k of 1000 is t = 1 - k / 1000, so t = 1 is data here too. A sample of level k is a_k x + s_k noise, with
a_k^2 = prod(1 - beta) up to k and a_k^2 + s_k^2 = 1. The betas are the squares of evenly spaced roots, from 0.00085 to
0.012, as in Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752; Podell et al. 2023, 2307.01952).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchditan.diffusion.objectives import Objective
from torchditan.diffusion.samplers import Prediction
from torchditan.randomness import Randomness
from torchditan.registry import FAMILIES

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.models.spec import Conditioning, ModelSpec

NUM_LEVELS = 1000
_BETAS = (0.00085, 0.012)
_NOT_READ = (
    "diffusion.timestep_sampling",
    "diffusion.logit_normal_mean",
    "diffusion.logit_normal_std",
    "sampling.sampler",
)


def signal_and_noise(level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, s) float32 for levels 0 to 999, with the shape and device of `level`."""
    is_counted = level.device.type == "meta"  # every trace of a step must contain the same operators
    squared = (_squared_signal.__wrapped__ if is_counted else _squared_signal)(level.device)[level]
    return squared.sqrt().float(), (1 - squared).sqrt().float()


@functools.lru_cache(maxsize=4)
def _squared_signal(device: torch.device) -> torch.Tensor:
    """a^2 of every level, (1000,) float64. Cached, because a copy to a device makes the host wait."""
    low, high = (beta**0.5 for beta in _BETAS)
    betas = torch.linspace(low, high, NUM_LEVELS, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0).to(device)


@dataclass(frozen=True)
class DDPM(Objective):
    """The model predicts the noise of a sample at a uniformly drawn level."""

    conditioning: Conditioning
    label_dropout: float

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> DDPM:
        return cls(conditioning=spec.conditioning, label_dropout=config.label_dropout)

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        """Models trained with another objective, and options of other objectives' timesteps and samplers."""
        if config.model.name not in FAMILIES:  # a family checks its own objective
            yield "diffusion.objective", "applies only to models trained with it (sdxl); must be flow_matching"
        for option in _NOT_READ:
            if option in changed:
                yield option, "has no effect with ddpm, which has its own levels and sampler; leave it out"
        if config.diffusion.timestep_shift not in (None, 1):  # configurations are completed with 1
            yield "diffusion.timestep_shift", "has no effect with ddpm, which has its own levels; leave it out"

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Squared error of the predicted noise, averaged over the values of each sample: (B,) float32.

        Args:
            model: `forward(x_t, t, cond)`, with t = 1 - level / 1000 (B,) float32.
            batch: `sample` (B, ...) float32 and the tensors of the condition.
            randomness: noise, levels (from its timesteps) and caption dropout of the samples.
        """
        x, noise = batch["sample"], randomness.noise
        level = (randomness.timestep * NUM_LEVELS).long()  # (B,)
        a, s = (value.view(-1, *[1] * (x.dim() - 1)) for value in signal_and_noise(level))
        cond = self.conditioning.from_batch(batch)
        cond = self.conditioning.drop(cond, randomness.label_dropout < self.label_dropout)
        prediction = model(a * x + s * noise, 1 - level / NUM_LEVELS, cond).float()
        return (prediction - noise).square().flatten(1).mean(1)

    def sample(self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
        """Deterministic steps through evenly spaced levels (DDIM, Song et al. 2020, arXiv 2010.02502).

        Args:
            predict: (x (B, ...), t) -> predicted noise in x, including guidance.
            noise: (B, ...) float32, the state at the highest level.
            sampling: provides the number of steps.
        """
        num_steps = sampling.num_steps
        levels = [NUM_LEVELS * (num_steps - i) // num_steps - 1 for i in range(num_steps)] + [-1]
        x = noise
        for level, next_level in itertools.pairwise(levels):
            predicted = predict(x, 1 - level / NUM_LEVELS)
            a, s = (value.item() for value in signal_and_noise(torch.tensor(level)))
            clean = (x - s * predicted) / a
            if next_level < 0:
                return clean
            a, s = (value.item() for value in signal_and_noise(torch.tensor(next_level)))
            x = a * clean + s * predicted
        return x

    def num_evaluations(self, sampling: Sampling) -> int:
        return sampling.num_steps
