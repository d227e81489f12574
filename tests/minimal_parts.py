# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Small parts that use the extension points: `--diffusion.ingredients=minimal_parts:Aligned`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchditan.diffusion.objectives import Ingredient, Inputs, Losses, Objective
from torchditan.models.dit import patchify
from torchditan.models.spec import Head, ModelSpec
from torchditan.randomness import Randomness

PAIRED, ALIGNED = (f"{__name__}:{name}" for name in ("Paired", "Aligned"))


@dataclass(frozen=True)
class Paired(Ingredient):
    """Adds the distance of the predictions for positions i and i XOR 1 of the stream."""

    batch_multiple = 2

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        error = self.base.error(prediction, inputs, batch, randomness)
        if len(prediction) % 2:  # a single sample is one of the FLOP counter
            return error
        partner = prediction.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        return error + 0.2 * (prediction - partner).float().square().flatten(1).mean(1)


@dataclass(frozen=True)
class Aligned(Ingredient):
    """Adds the distance of a head on the first block from fixed features of the clean sample: its patches."""

    patch_size: int
    sizes: tuple[int, int]
    weight: float

    features = ("early",)

    @classmethod
    def around(cls, base: Objective, spec: ModelSpec, weight: float = 0.5) -> Aligned:
        size, channels = spec.config.patch_size, spec.sample_shape[0]
        return cls(base, size, (spec.config.width, size**2 * channels), weight)

    @property
    def heads(self) -> Mapping[str, Head]:
        return {**self.base.heads, "early": Head("blocks.0", lambda: nn.Linear(*self.sizes))}

    def loss(self, model: Any, batch: Any, randomness: Randomness) -> Losses:
        inputs = self.base.inputs(batch, randomness)
        prediction, found = model(*inputs, features=self.features)
        error = self.base.error(prediction, inputs, batch, randomness)
        distance = (found["early"].float() - patchify(batch["sample"], self.patch_size)).square().flatten(1).mean(1)
        return Losses(error + self.weight * distance, {"loss": error.detach(), "distance": distance.detach()})
