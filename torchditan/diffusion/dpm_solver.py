# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""DPM-Solver++(2M) on straight paths (Lu et al. 2022, arXiv 2211.01095, algorithm 2).

Notable:
- signal t and noise 1 - t give the half log-SNR lambda = log(t / (1 - t)). A step integrates as if the model predicted
  one sample throughout: the one in the middle of the step in lambda, on the line through the predictions at the start
  of this step and of the one before. With the prediction at the start instead, a step is Euler's;
- the first step has no predecessor, the second follows a step from lambda = -infinity, and the last ends at +infinity.
  These are Euler steps: the first two are the limit of the formula, which the last one lacks. An Euler step costs an
  error of the square of its length, so three of them keep the second order. Up to three steps are Euler's method;
- near both ends lambda changes fast in even timesteps, so the measured order is slightly below 2 (see its test).
"""

from __future__ import annotations

import itertools
import math

import torch

from torchditan.diffusion.samplers import Sampler, StepNoise, Velocity


class DPMSolver2M(Sampler):
    """One evaluation per step."""

    def flow(
        self, velocity: Velocity, noise: torch.Tensor, *, timesteps: list[float], step_noise: StepNoise
    ) -> torch.Tensor:
        x, sample_before, h_before = noise, noise, math.inf
        for t, t_next in itertools.pairwise(timesteps):
            sample = x + (1 - t) * velocity(x, t)  # the prediction at t
            h = _half_log_snr(t_next) - _half_log_snr(t)
            ahead = 0.0 if math.isinf(h) else h / (2 * h_before)
            middle = sample + ahead * (sample - sample_before)
            x = middle + (1 - t_next) / (1 - t) * (x - middle)
            sample_before, h_before = sample, h
        return x


def _half_log_snr(t: float) -> float:
    if t in (0, 1):
        return math.copysign(math.inf, t - 0.5)
    return math.log(t / (1 - t))
