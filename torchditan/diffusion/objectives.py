# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The interface of an objective, and the builder for the options of `[diffusion]`."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch import nn

from torchditan.config.errors import option_error
from torchditan.registry import OBJECTIVES, SELF_ALIGNMENT, registered

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.diffusion.samplers import Prediction
    from torchditan.models.spec import ModelSpec
    from torchditan.randomness import Randomness


Loss = Callable[[nn.Module, dict[str, torch.Tensor], "Randomness"], torch.Tensor]
"""(model, batch, randomness) -> per-sample loss (B,) float32."""


class Objective(Protocol):
    """The model's training target, loss and sampler. Objectives inherit from this protocol.

    One object does both, so that training and sampling always agree. It is independent of ranks.
    """

    uses_teacher: ClassVar[bool] = False
    """If true, `loss` has a fourth argument `teacher`: the EMA model before the step's update. Call it like the model;
    it computes without gradients."""
    uses_step_noise: ClassVar[bool] = False
    """If true, `sample` has a keyword `step_noise`: (number of the step, from 0) -> standard normal (B, ...)."""

    table_bytes: ClassVar[int] = 0
    """Bytes of the tables that `loss` keeps on each device, for the planner."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names from `ModelSpec.features` that `loss` requests from the model or the teacher."""
        return ()

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> Objective:
        """Build the objective from the `[diffusion]` options, for a model."""
        ...

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterable[tuple[str, str]]:
        """(option, what would be right) for each option that this objective does not support.

        An option that the objective does not read is an error if the job changes it.

        Args:
            config: the options of a job, possibly with a completed `timestep_shift`.
            changed: names of the options whose value is not the default ("sampling.sampler").
        """
        ...

    def model_time(self, t: Any) -> Any:
        """t, a number or tensor (0 is noise, 1 is data), as the time that the model receives. Its own inverse."""
        return t

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Per-sample loss.

        Args:
            model: `forward(x_t, t, cond)`; x_t (B, ...) and t (B,) are float32. With `features=names` it returns
                (prediction, {name: tokens (B, N, D)}).
            batch: `sample` (B, ...) float32 and the tensors of the condition.
            randomness: noise, uniform numbers for the timesteps, and label dropout of the samples.

        Returns:
            (B,) float32.
        """
        ...

    def sample(self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
        """Noise (B, ...) float32 -> samples (B, ...). `predict` includes guidance."""
        ...

    def num_evaluations(self, sampling: Sampling) -> int:
        """Number of calls of `predict` in `sample`."""
        ...


def build_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """Build the objective named by `diffusion.objective`. If no timestep shift is set, the model's default applies.

    Raises:
        ConfigError: the objective requests features that the model does not have.
    """
    objective: Objective = registered(OBJECTIVES, config.objective).build(config, spec)
    if config.self_alignment and "alignment_head" in spec.features:
        objective = pkgutil.resolve_name(SELF_ALIGNMENT).around(objective, config, spec)
    if unknown := [name for name in objective.features if name not in spec.features]:
        known = f"has {spec.features[0]} to {spec.features[-1]}" if spec.features else "has none"
        right = f"asks for the features {', '.join(unknown)}, and {spec.name} {spec.flavor} {known}"
        raise option_error("diffusion.objective", config.objective, right)
    return objective


def training_spec(config: Diffusion, spec: ModelSpec) -> ModelSpec:
    """The model with the parts that only training needs, without which `build_objective` gives the plain objective."""
    return pkgutil.resolve_name(SELF_ALIGNMENT).training_spec(config, spec) if config.self_alignment else spec


def validation_loss(config: Diffusion, spec: ModelSpec, teacher: nn.Module | None) -> Loss:
    """The loss without weighting and without terms that only help training, so that runs with other ones compare."""
    plain = dataclasses.replace(config, loss_weighting="none", self_alignment=0.0)
    return loss_with_teacher(build_objective(plain, spec), teacher)


def loss_with_teacher(objective: Objective, teacher: nn.Module | None) -> Loss:
    """Bind the teacher to the loss of an objective that uses one. Returns other losses unchanged."""
    if not objective.uses_teacher:
        return objective.loss
    assert teacher is not None
    return partial(cast(Any, objective.loss), teacher=teacher)


def sampler_with_noise(objective: Objective, step_noise: Callable[[int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Bind the noise of the steps to the sampler of an objective that uses it. Returns other samplers unchanged."""
    if not objective.uses_step_noise:
        return objective.sample
    return partial(cast(Any, objective.sample), step_noise=step_noise)


def loss_at_uniform_timesteps(config: Diffusion, spec: ModelSpec, teacher: nn.Module | None) -> Loss:
    """The `validation_loss`, with timesteps uniform in [0, 1] in place of the training distribution.

    On the straight path, `randomness.timestep` is then t. The loss of a sample at a given t does not change.
    """
    uniform = dataclasses.replace(config, timestep_sampling="uniform", timestep_shift=1.0)
    return validation_loss(uniform, spec, teacher)
