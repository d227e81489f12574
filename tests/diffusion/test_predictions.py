# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Predictions of x, v and epsilon on the straight path, and min-SNR weights, against NumPy in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from torchditan.config.loader import load_config
from torchditan.config.options import Diffusion, Model, Sampling
from torchditan.diffusion.ddpm import DDPM
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.objectives import build_objective, uniform_objective, validation_objective
from torchditan.diffusion.predictions import min_snr_weight
from torchditan.diffusion.timesteps import Timesteps
from torchditan.models import Unconditional, build_model_spec
from torchditan.randomness import Randomness, draw

PREDICTIONS = ("epsilon", "v", "x")
T = np.array([0.0, 1e-4, 0.02, 0.05, 0.3, 0.5, 0.8, 0.95, 0.98, 1 - 1e-4, 1.0])


class Answers(nn.Module):
    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        return self.answer


def objective(prediction: Any, **options: Any) -> FlowMatching:
    timesteps = Timesteps(kind="uniform")
    return FlowMatching(Unconditional(), timesteps, label_dropout=0.0, prediction=prediction, **options)


def draws(t: np.ndarray = T) -> tuple[np.ndarray, np.ndarray, Randomness]:
    """Samples and noise (B, 2, 4, 4) float64 at t."""
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=(2, len(t), 2, 4, 4)).astype(np.float32).astype(np.float64)
    timestep = torch.from_numpy(t).float()
    return (
        x,
        noise,
        Randomness(noise=torch.from_numpy(noise).float(), timestep=timestep, label_dropout=torch.ones(len(t))),
    )


def target_of(prediction: str, x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return {"epsilon": noise, "v": x - noise, "x": x}[prediction]


def loss_of(built: Any, output: np.ndarray, x: np.ndarray, randomness: Randomness) -> np.ndarray:
    model = Answers(torch.from_numpy(output).float())
    loss: torch.Tensor = built.loss(model, {"sample": torch.from_numpy(x).float()}, randomness)
    assert loss.dtype == torch.float32
    return loss.numpy()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_is_that_of_the_velocity_and_zero_for_a_perfect_model(prediction: str) -> None:
    x, noise, randomness = draws()
    assert loss_of(objective(prediction), target_of(prediction, x, noise), x, randomness).max() < 1e-12
    for other in set(PREDICTIONS) - {prediction}:
        assert loss_of(objective(prediction), target_of(other, x, noise), x, randomness).min() > 0.1
    t = T[4:7]  # where no divisor is limited, the same velocities have the same loss, whatever the model predicts
    x, noise, randomness = draws(t)
    t = t[:, None, None, None]
    x_t, velocity = (1 - t) * noise + t * x, np.random.default_rng(1).normal(size=x.shape)
    output = {"epsilon": x_t - t * velocity, "v": velocity, "x": x_t + (1 - t) * velocity}[prediction]
    expected = ((velocity - (x - noise)) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(loss_of(objective(prediction), output, x, randomness), expected, rtol=1e-4)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_gradient_weights_an_error_by_the_squared_divisor(prediction: str) -> None:
    """An error of x counts 1 / (1 - t)^2, up to 400; one of epsilon 1 / t^2; one of v is not weighted."""
    x, noise, randomness = draws()
    error = np.random.default_rng(1).normal(size=x.shape)
    output = torch.from_numpy(target_of(prediction, x, noise) + error).float().requires_grad_()
    batch = {"sample": torch.from_numpy(x).float()}
    objective(prediction).loss(Answers(output), batch, randomness).sum().backward()
    divisor = {"epsilon": np.maximum(T, 0.05), "v": np.ones_like(T), "x": np.maximum(1 - T, 0.05)}[prediction]
    assert output.grad is not None
    found = output.grad.numpy() / (2 * error / error[0].size)
    expected = np.broadcast_to(1 / divisor[:, None, None, None] ** 2, found.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


MEAN, DEVIATION = 0.7, 0.5


def exact_model(prediction: str, seen: list[float] | None = None, mean: float = MEAN) -> Any:
    """The best prediction for samples from N(mean, 0.5^2), in float64. It is linear in x_t, so sampling is too."""

    def predict(x_t: torch.Tensor, t: float) -> torch.Tensor:
        if seen is not None:
            seen.append(t)
        surplus = (x_t - t * mean) / (t**2 * DEVIATION**2 + (1 - t) ** 2)
        x, noise = mean + t * DEVIATION**2 * surplus, (1 - t) * surplus
        return {"epsilon": noise, "v": x - noise, "x": x}[prediction]

    return predict


def mean_and_deviation(prediction: str, sampler: Any, num_steps: int) -> tuple[float, float]:
    """Of the samples; exact, because a sample is a linear function of its noise."""
    start = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)
    sampling = Sampling(sampler=sampler, num_steps=num_steps)
    at_0, at_1 = (
        objective(prediction)
        .sample(exact_model(prediction), start, sampling=sampling, step_noise=lambda step: torch.zeros(()))
        .flatten()
        .tolist()
    )
    return at_0, at_1 - at_0


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2)])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_samplers_keep_their_order(prediction: str, sampler: str, order: int) -> None:
    """Also at the end that does not determine the velocity."""
    errors = [abs(mean_and_deviation(prediction, sampler, n)[1] - DEVIATION) for n in (100, 200, 400)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


def test_euler_ends_at_the_predicted_x_and_heun_evaluates_neither_undetermined_end() -> None:
    target = torch.randn(3, 1, 2, 2, dtype=torch.float64)
    found = objective("x").sample(
        lambda x, t: target,
        torch.randn_like(target),
        sampling=Sampling(num_steps=50),
        step_noise=lambda step: torch.zeros(()),
    )
    torch.testing.assert_close(found, target)
    for prediction, ends in (("x", (0.0, 0.75)), ("epsilon", (0.25, 1.0)), ("v", (0.0, 1.0))):
        for sampler in ("euler", "heun"):
            seen: list[float] = []
            sampling = Sampling(sampler=sampler, num_steps=4)  # type: ignore[arg-type]
            objective(prediction).sample(
                exact_model(prediction, seen), target, sampling=sampling, step_noise=lambda step: torch.zeros(())
            )
            assert len(seen) == objective(prediction).num_evaluations(sampling)
            assert (min(seen), max(seen)) == (ends[0], ends[1] if sampler == "heun" else 0.75)


GAMMA = 5.0


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weights_an_error_of_x_by_the_clipped_snr(prediction: Any) -> None:
    """Hang et al. (2023): min(SNR, gamma) for x, / SNR for epsilon. The error of v is that of x / (1 - t)."""
    t = T[1:-1]
    snr = t**2 / (1 - t) ** 2
    x, noise, randomness = draws(t)
    error = np.random.default_rng(1).normal(size=x.shape)
    output = target_of(prediction, x, noise) + error
    found = loss_of(objective(prediction, min_snr_gamma=GAMMA), output, x, randomness)
    factor = {"epsilon": 1 / snr, "v": (1 - t) ** 2, "x": 1}[prediction]
    expected = (error**2).mean((1, 2, 3)) * np.minimum(snr, GAMMA) * factor
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert min_snr_weight(torch.tensor([0.0, 1.0]), kind=prediction, gamma=GAMMA).isfinite().all()


@pytest.mark.parametrize("learn_sigma", [False, True])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weights_the_predictions_of_ddpm(prediction: Any, learn_sigma: bool) -> None:
    """The term of the variance keeps its weight."""
    level = np.array([0, 1, 50, 317, 731, 999])
    x, noise, randomness = draws(level)
    randomness = Randomness(randomness, timestep=torch.from_numpy((level + 0.5) / 1000).float())
    squared = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[level]
    snr = squared / (1 - squared)
    output = np.random.default_rng(1).normal(size=(len(x), 2 * (1 + learn_sigma), 4, 4))
    plain, weighted = (
        loss_of(
            DDPM(Unconditional(), 0.0, prediction, "linear", learn_sigma, min_snr_gamma=gamma), output, x, randomness
        )
        for gamma in (None, GAMMA)
    )
    a, s = (np.sqrt(value)[:, None, None, None] for value in (squared, 1 - squared))
    target = {"epsilon": noise, "v": a * noise - s * x, "x": x}[prediction]
    error = ((output[:, :2] - target) ** 2).mean((1, 2, 3))
    weight = np.minimum(snr, GAMMA) / {"epsilon": snr, "v": snr + 1, "x": 1}[prediction]
    np.testing.assert_allclose(weighted - plain, error * (weight - 1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["flow_matching", "ddpm"])
def test_validation_has_no_weights(name: str) -> None:
    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(1, 8, 8), num_classes=0)
    plain = Diffusion(objective=name, timestep_sampling="uniform")
    weighted = Diffusion(objective=name, timestep_sampling="uniform", loss_weighting="min_snr")
    batch, randomness = {"sample": torch.ones(16, 1, 8, 8)}, draw(0, range(16), (1, 8, 8))

    def model(x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        return x_t

    losses = [build_objective(config, spec).loss(model, batch, randomness) for config in (plain, weighted)]  # type: ignore[arg-type]
    assert not torch.equal(losses[0], losses[1])
    for build in (validation_objective, uniform_objective):
        assert torch.equal(build(weighted, spec).loss(model, batch, randomness), losses[0])  # type: ignore[arg-type]


def test_a_published_model_predicts_what_it_was_trained_to() -> None:
    pytest.importorskip("diffusers")
    with refused('diffusion.prediction = "x"', "flux", "v"):
        load_config(["--model.name=flux", "--model.flavor=debugmodel", "--diffusion.prediction=x"])
