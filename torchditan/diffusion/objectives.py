# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The protocol of an objective, and the one that `[diffusion]` asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch import nn

from torchditan.config.errors import option_error
from torchditan.registry import OBJECTIVES, registered

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.diffusion.samplers import Prediction
    from torchditan.models.spec import ModelSpec
    from torchditan.randomness import Randomness


Loss = Callable[[nn.Module, dict[str, torch.Tensor], "Randomness"], torch.Tensor]
"""(model, batch, randomness) -> per-sample loss (B,) float32."""


class Objective(Protocol):
    """What a model learns to predict, and how samples are drawn from that prediction. Objectives inherit from it.

    One object does both, so that training and sampling cannot disagree. It knows nothing of ranks.
    """

    uses_teacher: ClassVar[bool] = False
    """`loss` has a fourth argument, `teacher`: the EMA model as it is before the step's update, called like the model
    and without gradients."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names, of `ModelSpec.features`, that `loss` asks the model or the teacher for."""
        return ()

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
            model: `forward(x_t, t, cond)`; x_t (B, ...) and t (B,) are float32. With `features=names` it returns
                (prediction, {name: tokens (B, N, D)}).
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
    """The objective that `diffusion.objective` names; a timestep shift that is left open is the model's own.

    Raises:
        ConfigError: it asks for features that the model does not have.
    """
    objective: Objective = registered(OBJECTIVES, config.objective).build(config, spec)
    if unknown := [name for name in objective.features if name not in spec.features]:
        known = f"has {spec.features[0]} to {spec.features[-1]}" if spec.features else "has none"
        right = f"asks for the features {', '.join(unknown)}, and {spec.name} {spec.flavor} {known}"
        raise option_error("diffusion.objective", config.objective, right)
    return objective


def loss_with_teacher(objective: Objective, teacher: nn.Module | None) -> Loss:
    """The loss of an objective that uses a teacher, with this one; that of others as it is."""
    if not objective.uses_teacher:
        return objective.loss
    assert teacher is not None
    return partial(cast(Any, objective.loss), teacher=teacher)
