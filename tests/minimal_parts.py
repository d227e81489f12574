# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Small parts that use the extension points, for tests of the core: `--model.block=minimal_parts:CarryingBlock`.

The core's tests need no recipe of torchditan/ingredients, which has tests of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Ingredient, Inputs, Losses, Objective
from torchditan.models.dit import DiTBlock, DiTConfig
from torchditan.models.spec import Head, ModelSpec
from torchditan.randomness import Kind, Randomness

CARRYING, PAIRED, TAUGHT, LOOKS_INSIDE = (
    f"{__name__}:{name}" for name in ("CarryingBlock", "Paired", "Taught", "LooksInside")
)


class CarryingBlock(DiTBlock):
    """Adds the normed input of the first block, times a trained scale, to its input. The first block passes it on."""

    zero_weights = (*DiTBlock.zero_weights, "first_scale")

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.first_scale = nn.Parameter(torch.empty(1))

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        carried = self.norm1(x) if first is None else first  # (B, N, D)
        x = super().forward(x + self.first_scale * carried, c, rope, text, mask)
        return (x, carried) if first is None else x


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
class Taught(Ingredient):
    """Adds the distance of a head on the first block from a later block of the teacher, at a time of its own."""

    width: int

    uses_teacher = True
    features = ("early", "blocks.1")

    @classmethod
    def around(cls, base: Objective, spec: ModelSpec) -> Taught:
        return cls(base, spec.config.width)

    @property
    def numbers(self) -> Mapping[str, Kind]:
        return {**self.base.numbers, "teacher_time": "uniform"}

    @property
    def heads(self) -> Mapping[str, Head]:
        return {**self.base.heads, "early": Head("blocks.0", lambda: nn.Linear(self.width, self.width))}

    def loss(self, model: Any, batch: Any, randomness: Randomness, teacher: Any = None) -> Losses:
        inputs = self.base.inputs(batch, randomness)
        prediction, found = model(*inputs, features=["early"])
        error = self.base.error(prediction, inputs, batch, randomness)
        t, x = randomness["teacher_time"], batch["sample"]
        x_t = wide(t, x) * x + (1 - wide(t, x)) * randomness.noise
        _, targets = teacher(x_t, self.base.model_time(t), inputs.cond, features=["blocks.1"])
        distance = (found["early"].float() - targets["blocks.1"].float()).square().flatten(1).mean(1)
        return Losses(error + distance, {"loss": error.detach(), "distance": distance.detach()})


class LooksInside(FlowMatching):
    """Asks the model and a teacher for features, the model first."""

    uses_teacher = True
    features = ("blocks.1",)

    def loss(self, model: Any, batch: Any, randomness: Any, teacher: Any = None) -> torch.Tensor:
        inputs = self.inputs(batch, randomness)
        prediction, own = model(*inputs, features=self.features)
        _, averaged = teacher(*inputs, features=self.features)
        distance = (own["blocks.1"] - averaged["blocks.1"]).float().square().flatten(1).mean(1)
        return self.error(prediction, inputs, batch, randomness) + distance
