# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The direction of the velocity as a second term of the loss (LightningDiT, Yao et al. 2025, arXiv 2501.01423)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchditan.config.options import Config
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Ingredient, Inputs, Objective
from torchditan.randomness import Randomness


@dataclass(frozen=True)
class CosineVelocity(Ingredient):
    """loss + weight (1 - cos(predicted velocity, velocity)), over the channels of each position, then averaged."""

    weight: float = 1.0

    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        if not issubclass(objective, FlowMatching):
            yield "diffusion.objective", "must be flow_matching with cosine_velocity"

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        root: Any = self.root
        x_t, t = inputs.x_t, wide(inputs.t, inputs.x_t)
        velocity = root.velocity(root.target(batch["sample"], randomness.noise), x_t, t)
        predicted = root.velocity(prediction.float(), x_t, t)  # (B, C, ...)
        cosine = F.cosine_similarity(predicted, velocity, dim=1).flatten(1).mean(1)
        return self.base.error(prediction, inputs, batch, randomness) + self.weight * (1 - cosine)
