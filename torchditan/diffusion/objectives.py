# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The protocol of an objective, and the one that `[diffusion]` asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from torchditan.registry import OBJECTIVES, registered

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.diffusion.samplers import Prediction
    from torchditan.models.spec import ModelSpec
    from torchditan.randomness import Randomness


class Objective(Protocol):
    """What a model learns to predict, and how samples are drawn from that prediction.

    One object does both, so that training and sampling cannot disagree. It knows nothing of ranks.
    """

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> Objective:
        """The objective by the `[diffusion]` options, for a model."""
        ...

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterable[tuple[str, str]]:
        """(option, what would be right) for each option that does not go together with this objective.

        An option that the objective does not read is such a mistake where the job changes it.

        Args:
            config: the options of a job; `timestep_shift` may be filled in.
            changed: names of the options that do not have their default ("sampling.sampler").
        """
        ...

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Per-sample loss.

        Args:
            model: `forward(x_t, t, cond)`; x_t (B, ...) and t (B,) are float32.
            batch: `sample` (B, ...) float32 and the conditioning.
            randomness: the samples' own noise, uniform numbers for their timesteps, and label dropout.

        Returns:
            (B,) float32.
        """
        ...

    def sample(self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
        """From noise (B, ...) float32 to samples (B, ...), with guidance already in `predict`."""
        ...

    def num_evaluations(self, sampling: Sampling) -> int:
        """How often `sample` calls `predict`."""
        ...


def build_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """The objective that `diffusion.objective` names; a timestep shift that is left open is the model's own."""
    objective: Objective = registered(OBJECTIVES, config.objective).build(config, spec)
    return objective
