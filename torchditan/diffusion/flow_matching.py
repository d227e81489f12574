# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Flow matching on straight paths (Lipman et al. 2022, arXiv 2210.02747; Liu et al. 2022, arXiv 2209.03003)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from torchditan.diffusion.timesteps import TimestepSampling
from torchditan.randomness import Randomness

if TYPE_CHECKING:
    from torchditan.models.spec import Conditioning


class Objective(Protocol):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Per-sample loss, (B,) float32."""


@dataclass(frozen=True)
class FlowMatching:
    """x_t = (1 - t) noise + t x; the model predicts the velocity dx_t/dt = x - noise."""

    conditioning: Conditioning
    timesteps: TimestepSampling
    label_dropout: float

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Squared error of the predicted velocity, averaged over each sample's values.

        Args:
            model: `forward(x_t, t, cond)`; x_t (B, ...) and t (B,) are float32.
            batch: `sample` (B, ...) float32 and the conditioning.
            randomness: the samples' own noise, timesteps and label dropout.

        Returns:
            (B,) float32.
        """
        x, noise = batch["sample"], randomness.noise  # (B, C, H, W)
        t = self.timesteps(randomness.timestep)  # (B,)
        t_wide = t.view(-1, *[1] * (x.dim() - 1))  # (B, 1, 1, 1)
        x_t = (1 - t_wide) * noise + t_wide * x
        velocity = x - noise

        cond = self.conditioning.from_batch(batch)
        cond = self.conditioning.drop(cond, randomness.label_dropout < self.label_dropout)
        prediction = model(x_t, t, cond).float()
        return (prediction - velocity).square().flatten(1).mean(1)
