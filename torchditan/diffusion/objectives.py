# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The interface of an objective, of the ingredients that change one, and their builder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchditan.errors import option_error
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Kind, Randomness
from torchditan.registry import INGREDIENTS, OBJECTIVES, build, objective_kinds, resolve

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.diffusion.samplers import Prediction, StepNoise
    from torchditan.models.frozen import Target
    from torchditan.models.spec import Condition, Head, ModelSpec


MIN_SNR_GAMMA = 5.0
"""The highest signal-to-noise ratio that counts in the weights of `diffusion.loss_weighting` min_snr."""


class Inputs(NamedTuple):
    """What the model gets."""

    x_t: torch.Tensor
    """(B, ...) float32."""
    t: torch.Tensor
    """(B,) float32, the time that the model receives (`Objective.model_time`)."""
    cond: Condition


class Losses(NamedTuple):
    """A loss with numbers to log next to it."""

    total: torch.Tensor
    """(B,) float32: what training minimizes."""
    logged: dict[str, torch.Tensor]
    """(B,) float32 each, of the same samples; their means are logged. `loss` replaces `total` in the logs, for a total
    that is weighted adaptively or has more terms. Names must not depend on the step."""


class Objective:
    """The model's training target, loss and sampler, and what it needs of the model and of the data.

    One object does both, so that training and sampling always agree. It is independent of ranks. A subclass is a frozen
    dataclass with `build`, `inputs`, `error` and `sample`. Everything else has a default.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("build", "inputs", "sample")
    """Methods that a subclass has to define, besides `error` or `loss`."""
    sampler_method: ClassVar[str] = "flow"
    """The method of `diffusion.samplers.Sampler` that `sample` calls: `sampling.sampler` must have it."""
    clips_pixels: ClassVar[bool] = False
    """Whether `sampling.clip_sample` is on by default for runs that train on pixels."""
    batch_multiple: ClassVar[int] = 1
    """`training.batch_size` must be a multiple. A micro-batch then starts at a multiple of it in the stream."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options with another default for this objective: `{"sampling.num_steps": 1}`. What the user sets stays."""

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> Objective:
        """Build the objective from `[diffusion]`, for a model. More parameters are options after its name."""
        raise NotImplementedError

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterable[tuple[str, str]]:
        """(option, what would be right) for each option that this objective does not support.

        An option that the objective does not read is an error if the job changes it.

        Args:
            config: the options of a job, possibly with a completed `timestep_shift`.
            changed: names of the options whose value is not the default ("sampling.sampler").
        """
        return ()

    @classmethod
    def scalars(cls, config: Diffusion) -> Mapping[str, float]:
        """Scalar conditions of the model besides t: name -> factor of the number in its embedding.

        The native model has an embedder for each, without effect before the first step. `inputs` gives them as
        `cond[name]` (B,) float32, `sample` as `predict(x, t, name=value)`.
        """
        return {}

    @property
    def computes_more(self) -> bool:
        """Whether `loss` computes more with the model than its prediction, so that its FLOPs are counted."""
        return type(self).loss is not Objective.loss

    @property
    def embeds_guidance(self) -> bool:
        """Whether `sample` gives the guidance scale to the model, so that `predict` computes no second prediction."""
        return False

    @property
    def numbers(self) -> Mapping[str, Kind]:
        """Random numbers of each sample that `inputs` and `loss` read: name -> uniform, one in [0, 1), or normal, of
        the sample's shape. Each is a function of (seed, name, position of the sample)."""
        return NOISE_TIMESTEP_DROPOUT

    @property
    def features(self) -> Collection[str]:
        """Names from `ModelSpec.features` that `loss` requests from the model."""
        return ()

    @property
    def heads(self) -> Mapping[str, Head]:
        """Heads on features of the model, for training only: `model(x_t, t, cond, features=[name])` returns their
        output. Samples, exports and new runs leave them out."""
        return {}

    @property
    def targets(self) -> Mapping[str, Target]:
        """Tensors of the batch that frozen networks compute from the clean images, for `loss`: name -> target."""
        return {}

    def model_time(self, t: Any) -> Any:
        """t, a number or tensor (0 is noise, 1 is data), as the time that the model receives. Its own inverse."""
        return t

    def inputs(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        """The model's inputs for samples.

        Args:
            batch: `sample` (B, ...) float32 and the tensors of the condition.
            randomness: the `numbers` of the samples.
        """
        raise NotImplementedError

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        """Error of the model's prediction (B, ...) for these inputs: (B,) float32."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor | Losses:
        """Per-sample loss, (B,) float32, optionally with numbers to log.

        Args:
            model: `forward(x_t, t, cond)`. With `features=names` it returns (prediction, {name: tokens (B, N, D)}).
            batch: as in `inputs`.
            randomness: as in `inputs`.
        """
        inputs = self.inputs(batch, randomness)
        return self.error(model(*inputs), inputs, batch, randomness)

    def validation_loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor | Losses:
        """The `loss` that validation reports. Batches may have any size."""
        return self.loss(model, batch, randomness)

    def sample(
        self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling, step_noise: StepNoise
    ) -> torch.Tensor:
        """Noise (B, ...) float32 -> samples (B, ...).

        Args:
            predict: the model with its condition and guidance.
            noise: standard normal, of the shape of the samples.
            sampling: the options of `[sampling]`.
            step_noise: noise of the steps, for samplers that draw some.
        """
        raise NotImplementedError

    def num_evaluations(self, sampling: Sampling) -> int:
        """Number of calls of `predict` in `sample`."""
        return sampling.num_steps


@dataclass(frozen=True)
class Ingredient(Objective):
    """Changes another objective, `base`. A subclass overrides what differs; the rest is that of the base.

    Its further fields are its options: `diffusion.ingredients = ["NAME weight=0.1"]` sets `weight`. A class
    method `around(base, spec, ...)` builds it instead, if it needs the model. An ingredient overrides `error`, or
    `loss` in terms of `base.inputs` and `base.error`; only one ingredient of a run may override `loss`. Its `build`,
    `option_mistakes` and `sampler_method` are not used: those of the root objective are.
    """

    base: Objective

    REQUIRED: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterable[tuple[str, str]]:
        """(option, what would be right) for each option of a job that this ingredient does not support."""
        return ()

    @property
    def root(self) -> Objective:
        """The objective without ingredients."""
        return self.base.root if isinstance(self.base, Ingredient) else self.base

    @property
    def numbers(self) -> Mapping[str, Kind]:
        return self.base.numbers

    @property
    def features(self) -> Collection[str]:
        return self.base.features

    @property
    def heads(self) -> Mapping[str, Head]:
        return self.base.heads

    @property
    def targets(self) -> Mapping[str, Target]:
        return self.base.targets

    @property
    def embeds_guidance(self) -> bool:
        return self.base.embeds_guidance

    def model_time(self, t: Any) -> Any:
        return self.base.model_time(t)

    def inputs(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        return self.base.inputs(batch, randomness)

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        return self.base.error(prediction, inputs, batch, randomness)

    def sample(
        self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling, step_noise: StepNoise
    ) -> torch.Tensor:
        return self.base.sample(predict, noise, sampling=sampling, step_noise=step_noise)

    def num_evaluations(self, sampling: Sampling) -> int:
        return self.base.num_evaluations(sampling)


def build_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """Build the objective of `diffusion.objective`, with its ingredients. If no timestep shift is set, the model's
    default applies.

    Raises:
        ConfigError: the objective requests features or scalar conditions that the model does not have.
    """
    kind, options = resolve(OBJECTIVES, "diffusion.objective", config.objective)
    objective: Objective = build(kind.build, "diffusion.objective", config.objective, config, spec, **options)
    option = "diffusion.ingredients"
    ingredients = [(*resolve(INGREDIENTS, option, text), text) for text in config.ingredients]
    # Those that call the model come last, around the others.
    for ingredient, options, text in sorted(ingredients, key=lambda found: found[0].loss is not Objective.loss):
        if hasattr(ingredient, "around"):
            objective = build(ingredient.around, option, text, objective, spec, **options)
        else:
            objective = build(ingredient, option, text, objective, **options)
    _check_needs(objective, config, spec)
    return objective


def _check_needs(objective: Objective, config: Diffusion, spec: ModelSpec) -> None:
    """Check what the objective and its ingredients declare against the model."""
    option, value = "diffusion.objective", config.objective
    if config.ingredients:
        option, value = "diffusion.ingredients", ", ".join(config.ingredients)
    model, known = f"{spec.name} {spec.flavor}", (*spec.features, *objective.heads)
    if objective.heads and not spec.can_have_heads:
        raise option_error(option, value, f"needs heads on the model, which {model} cannot have; leave it out")
    if unknown := [
        name
        for name in (*objective.features, *(head.feature for head in objective.heads.values()))
        if name not in known
    ]:
        has = f"has {spec.features[0]} to {spec.features[-1]}" if spec.features else "has none"
        raise option_error(option, value, f"asks for the features {', '.join(unknown)}, and {model} {has}")
    scalars = [name for kind in objective_kinds(config.objective, config.ingredients) for name in kind.scalars(config)]
    if missing := [name for name in scalars if name not in spec.scalars]:
        raise option_error(option, value, f"gives the model {', '.join(missing)}, which {model} cannot embed")


def validation_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """The objective without weighting and ingredients, so that runs with other ones compare."""
    return build_objective(dataclasses.replace(config, loss_weighting="none", ingredients=[]), spec)


def uniform_objective(config: Diffusion, spec: ModelSpec) -> Objective:
    """The `validation_objective`, with timesteps uniform in [0, 1] in place of the training distribution.

    On the straight path, `randomness.timestep` is then t. The loss of a sample at a given t does not change.
    """
    return validation_objective(dataclasses.replace(config, timestep_sampling="uniform", timestep_shift=1.0), spec)


def batch_multiple(config: Diffusion) -> int:
    """`training.batch_size` must be a multiple of this for the objective and its ingredients."""
    return math.lcm(*(kind.batch_multiple for kind in objective_kinds(config.objective, config.ingredients)))


def split(losses: torch.Tensor | Losses) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to minimize (B,), and the numbers to log (B,) each, among them `loss`."""
    if isinstance(losses, Losses):
        return losses.total, {"loss": losses.total, **losses.logged}
    return losses, {"loss": losses}
