# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Denoising diffusion with a fixed table of noise levels (Ho et al. 2020, arXiv 2006.11239).

Notable:
- the model's time is that of the paper, level / 1000, so 0 is data. `DDPM.model_time` is the only conversion between
  this time and t, which is 1 for data;
- the model predicts the noise (epsilon), v = a noise - s x (Salimans and Ho 2022, arXiv 2202.00512), or x;
- a model with twice the channels also predicts the variance of each step, which the variational bound trains (Nichol
  and Dhariwal 2021, arXiv 2102.09672; Dhariwal and Nichol 2021, arXiv 2105.05233).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from torchditan.diffusion.noise_schedules import (
    NUM_LEVELS,
    Levels,
    Schedule,
    levels_at,
    levels_of,
    spaced_levels,
)
from torchditan.diffusion.objectives import MIN_SNR_GAMMA, Inputs, Objective
from torchditan.diffusion.samplers import Denoised, Prediction, Step, StepNoise, build_sampler
from torchditan.randomness import Randomness
from torchditan.registry import FAMILIES

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.models.spec import Conditioning, ModelSpec

_NOT_READ = (
    "diffusion.timestep_sampling",
    "diffusion.logit_normal_mean",
    "diffusion.logit_normal_std",
    "sampling.timestep_shift",
)
_MIN_PROBABILITY = 1e-12  # of a bin, as in ADM: limits the loss where a prediction is far off


@dataclass(frozen=True)
class DDPM(Objective):
    """The model predicts the noise, v or x of a sample at a uniformly drawn level, and optionally a variance."""

    sampler_method: ClassVar[str] = "levels"
    clips_pixels: ClassVar[bool] = True

    conditioning: Conditioning
    label_dropout: float
    prediction: Literal["epsilon", "v", "x"]
    schedule: Schedule
    learn_sigma: bool
    min_snr_gamma: float | None = field(default=None, kw_only=True)
    """Of the weights of Hang et al. (2023, arXiv 2303.09556); None: no weights."""

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> DDPM:
        return cls(
            conditioning=spec.conditioning,
            label_dropout=config.label_dropout,
            prediction=config.prediction or "epsilon",
            schedule=config.noise_schedule or ("scaled_linear" if spec.name in FAMILIES else "linear"),
            learn_sigma=spec.learn_sigma,
            min_snr_gamma=MIN_SNR_GAMMA if config.loss_weighting == "min_snr" else None,
        )

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        """Options of other objectives' timesteps and samplers, and other conventions than a published model's."""
        for option in _NOT_READ:
            if option in changed:
                yield option, "has no effect with ddpm, which has its own levels and sampler; leave it out"
        if config.diffusion.timestep_shift not in (None, 1):  # configurations are completed with 1
            yield "diffusion.timestep_shift", "has no effect with ddpm, which has its own levels; leave it out"
        if config.model.name in FAMILIES:
            for option, own in (("diffusion.prediction", "epsilon"), ("diffusion.noise_schedule", "scaled_linear")):
                if option in changed and getattr(config.diffusion, option.removeprefix("diffusion.")) != own:
                    yield option, f"{config.model.name} was trained with {own}; leave it out"
        elif config.checkpoint.initial_load_convention is not None:
            right = "such weights predict a velocity, which ddpm does not; leave it out, or train with flow_matching"
            yield "checkpoint.initial_load_convention", right
        sampling = config.sampling
        if sampling.num_steps > NUM_LEVELS:
            yield "sampling.num_steps", f"ddpm has {NUM_LEVELS} levels; must be at most {NUM_LEVELS}"
        if sampling.num_steps == 1 and sampling.spacing == "leading":
            yield "sampling.spacing", "with one step, leading starts at the data; must be trailing or linspace"

    def model_time(self, t: Any) -> Any:
        """1 - t. A number is rounded, so that t = 0.8 is level 200 and not the one before it."""
        return 1 - t if isinstance(t, torch.Tensor) else round(1 - t, 9)

    def inputs(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        """x_k, k / 1000 and the condition, dropped for some samples. The levels k come from the timesteps' numbers."""
        level, at = self._levels(batch, randomness)
        cond = self.conditioning.from_batch(batch)
        cond = self.conditioning.drop(cond, randomness.label_dropout < self.label_dropout)
        return Inputs(at.signal * batch["sample"] + at.noise * randomness.noise, level / NUM_LEVELS, cond)

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        """Squared error of the prediction, averaged over the values of each sample: (B,) float32.

        With min-SNR, times the weight of the level. The term of the variance has no weight, since its gradients do not
        reach the prediction.

        With a learned variance, plus the term of the variational bound at the same level, in bits per value. It trains
        only the variance. 1000 times the mean term is the bound, so its weight of 0.001 in L_hybrid (equation 16 of
        Nichol and Dhariwal 2021) is 1 here.
        """
        x = batch["sample"]
        level, at = self._levels(batch, randomness)
        prediction, fraction = self._split(prediction.float())
        error = prediction - self._target(x, randomness.noise, at)
        loss = error.square().flatten(1).mean(1)
        if self.min_snr_gamma is not None:
            loss = loss * min_snr_weight(at, prediction=self.prediction, gamma=self.min_snr_gamma).flatten()
        if fraction is None:
            return loss
        factors: dict[str, Any] = {"epsilon": at.noise / at.signal, "v": at.noise, "x": -1}
        error = factors[self.prediction] * error.detach()  # x minus its prediction
        bound = bound_term(x, error, fraction, is_first=level.view_as(at.signal) == 0, levels=at)
        return loss + bound.flatten(1).mean(1)

    def _levels(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> tuple[torch.Tensor, Levels]:
        """The level of each sample (B,) int64, and the tables there, (B, 1, ...) each."""
        level = (randomness.timestep * NUM_LEVELS).long()
        wide = (-1, *[1] * (batch["sample"].dim() - 1))
        return level, Levels(*(value.view(wide) for value in levels_at(self.schedule, level)))

    def sample(
        self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling, step_noise: StepNoise
    ) -> torch.Tensor:
        """Steps from the highest of the spaced levels to data. `sampling.clip_sample` clips the predicted samples."""
        kept = spaced_levels(sampling.spacing, sampling.num_steps)[::-1]
        tables = zip(*(table.tolist() for table in levels_of(self.schedule, kept[::-1])), strict=True)
        levels: list[Any] = [Levels(*values) for values in tables][::-1]  # of floats
        ends = [(at.signal, at.noise) for at in levels[1:]] + [(1.0, 0.0)]
        steps = [
            Step(at.signal, at.noise, next_signal, next_noise, at.posterior_of_sample, at.posterior_of_state)
            for at, (next_signal, next_noise) in zip(levels, ends, strict=True)
        ]

        def denoise(x: torch.Tensor, number: int) -> Denoised:
            at = levels[number]
            prediction, fraction = self._split(predict(x, kept[number] / NUM_LEVELS))
            clean, predicted_noise = self._clean_and_noise(prediction, x, at)
            if sampling.clip_sample:
                clean = clean.clamp(-1, 1)
                predicted_noise = (x - at.signal * clean) / at.noise
            return Denoised(clean, predicted_noise, _deviation(fraction, at))

        return build_sampler(sampling).levels(denoise, noise, steps=steps, step_noise=step_noise)

    def _split(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The prediction (B, C, ...), and the channels of the variance (B, C, ...) if the model has them."""
        if not self.learn_sigma:
            return output, None
        prediction, fraction = output.chunk(2, dim=1)
        return prediction, fraction

    def _target(self, x: torch.Tensor, noise: torch.Tensor, at: Levels) -> torch.Tensor:
        if self.prediction == "epsilon":
            return noise
        return at.signal * noise - at.noise * x if self.prediction == "v" else x

    def _clean_and_noise(
        self, prediction: torch.Tensor, x: torch.Tensor, at: Levels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The predicted sample and noise in x at a level, from any kind of prediction."""
        a, s = at.signal, at.noise
        if self.prediction == "epsilon":
            return (x - s * prediction) / a, prediction
        if self.prediction == "v":
            return a * x - s * prediction, s * x + a * prediction
        return prediction, (x - a * prediction) / s


def min_snr_weight(at: Levels, *, prediction: Literal["epsilon", "v", "x"], gamma: float) -> torch.Tensor:
    """Weight of a prediction's squared error: min(SNR, gamma) for x, / SNR for epsilon, / (SNR + 1) for v."""
    snr = (at.signal / at.noise).square()
    weight = snr.clamp(max=gamma)
    if prediction == "x":
        return weight
    return weight / (snr if prediction == "epsilon" else snr + 1)


def _log_variance(fraction: torch.Tensor, at: Levels) -> torch.Tensor:
    """Between the posterior's variance (fraction = -1) and beta (fraction = 1), in the logarithm (ibid., eq. 15)."""
    return at.log_posterior_variance + 0.5 * (fraction + 1) * (at.log_beta - at.log_posterior_variance)


def _deviation(fraction: torch.Tensor | None, at: Any) -> Any:
    """Standard deviation of an ancestral step."""
    if fraction is None:
        return math.exp(0.5 * at.log_posterior_variance)
    return torch.exp(0.5 * _log_variance(fraction, at))


def bound_term(
    x: torch.Tensor, error: torch.Tensor, fraction: torch.Tensor, *, is_first: torch.Tensor, levels: Levels
) -> torch.Tensor:
    """One term of the variational bound, of each value, in bits (equations 4 to 7 of Nichol and Dhariwal 2021).

    Args:
        x: samples (B, ...) in [-1, 1].
        error: x minus its prediction.
        fraction: (B, ...), the predicted variance; see `_log_variance`.
        is_first: whether x_k has level 0, and its predecessor is x; broadcasts over x.
        levels: the tables at the level of each sample, broadcast over x.

    Returns:
        The divergence of the posterior from the model's Gaussian, or at level 0 -log p(x): (B, ...) float32.
    """
    log_variance = _log_variance(fraction, levels)
    difference = levels.posterior_of_sample * error  # both means have the same part of x_k
    divergence = gaussian_kl(difference, levels.log_posterior_variance, log_variance)
    surprise = -discretized_log_likelihood(x, difference, log_variance)
    return torch.where(is_first, surprise, divergence) / math.log(2)


def gaussian_kl(difference: torch.Tensor, log_variance: torch.Tensor, other_log_variance: torch.Tensor) -> torch.Tensor:
    """KL(N(m, exp(log_variance)) || N(m + difference, exp(other_log_variance))) in nats."""
    ratio = log_variance - other_log_variance
    return 0.5 * (torch.expm1(ratio) - ratio + difference.square() * torch.exp(-other_log_variance))


def discretized_log_likelihood(x: torch.Tensor, difference: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Log probability, in nats, of the bin around x under a Gaussian with mean x - difference.

    256 bins of width 2 / 255 cover [-1, 1]; the first and the last extend to infinity (section 3.3 of Ho et al. 2020).
    A probability counts as at least 1e-12. The normal distribution function is exact; DiT's code has a tanh
    approximation.
    """
    inverse_deviation = torch.exp(-0.5 * log_variance)
    low = torch.where(x < -0.999, -math.inf, (difference - 1 / 255) * inverse_deviation)
    high = torch.where(x > 0.999, math.inf, (difference + 1 / 255) * inverse_deviation)
    is_upper = difference > 0  # there, the mirrored tail is the precise one
    low, high = torch.where(is_upper, -high, low), torch.where(is_upper, -low, high)
    probability = 0.5 * (torch.erfc(-high / math.sqrt(2)) - torch.erfc(-low / math.sqrt(2)))
    return probability.clamp(min=_MIN_PROBABILITY).log()
