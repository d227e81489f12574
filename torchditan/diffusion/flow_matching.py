# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Flow matching on straight paths (Lipman et al. 2022, arXiv 2210.02747; Liu et al. 2022, arXiv 2209.03003)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchditan.diffusion.samplers import Prediction, solve
from torchditan.diffusion.timesteps import Timesteps
from torchditan.randomness import Randomness

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.models.spec import Conditioning, ModelSpec


@dataclass(frozen=True)
class FlowMatching:
    """x_t = (1 - t) noise + t x; the model predicts the velocity dx_t/dt = x - noise.

    Another prediction on the same path is a subclass with its own `target` and `velocity`.
    """

    conditioning: Conditioning
    timesteps: Timesteps
    label_dropout: float

    @classmethod
    def build(cls, config: Diffusion, spec: ModelSpec) -> FlowMatching:
        return cls(
            conditioning=spec.conditioning,
            timesteps=Timesteps(
                kind=config.timestep_sampling,
                mean=config.logit_normal_mean,
                std=config.logit_normal_std,
                shift=spec.timestep_shift if config.timestep_shift is None else config.timestep_shift,
            ),
            label_dropout=config.label_dropout,
        )

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        """A model of our own that learns a variance, for which there is no target."""
        model = config.model
        right = "flow matching predicts no variance; set --model.learn_sigma=false"
        if model.name == "dit" and model.learn_sigma:
            yield "model.learn_sigma", right
        if model.name == "dit" and model.learn_sigma is None and model.preset == "official":
            yield "model.preset", f"learns sigma, and {right}"

    def target(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """What the model is to predict, of samples x (B, ...) and their noise (B, ...)."""
        return x - noise

    def velocity(self, prediction: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """dx_t/dt by a prediction of the model; the loss compares it and samplers integrate it.

        Args:
            prediction: (B, ...) float32, of the model or its target.
            x_t: (B, ...) float32, what the model saw.
            t: float32, broadcasts over x_t.
        """
        return prediction

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
        """Squared error of the predicted velocity, |velocity(prediction) - velocity(target)|^2, averaged over each
        sample's values: (B,) float32.
        """
        x, noise = batch["sample"], randomness.noise  # (B, C, H, W)
        t = self.timesteps(randomness.timestep)  # (B,)
        t_wide = t.view(-1, *[1] * (x.dim() - 1))  # (B, 1, 1, 1)
        x_t = (1 - t_wide) * noise + t_wide * x
        velocity = self.velocity(self.target(x, noise), x_t, t_wide)

        cond = self.conditioning.from_batch(batch)
        cond = self.conditioning.drop(cond, randomness.label_dropout < self.label_dropout)
        predicted = self.velocity(model(x_t, t, cond).float(), x_t, t_wide)
        return (predicted - velocity).square().flatten(1).mean(1)

    def sample(self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
        """Integrate `velocity` from t = 0 to t = 1, over timesteps shifted as in training."""

        def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
            return self.velocity(predict(x, t), x, torch.full((), t, device=x.device))

        return solve(velocity, noise, timesteps=self.timesteps.grid(sampling.num_steps), method=sampling.sampler)

    def num_evaluations(self, sampling: Sampling) -> int:
        return sampling.num_steps * (2 if sampling.sampler == "heun" else 1)
