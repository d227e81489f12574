# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From noise to samples: solvers of dx/dt = velocity(x, t), steps through noise levels, and guidance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from torchditan.registry import SAMPLERS, create

if TYPE_CHECKING:
    from torchditan.config.options import Sampling
    from torchditan.models.spec import Condition, Conditioning


class Prediction(Protocol):
    """The model with its condition and guidance."""

    def __call__(self, x: torch.Tensor, t: float, **scalars: float) -> torch.Tensor:
        """x (B, ...) float32, t and the model's other scalar conditions -> prediction (B, ...) float32."""
        ...


Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(x (B, ...) float32, t) -> dx/dt (B, ...) float32."""


StepNoise = Callable[[int], torch.Tensor]
"""Number of a sampling step, from 0 -> its standard normal noise, of the shape of the samples."""


class Step(NamedTuple):
    """One step through noise levels, x = signal * sample + noise * its noise."""

    signal: float
    noise: float
    next_signal: float
    next_noise: float
    posterior_of_sample: float
    posterior_of_state: float
    """Mean of the step's Gaussian: posterior_of_sample * sample + posterior_of_state * x."""


class Denoised(NamedTuple):
    """What a model says about x (B, ...) at a level."""

    sample: torch.Tensor
    noise: torch.Tensor
    deviation: torch.Tensor | float
    """Standard deviation of the step's Gaussian."""


Denoise = Callable[[torch.Tensor, int], Denoised]
"""(x (B, ...) float32, number of the step) -> what the model says at the start of the step."""


class Sampler:
    """From noise to samples. A subclass overrides `flow`, `levels` or both, for the objectives that it works with."""

    evaluations_per_step: ClassVar[int] = 1
    evaluates_end: ClassVar[bool] = False
    """Whether `flow` evaluates the velocity at the last timestep."""

    def flow(
        self, velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], step_noise: StepNoise
    ) -> torch.Tensor:
        """Integrate dx/dt = velocity(x, t), for objectives with a straight path (flow_matching).

        Args:
            velocity: the vector field, including guidance.
            noise: (B, ...) float32, the state at the first timestep.
            timesteps: increasing, from 0 to 1.
            step_noise: number of the step, from 0 -> standard normal (B, ...), for a sampler of an SDE.
        """
        raise NotImplementedError

    def levels(
        self, denoise: Denoise, noise: torch.Tensor, *, steps: list[Step], step_noise: StepNoise
    ) -> torch.Tensor:
        """Walk from the highest noise level to data, for objectives with a table of levels (ddpm).

        Args:
            denoise: the model, including guidance.
            noise: (B, ...) float32, the state at the first step.
            steps: the levels of each step. The last one ends at the sample: signal 1, noise 0.
            step_noise: as in `flow`.
        """
        raise NotImplementedError


def build_sampler(sampling: Sampling) -> Sampler:
    """The sampler of `sampling.sampler`, with the options after its name."""
    sampler: Sampler = create(SAMPLERS, "sampling.sampler", sampling.sampler)
    return sampler


class DDIM(Sampler):
    """Deterministic steps through noise levels (DDIM with eta = 0; Song et al. 2020, arXiv 2010.02502)."""

    def levels(
        self, denoise: Denoise, noise: torch.Tensor, *, steps: list[Step], step_noise: StepNoise
    ) -> torch.Tensor:
        x = noise
        for number, step in enumerate(steps):
            found = denoise(x, number)
            x = found.sample
            if step.next_noise > 0:
                x = step.next_signal * found.sample + step.next_noise * found.noise
        return x


class Ancestral(Sampler):
    """Draws from the Gaussian of each step (Ho et al. 2020, arXiv 2006.11239), with the learned variance, or without
    one, that of the posterior."""

    def flow(
        self, velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], step_noise: StepNoise
    ) -> torch.Tensor:
        x = noise
        for number, (t, t_next) in enumerate(itertools.pairwise(timesteps)):
            slope = velocity(x, t)
            sample, noise_in_x = x + (1 - t) * slope, x - t * slope
            x = t_next * sample
            if t_next < 1:
                # The posterior of x at t_next, given x and the sample, where noise is added from 1 to 0 by a Markov
                # process: `kept` is the correlation of the noise at both times.
                kept = t / t_next * (1 - t_next) / (1 - t)
                fresh = math.sqrt(1 - kept**2) * step_noise(number)
                x = x + (1 - t_next) * (kept * noise_in_x + fresh)
        return x

    def levels(
        self, denoise: Denoise, noise: torch.Tensor, *, steps: list[Step], step_noise: StepNoise
    ) -> torch.Tensor:
        x = noise
        for number, step in enumerate(steps):
            found = denoise(x, number)
            x_before, x = x, found.sample
            if step.next_noise > 0:
                mean = step.posterior_of_sample * found.sample + step.posterior_of_state * x_before
                x = mean + found.deviation * step_noise(number)
        return x


class Euler(DDIM):
    """One evaluation per step. On noise levels it is DDIM."""

    def flow(
        self, velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], step_noise: StepNoise
    ) -> torch.Tensor:
        x = noise
        for t, t_next in itertools.pairwise(timesteps):
            x = x + (t_next - t) * velocity(x, t)
        return x


class Heun(Sampler):
    """Second order: two evaluations in every step, including the last."""

    evaluations_per_step = 2
    evaluates_end = True

    def flow(
        self, velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], step_noise: StepNoise
    ) -> torch.Tensor:
        x = noise
        for t, t_next in itertools.pairwise(timesteps):
            dt = t_next - t
            slope = velocity(x, t)
            x = x + dt * 0.5 * (slope + velocity(x + dt * slope, t_next))
        return x


def is_guided(t: float, interval: tuple[float, float]) -> bool:
    """Whether t is in a closed interval; its ends are steps of a grid, which rounding moves."""
    low, high = interval
    return low - 1e-9 <= t <= high + 1e-9


def guided_prediction(
    model: nn.Module,
    *,
    conditioning: Conditioning,
    cond: Condition,
    guidance_scale: float,
    guidance_interval: tuple[float, float] = (0.0, 1.0),
    guidance_channels: int | None = None,
) -> Prediction:
    """Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598): null + scale (conditional - null).

    Args:
        model: `forward(x_t, t, cond)`; its objective defines what it predicts.
        conditioning: provides the null condition for `cond`.
        cond: the condition of every sample.
        guidance_scale: 1 disables guidance, which saves one of two evaluations.
        guidance_interval: model times with guidance, a closed interval (Kynkaanniemi et al. 2024, arXiv 2404.07724).
        guidance_channels: guide only the first n channels, as the official DiT does (3); None guides those of x. A
            learned variance in further channels is the conditional one.
    """

    def predict(x: torch.Tensor, t: float, **scalars: float) -> torch.Tensor:
        def of_batch(value: float) -> torch.Tensor:
            return torch.full((x.shape[0],), value, dtype=torch.float32, device=x.device)  # (B,)

        numbers = {name: of_batch(value) for name, value in scalars.items()}
        if not cond or guidance_scale == 1 or not is_guided(t, guidance_interval):
            return model(x, of_batch(t), {**cond, **numbers}).float()
        null = conditioning.null(cond)
        both = {key: torch.cat([cond[key], null[key]]) for key in cond}
        both |= {name: value.repeat(2) for name, value in numbers.items()}
        prediction = model(torch.cat([x, x]), of_batch(t).repeat(2), both).float()  # (2B, C, H, W)
        conditional, unconditional = prediction.chunk(2)
        guided = unconditional + guidance_scale * (conditional - unconditional)
        n = min(guidance_channels or x.shape[1], x.shape[1])
        return torch.cat([guided[:, :n], conditional[:, n:]], dim=1)

    return predict
