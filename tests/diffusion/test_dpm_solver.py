# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""DPM-Solver++(2M) against the exact flow of a Gaussian, and against the scheduler of diffusers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from solving import solve

from torchditan.config.options import Sampling
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.timesteps import Timesteps
from torchditan.models import Unconditional

MEAN, VARIANCE = 0.7, 0.25  # of Gaussian data


def variance_at(t: float) -> float:
    return (1 - t) ** 2 + t**2 * VARIANCE


def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
    """E[data - noise | x_t = x] for independent Gaussian data and noise."""
    return MEAN + (t * VARIANCE - (1 - t)) / variance_at(t) * (x - t * MEAN)


def error_of(method: str, timesteps: list[float]) -> float:
    """Largest distance to the exact flow, which maps the quantiles at t to those at the last timestep."""
    x = torch.tensor([1.3, -0.4], dtype=torch.float64)
    start, end = timesteps[0], timesteps[-1]
    exact = end * MEAN + math.sqrt(variance_at(end) / variance_at(start)) * (x - start * MEAN)
    return (solve(velocity, x, timesteps=timesteps, method=method) - exact).abs().max().item()


def even_in_lambda(num_steps: int) -> list[float]:
    half_log_snr = np.linspace(math.log(0.05 / 0.95), math.log(0.95 / 0.05), num_steps + 1)
    return (1 / (1 + np.exp(-half_log_snr))).tolist()


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_the_order_on_steps_that_are_even_in_lambda(method: str, order: int) -> None:
    errors = [error_of(method, even_in_lambda(n)) for n in (40, 80, 160)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_up_to_three_steps_are_eulers(num_steps: int) -> None:
    x, timesteps = torch.randn(2, 3), Timesteps(kind="uniform", shift=3.0).grid(num_steps)
    ours, euler = (solve(velocity, x, timesteps=timesteps, method=method) for method in ("dpmpp_2m", "euler"))
    torch.testing.assert_close(ours, euler, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [5, 20])
def test_steps_are_those_of_the_scheduler_of_diffusers(num_steps: int, shift: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    scheduler = diffusers.DPMSolverMultistepScheduler(**flow)
    scheduler.set_timesteps(num_steps)
    objective = FlowMatching(
        conditioning=Unconditional(), timesteps=Timesteps(kind="uniform", shift=shift), label_dropout=0
    )
    noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    states: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        states.append(x)
        outputs.append(torch.sin(3 * x + 2 * t))
        return outputs[-1]

    sampling = Sampling(sampler="dpmpp_2m", num_steps=num_steps)
    states.append(objective.sample(predict, noise, sampling=sampling, step_noise=lambda step: torch.zeros(())))
    assert len(outputs) == num_steps == objective.num_evaluations(sampling)
    # The same noise levels, from 1 to 0; theirs start below 1. Their sigmas are float32.
    scheduler.sigmas = 1 - torch.tensor(objective.timesteps.grid(num_steps), dtype=torch.float64)
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(-outputs[step], timestep, states[step]).prev_sample  # they go from data to noise
        assert (states[step + 1] - theirs).abs().max() / theirs.abs().max() < 1e-5, step


def test_a_model_that_predicts_the_sample_gives_the_same_samples() -> None:
    noise, sampling = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), Sampling(sampler="dpmpp_2m")
    predictions = {"v": velocity, "x": lambda x, t: x + (1 - t) * velocity(x, t)}
    of_v, of_x = (
        FlowMatching(
            conditioning=Unconditional(), timesteps=Timesteps(kind="uniform"), label_dropout=0, prediction=kind
        ).sample(predict, noise, sampling=sampling, step_noise=lambda step: torch.zeros(()))
        for kind, predict in predictions.items()
    )
    torch.testing.assert_close(of_v, of_x, rtol=1e-4, atol=1e-5)
