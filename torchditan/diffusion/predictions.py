# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Flow matching with a model that predicts x or the noise epsilon, and min-SNR weights of its loss.

The loss stays that of the velocity, as in JiT (Li and He 2025, arXiv 2511.13720). On x_t = (1 - t) noise + t x, the
velocity is (x - x_t) / (1 - t) or (x_t - epsilon) / t.

Notable:
- in the loss a divisor is at least 0.05, for the prediction and for the target. The best prediction is then the mean of
  x (or epsilon) given x_t, at every t. With the true velocity as the target it would be another one near the clamped
  end: x_t + 0.05 v instead of x;
- samplers divide without this limit, so that Euler's last step ends at the predicted x. With it, some noise would
  remain: exp(-1) 5% of it after many steps;
- one end does not determine the velocity: x = x_t at t = 1, and epsilon = x_t at t = 0. See `sampling_velocity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch

from torchditan.diffusion.samplers import Prediction, Velocity
from torchditan.registry import FAMILIES

if TYPE_CHECKING:
    from torchditan.config.options import Config

MIN_DIVISOR = 0.05


def option_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """Options that need a model of the velocity."""
    if config.model.name in FAMILIES:
        yield "diffusion.prediction", f"{config.model.name} was trained with v; leave it out"
    if config.checkpoint.initial_load_convention is not None:
        right = f"such weights predict v, and this run predicts {config.diffusion.prediction}; leave one of them out"
        yield "checkpoint.initial_load_convention", right
    if config.diffusion.prediction == "epsilon" and config.sampling.num_steps == 1:
        yield "sampling.num_steps", "pure noise does not determine a step with predicted noise; must be at least 2"


def velocity_of(
    prediction: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor, *, kind: Literal["epsilon", "x"]
) -> torch.Tensor:
    """The velocity in the loss: (x - x_t) / max(1 - t, 0.05), or (x_t - epsilon) / max(t, 0.05)."""
    difference = prediction - x_t if kind == "x" else x_t - prediction
    return difference / divisor(t, kind=kind)


def divisor(t: torch.Tensor, *, kind: Literal["epsilon", "v", "x"]) -> torch.Tensor:
    """Error of the prediction / error of the velocity in the loss, at t."""
    if kind == "v":
        return torch.ones_like(t)
    return (1 - t if kind == "x" else t).clamp(min=MIN_DIVISOR)


def sampling_velocity(predict: Prediction, *, kind: Literal["epsilon", "x"], timesteps: list[float]) -> Velocity:
    """The velocity that samplers integrate through these timesteps.

    Where a prediction does not determine the velocity, a neighbor replaces it. The order of the sampler stays the same:

    - x at t = 1, where Heun ends: that of the evaluation before, so that the last step is Euler's, as in JiT;
    - epsilon at t = 0: the state counts as one at the next timestep.
    """
    last = torch.zeros(())

    def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
        nonlocal last
        if kind == "epsilon":
            t = max(t, timesteps[1])
            return (x - predict(x, t)) / t
        if t < 1:
            last = (predict(x, t) - x) / (1 - t)
        return last

    return velocity


def min_snr_weight(t: torch.Tensor, *, kind: Literal["epsilon", "v", "x"], gamma: float) -> torch.Tensor:
    """Weight of the squared velocity error, for which the squared error of x has weight min(SNR, gamma).

    Hang et al. 2023 (arXiv 2303.09556); the SNR is t^2 / (1 - t)^2 on this path. An error of the velocity is one of x
    divided by 1 - t, so the weight is (1 - t)^2 min(SNR, gamma) = min(t^2, gamma (1 - t)^2). Where `velocity_of` limits
    its divisor, the weight of the predicted quantity's error stays that of the paper.

    Args:
        t: (B,) float32 in [0, 1].
        kind: what the model predicts.
        gamma: greater than 0; 5 in the paper.

    Returns:
        (B,) float32, finite.
    """
    signal, noise = t.square(), (1 - t).square()
    if kind == "x":
        weight = torch.clamp(signal / noise, max=gamma)  # of the squared error of x
    elif kind == "epsilon":
        weight = torch.clamp(gamma * noise / signal, max=1)  # min(SNR, gamma) / SNR
    else:
        weight = torch.minimum(signal, gamma * noise)
    return weight * divisor(t, kind=kind).square()
