# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Flow matching on straight paths (Lipman et al. 2022, arXiv 2210.02747; Liu et al. 2022, arXiv 2209.03003)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from torchditan.diffusion import predictions
from torchditan.diffusion.objectives import MIN_SNR_GAMMA, Inputs, Objective
from torchditan.diffusion.samplers import Prediction, StepNoise, Velocity, build_sampler
from torchditan.diffusion.timesteps import Timesteps
from torchditan.randomness import Randomness

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.models.spec import Conditioning, ModelSpec


@dataclass(frozen=True)
class FlowMatching(Objective):
    """x_t = (1 - t) noise + t x; the model predicts the velocity dx_t/dt = x - noise, or x, or the noise (epsilon).

    The loss is that of the velocity for each of them, optionally with min-SNR weights (diffusion/predictions.py). To
    train another prediction on the same path, override `target` and `velocity` in a subclass.
    """

    conditioning: Conditioning
    timesteps: Timesteps
    label_dropout: float
    prediction: Literal["epsilon", "v", "x"] = field(default="v", kw_only=True)
    min_snr_gamma: float | None = field(default=None, kw_only=True)
    """None: no weights."""

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> FlowMatching:
        return cls(
            conditioning=spec.conditioning,
            timesteps=Timesteps(
                kind=config.timestep_sampling,
                mean=config.logit_normal_mean,
                std=config.logit_normal_std,
                shift=spec.timestep_shift if config.timestep_shift is None else config.timestep_shift,
                sampling_shift=spec.sampling_shift,
            ),
            label_dropout=config.label_dropout,
            prediction=config.prediction or "v",
            min_snr_gamma=MIN_SNR_GAMMA if config.loss_weighting == "min_snr" else None,
        )

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        """A native model with a learned variance, which has no target here, and options of ddpm."""
        model = config.model
        right = "flow matching does not predict a variance; set --model.learn_sigma=false or --diffusion.objective=ddpm"
        if model.learn_sigma:
            yield "model.learn_sigma", right
        if model.learn_sigma is None and model.preset == "official":
            yield "model.preset", f"learns sigma, and {right}"
        if config.diffusion.prediction not in (None, "v"):
            yield from predictions.option_mistakes(config)
        for option in ("diffusion.noise_schedule", "sampling.spacing", "sampling.clip_sample"):
            if option in changed:
                yield option, "applies only to ddpm; leave it out"

    def target(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The target of the model's prediction, for samples x (B, ...) and noise (B, ...)."""
        if self.prediction == "epsilon":
            return noise
        return x if self.prediction == "x" else x - noise

    def velocity(self, prediction: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """dx_t/dt from a prediction of the model, or from its target, in the loss. `field` is that of samplers.

        Args:
            prediction: (B, ...) float32, the model's output or its target.
            x_t: (B, ...) float32, the model's input.
            t: float32, broadcasts over x_t.
        """
        if self.prediction == "v":
            return prediction
        return predictions.velocity_of(prediction, x_t, t, kind=self.prediction)

    def inputs(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        """x_t, t and the condition, dropped for some samples."""
        return self.inputs_at(self.timesteps(randomness.timestep), batch, randomness)

    def inputs_at(self, t: torch.Tensor, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        """`inputs` at the times t (B,)."""
        x, noise = batch["sample"], randomness.noise  # (B, C, H, W)
        t_wide = wide(t, x)
        x_t = (1 - t_wide) * noise + t_wide * x
        cond = self.conditioning.from_batch(batch)
        return Inputs(x_t, t, self.conditioning.drop(cond, randomness.label_dropout < self.label_dropout))

    def error(
        self, prediction: torch.Tensor, inputs: Inputs, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor:
        """|velocity(prediction) - velocity(target)|^2, averaged over the values of each sample: (B,) float32.

        With min-SNR, times the weight at t.
        """
        x_t, t, _ = inputs
        t_wide = wide(t, x_t)
        velocity = self.velocity(self.target(batch["sample"], randomness.noise), x_t, t_wide)
        predicted = self.velocity(prediction.float(), x_t, t_wide)
        loss = (predicted - velocity).square().flatten(1).mean(1)
        if self.min_snr_gamma is None:
            return loss
        return loss * predictions.min_snr_weight(t, kind=self.prediction, gamma=self.min_snr_gamma)

    def sample(
        self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling, step_noise: StepNoise
    ) -> torch.Tensor:
        """Integrate the velocity from t = 0 to t = 1."""
        timesteps = self.timesteps.grid(sampling.num_steps, shift=sampling.timestep_shift)
        sampler = build_sampler(sampling)
        return sampler.flow(self.field(predict, timesteps), noise, timesteps=timesteps, step_noise=step_noise)

    def field(self, predict: Prediction, timesteps: list[float]) -> Velocity:
        """The velocity that samplers integrate through these timesteps."""
        if self.prediction == "v":
            return lambda x, t: self.velocity(predict(x, t), x, torch.full((), t, device=x.device))
        return predictions.sampling_velocity(predict, kind=self.prediction, timesteps=timesteps)

    def num_evaluations(self, sampling: Sampling) -> int:
        sampler = build_sampler(sampling)
        is_skipped = self.prediction == "x" and sampler.evaluates_end  # `sampling_velocity` does not evaluate t = 1
        return sampler.evaluations_per_step * sampling.num_steps - is_skipped


def wide(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """t (B,) -> (B, 1, ...), to broadcast over x (B, ...)."""
    return t.view(-1, *[1] * (x.dim() - 1))
