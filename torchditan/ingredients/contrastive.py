# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Contrastive flow matching (Stoica et al. 2025, arXiv 2506.05350).

The paper's loss is |v - u|^2 - weight |v - u'|^2. Here v is the model's velocity, u = x - noise that of the sample, and
u' = x' - noise' that of its negative, another sample. The negative is unrelated to x_t and to the label, so for every
x_t, t and label the loss is smallest at

    v = (E[u | x_t, label] - weight mean(x)) / (1 - weight).

That is the velocity of flow matching, minus a constant, and longer by a factor of 1 / (1 - weight): 1.053 for a weight
of 0.05. Two things follow:

- an ideal model draws from another distribution than that of the data. As in the paper, samplers integrate v as it is.
  For samples with guidance the authors' script removes the bias, with (1 - weight) v + weight mean(x). Here samples are
  contrasted whether or not their label is dropped, so the bias of both predictions is the same, and also that of any
  guided one;
- the plain loss of an ideal model is not the smallest possible one. Compare runs by their samples too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchditan.config.errors import option_error
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Ingredient, Inputs, Objective
from torchditan.randomness import Randomness

if TYPE_CHECKING:
    from torchditan.config.options import Config


@dataclass(frozen=True)
class Contrastive(Ingredient):
    """Flow matching whose gradient also leads away from the velocity of another sample.

    The negative of stream position i is i XOR 1, its neighbour in the shuffled stream. A micro-batch has an even number
    of consecutive positions and starts at an even one, so it contains both.
    """

    weight: float = 0.05
    """At least 0 and below 1; from 1 on, the loss has no minimum."""

    batch_multiple = 2

    def __post_init__(self) -> None:
        if not 0 <= self.weight < 1:
            right = "weight must be 0 or more and below 1; the paper has 0.05"
            raise option_error("diffusion.ingredients", f"contrastive weight={self.weight}", right)

    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        if not issubclass(objective, FlowMatching):
            yield "diffusion.ingredients", f"contrastive needs flow_matching, not {config.diffusion.objective}"

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        """The base's error. The gradient also has -weight |v - u'|^2, with the weight of the base's error.

        The value is that of flow matching alone. Runs with and without the term compare, the loss stays positive, and
        loss spikes are found as before.
        """
        error = self.base.error(prediction, inputs, batch, randomness)
        root = self.root
        assert isinstance(root, FlowMatching), "mistakes refuses others"
        if not prediction.requires_grad or len(prediction) % 2:  # a single sample is one of the FLOP counter
            return error
        t = root.model_time(inputs.t)
        predicted = root.velocity(prediction.float(), inputs.x_t, wide(t, inputs.x_t))
        negative = (batch["sample"] - randomness.noise).unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        distance = self.weight * (predicted - negative).square().flatten(1).mean(1)
        if root.min_snr_gamma is not None:
            distance = distance * root.weight(t)
        return error + (distance.detach() - distance)
