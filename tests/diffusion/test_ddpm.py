# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The loss of DDPM against the papers' formulas in float64, its steps against the schedulers of diffusers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from torchditan.config.loader import load_config
from torchditan.config.options import Sampling
from torchditan.diffusion.ddpm import DDPM, discretized_log_likelihood
from torchditan.diffusion.noise_schedules import spaced_levels
from torchditan.models import ClassLabels, Unconditional
from torchditan.randomness import Randomness
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.sampler import Sampler

PREDICTIONS = ("epsilon", "v", "x")
SCHEDULES = ("linear", "cosine", "scaled_linear")


def ddpm(prediction: Any = "epsilon", schedule: Any = "linear", *, learn_sigma: bool = False) -> DDPM:
    return DDPM(
        conditioning=Unconditional(),
        label_dropout=0.0,
        prediction=prediction,
        schedule=schedule,
        learn_sigma=learn_sigma,
    )


class Answers(nn.Module):
    """Answers with one tensor, and remembers its inputs."""

    def __init__(self, answer: torch.Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        self.x_t, self.t = x_t, t
        return self.answer


# An own reading of the papers, in NumPy and float64.


def reference_betas(schedule: str) -> np.ndarray:
    k = np.arange(1000)
    if schedule == "linear":
        return 1e-4 + (0.02 - 1e-4) * k / 999
    if schedule == "scaled_linear":
        return (math.sqrt(0.00085) + (math.sqrt(0.012) - math.sqrt(0.00085)) * k / 999) ** 2

    def f(t: np.ndarray) -> np.ndarray:
        return np.cos((t / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2

    return np.minimum(1 - f(k + 1.0) / f(k + 0.0), 0.999)


def normal_cdf(z: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)))(z)


def reference_loss(
    prediction: str, schedule: str, x: np.ndarray, noise: np.ndarray, level: np.ndarray, output: np.ndarray
) -> np.ndarray:
    """The loss of each sample, (B,). x and noise are (B, C, H, W), the output has C or 2 C channels."""
    beta = reference_betas(schedule)
    alpha_bar = np.cumprod(1 - beta)
    before = np.concatenate([[1.0], alpha_bar[:-1]])
    losses = []
    for x0, eps, k, out in zip(x, noise, level, output, strict=True):
        a, s = math.sqrt(alpha_bar[k]), math.sqrt(1 - alpha_bar[k])
        x_k = a * x0 + s * eps
        mean_part = out[: len(x0)]
        target, clean = {
            "epsilon": (eps, (x_k - s * mean_part) / a),
            "v": (a * eps - s * x0, a * x_k - s * mean_part),
            "x": (x0, mean_part),
        }[prediction]
        loss = ((mean_part - target) ** 2).mean()
        if len(out) > len(x0):
            variances = beta * (1 - before) / (1 - alpha_bar)
            lower, upper = math.log(variances[max(k, 1)]), math.log(beta[k])
            log_variance = lower + (out[len(x0) :] + 1) / 2 * (upper - lower)
            of_x = math.sqrt(before[k]) * beta[k] / (1 - alpha_bar[k])
            of_state = math.sqrt(1 - beta[k]) * (1 - before[k]) / (1 - alpha_bar[k])
            mean, true_mean = of_x * clean + of_state * x_k, of_x * x0 + of_state * x_k
            if k == 0:
                deviation = np.exp(0.5 * log_variance)
                high = np.where(x0 > 0.999, 1.0, normal_cdf((x0 + 1 / 255 - mean) / deviation))
                low = np.where(x0 < -0.999, 0.0, normal_cdf((x0 - 1 / 255 - mean) / deviation))
                bound = -np.log(np.maximum(high - low, 1e-12))
            else:
                bound = 0.5 * (
                    log_variance - lower - 1 + (math.exp(lower) + (true_mean - mean) ** 2) / np.exp(log_variance)
                )
            loss += bound.mean() / math.log(2)
        losses.append(loss)
    return np.array(losses)


@pytest.mark.parametrize("learn_sigma", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_is_that_of_an_independent_computation(prediction: str, schedule: str, learn_sigma: bool) -> None:
    level = np.array([0, 0, 1, 2, 50, 317, 731, 998, 999])
    draws = np.random.default_rng(0)
    shape = (len(level), 2, 4, 4)
    x = draws.uniform(-1, 1, shape)
    x[:, 0, 0] = [-1, 1, -0.9995, 0.9995]  # the bins at the ends
    noise = draws.normal(size=shape)
    x, noise = x.astype(np.float32), noise.astype(np.float32)
    # A trained model is nearly right at low levels; far off, both sides reach the limit of a bin's probability.
    alpha_bar = np.cumprod(1 - reference_betas(schedule))[level].reshape(-1, 1, 1, 1)
    a, s = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)
    target = {"epsilon": noise, "v": a * noise - s * x, "x": x}[prediction]
    error = draws.normal(size=shape) * (s if prediction == "x" else 0.5)
    fraction = draws.uniform(-1.2, 1.2, shape)
    output = np.concatenate([target + error, fraction][: 1 + learn_sigma], axis=1).astype(np.float32)

    timestep = torch.from_numpy(((level + 0.5) / 1000).astype(np.float32))
    randomness = Randomness(noise=torch.from_numpy(noise), timestep=timestep, label_dropout=torch.ones(len(level)))
    objective = ddpm(prediction, schedule, learn_sigma=learn_sigma)
    model = Answers(torch.from_numpy(output))
    found = objective.loss(model, {"sample": torch.from_numpy(x)}, randomness)
    assert found.dtype == model.x_t.dtype == model.t.dtype == torch.float32 and found.shape == (len(level),)
    exact = reference_loss(prediction, schedule, *(values.astype(np.float64) for values in (x, noise)), level, output)
    np.testing.assert_allclose(found.double().numpy(), exact, rtol=1e-5)
    np.testing.assert_allclose(model.t.numpy() * 1000, level, atol=1e-4)
    np.testing.assert_allclose(model.x_t.numpy(), a * x + s * noise, atol=1e-6)


def test_the_bound_trains_the_variance_and_leaves_the_prediction_to_the_squared_error() -> None:
    torch.manual_seed(0)
    x, noise = torch.rand(4, 1, 4, 4) * 2 - 1, torch.randn(4, 1, 4, 4)
    randomness = Randomness(noise=noise, timestep=torch.tensor([0.0, 0.0015, 0.3, 0.9995]), label_dropout=torch.ones(4))
    gradients = []
    for learn_sigma in (False, True):
        output = (0.1 * torch.ones(4, 1 + learn_sigma, 4, 4)).requires_grad_()
        ddpm(learn_sigma=learn_sigma).loss(Answers(output), {"sample": x}, randomness).sum().backward()
        gradients.append(output.grad)
    assert torch.equal(gradients[0], gradients[1][:, :1])
    assert (gradients[1][:, 1:].abs().flatten(1).sum(1) > 0).all() and gradients[1].isfinite().all()


def test_a_bin_far_from_the_prediction_is_precise_in_float32_on_both_sides() -> None:
    difference = torch.tensor([-0.05, 0.05, -0.5, 0.5])
    found = discretized_log_likelihood(torch.zeros(4), difference, torch.full((4,), 2 * math.log(0.01)))
    exact = discretized_log_likelihood(
        torch.zeros(4).double(), difference.double(), torch.full((4,), 2 * math.log(0.01)).double()
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    assert found[0] == found[1] and found[2].item() == pytest.approx(math.log(1e-12))


def test_spacings_are_the_levels_of_the_papers() -> None:
    assert spaced_levels("trailing", 10) == list(range(99, 1000, 100))
    assert spaced_levels("leading", 10) == list(range(0, 1000, 100))
    assert spaced_levels("linspace", 10) == list(range(0, 1000, 111))
    assert spaced_levels("leading", 250) == list(range(0, 1000, 4))
    assert spaced_levels("linspace", 4) == [0, 333, 666, 999]
    assert spaced_levels("linspace", 1) == spaced_levels("trailing", 1) == [999]
    assert spaced_levels("trailing", 7) == [141, 284, 427, 570, 713, 856, 999]
    assert spaced_levels("leading", 7) == [0, 142, 284, 426, 568, 710, 852]
    for spacing, num_steps in itertools.product(("trailing", "leading", "linspace"), (2, 7, 27, 250, 999, 1000)):
        levels = spaced_levels(spacing, num_steps)  # type: ignore[arg-type]
        assert len(set(levels)) == num_steps and levels == sorted(levels) and levels[0] >= 0 and levels[-1] <= 999
        assert levels[-1] == 999 or spacing == "leading"


# Sampling of N(mean, variance) with its exact denoiser. Each step is then an affine map of x and its noise, so one
# batch measures the distribution of the samples: rows with x = 0, x = 1, and with x = 0 and noise 1 in step j alone.

MEAN, VARIANCE = 0.3, 0.25


def exact_model(prediction: str, schedule: Any, kept: list[int], *, learn_sigma: bool) -> Callable[..., torch.Tensor]:
    """The expectation of the prediction, and the variance of a step, for data from N(MEAN, VARIANCE)."""
    squared = np.cumprod(1 - reference_betas(schedule))
    before = dict(zip(kept, [1.0, *squared[kept[:-1]]], strict=True))

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        k = round(1000 * t)
        a, s = math.sqrt(squared[k]), math.sqrt(1 - squared[k])
        total = squared[k] * VARIANCE + 1 - squared[k]
        clean = MEAN + a * VARIANCE / total * (x - a * MEAN)
        eps = (x - a * clean) / s
        output = {"epsilon": eps, "v": a * eps - s * clean, "x": clean}[prediction]
        if not learn_sigma:
            return output
        beta = 1 - squared[k] / before[k]
        posterior = beta * (1 - before[k]) / (1 - squared[k])
        of_x = math.sqrt(before[k]) * beta / (1 - squared[k])
        variance = posterior + of_x**2 * VARIANCE * (1 - squared[k]) / total
        fraction = 0.0 if k == kept[0] else 2 * math.log(variance / posterior) / math.log(beta / posterior) - 1
        return torch.cat([output, torch.full_like(output, fraction)], dim=1)

    return predict


def distribution_of_samples(objective: DDPM, sampling: Sampling) -> tuple[float, float]:
    """Mean and variance of the samples, exact but for float32 and float64 rounding."""
    num_steps = sampling.num_steps
    kept = spaced_levels(sampling.spacing, num_steps)
    predict = exact_model(objective.prediction, objective.schedule, kept, learn_sigma=objective.learn_sigma)
    start = torch.zeros(num_steps + 2, 1, 1, 1, dtype=torch.float64)
    start[1] = 1

    def step_noise(step: int) -> torch.Tensor:
        noise = torch.zeros_like(start)
        noise[2 + step] = 1
        return noise

    found = objective.sample(predict, start, sampling=sampling, step_noise=step_noise).flatten()
    return found[0].item(), (found[1:] - found[0]).square().sum().item()


@pytest.mark.parametrize(("prediction", "schedule"), [("epsilon", "linear"), ("v", "cosine")])
def test_samplers_recover_the_mean_and_variance_of_a_gaussian(prediction: str, schedule: str) -> None:
    for sampler, num_steps, learn_sigma, tolerance in (
        ("ancestral", 10, True, 0.003),
        ("ddim", 1000, False, 0.02),
        ("euler", 1000, True, 0.02),
    ):
        sampling = Sampling(sampler=sampler, num_steps=num_steps, spacing="linspace")  # type: ignore[arg-type]
        objective = ddpm(prediction, schedule, learn_sigma=learn_sigma)
        mean, variance = distribution_of_samples(objective, sampling)
        where = f"{sampler}, {num_steps} steps, learn_sigma {learn_sigma}"
        assert mean == pytest.approx(MEAN, abs=tolerance), where
        assert variance == pytest.approx(VARIANCE, rel=2 * tolerance), where


def test_clipping_moves_a_state_to_the_predicted_noise_of_the_clipped_sample() -> None:
    x = torch.full((1, 1, 1, 1), 0.7)
    sampling = Sampling(sampler="ddim", num_steps=2, clip_sample=True)
    outputs = iter([torch.full_like(x, 3.0), torch.full_like(x, -0.2)])
    seen = []

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        seen.append(x)
        return next(outputs)

    assert ddpm("x").sample(predict, x, sampling=sampling, step_noise=lambda step: x).item() == pytest.approx(-0.2)
    squared = np.cumprod(1 - reference_betas("linear"))
    noise = (0.7 - math.sqrt(squared[999])) / math.sqrt(1 - squared[999])
    expected = math.sqrt(squared[499]) + math.sqrt(1 - squared[499]) * noise
    assert seen[1].item() == pytest.approx(expected, rel=1e-5)


# The schedulers of diffusers.


def answer(x: torch.Tensor, t: float, *, learn_sigma: bool) -> torch.Tensor:
    """A model output that depends on x and t."""
    output = torch.sin(3 * x + 2 * t)
    return torch.cat([output, torch.cos(2 * x - t)], dim=1) if learn_sigma else output


def states_of(objective: DDPM, sampling: Sampling, x: torch.Tensor, noises: list[torch.Tensor]) -> list[torch.Tensor]:
    """The states before each step, and the sample."""
    states: list[torch.Tensor] = []

    def predict(x: torch.Tensor, t: float) -> torch.Tensor:
        states.append(x)
        return answer(x, t, learn_sigma=objective.learn_sigma)

    sample = objective.sample(predict, x, sampling=sampling, step_noise=noises.__getitem__)
    return [*states, sample]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("sampler", "learn_sigma"), [("ddim", False), ("ancestral", False), ("ancestral", True)])
def test_steps_are_those_of_the_schedulers_of_diffusers(
    schedule: str, prediction: str, sampler: str, learn_sigma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers = pytest.importorskip("diffusers")
    from diffusers.schedulers import scheduling_ddpm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 4, generator=generator)
    noises = [torch.randn(2, 3, 4, 4, generator=generator) for _ in range(10)]
    remaining: list[torch.Tensor] = []
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *args, **kwargs: remaining.pop(0))
    spacings = ("trailing", "leading") if sampler == "ddim" else ("trailing", "leading", "linspace")
    for spacing in spacings:  # DDIMScheduler steps by 100 levels with linspace too
        options = {
            "beta_start": 0.00085 if schedule == "scaled_linear" else 1e-4,
            "beta_end": 0.012 if schedule == "scaled_linear" else 0.02,
            "beta_schedule": "squaredcos_cap_v2" if schedule == "cosine" else schedule,
            "prediction_type": {"epsilon": "epsilon", "v": "v_prediction", "x": "sample"}[prediction],
            "timestep_spacing": spacing,
            "clip_sample": False,
        }
        if sampler == "ancestral":
            options["variance_type"] = "learned_range" if learn_sigma else "fixed_small"
        scheduler = (diffusers.DDIMScheduler if sampler == "ddim" else diffusers.DDPMScheduler)(**options)
        scheduler.alphas_cumprod = torch.cumprod(1 - scheduler.betas.double(), dim=0)  # theirs is rounded
        scheduler.set_timesteps(10)
        assert sorted(scheduler.timesteps.tolist()) == spaced_levels(spacing, 10)  # type: ignore[arg-type]
        remaining[:] = noises
        sampling = Sampling(sampler=sampler, num_steps=10, spacing=spacing)  # type: ignore[arg-type]
        states = states_of(ddpm(prediction, schedule, learn_sigma=learn_sigma), sampling, x, noises)
        for step, level in enumerate(scheduler.timesteps):
            if (sampler, spacing, step) == ("ancestral", "trailing", 9):
                break  # the step from level 99 to data adds noise there
            output = answer(states[step], level.item() / 1000, learn_sigma=learn_sigma)
            theirs = scheduler.step(output, level, states[step]).prev_sample
            error = (states[step + 1] - theirs).abs().max() / theirs.abs().max()
            assert error < 1e-5, (spacing, step, error)


def drawn(model: nn.Module, sampling: Sampling, numbers: list[int], *, learn_sigma: bool = False) -> torch.Tensor:
    """These samples of 6, three of each of two rows."""
    spec: Any = SimpleNamespace(conditioning=ClassLabels(10), sample_shape=(1, 4, 4))
    sampler = Sampler(spec, ddpm(learn_sigma=learn_sigma), torch.device("cpu"))
    rows = SampleRows.of_classes([0, 1], class_names=["a", "b"])
    return sampler.draw_batch(model, Drawing(rows, rows.each(3), sampling, seed=7), numbers)


class Waves(nn.Module):
    """An output that depends on x and t alone, and the times at which the batch is doubled for guidance."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.guided: list[float] = []

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        self.times.append(round(t[0].item(), 6))
        if (cond["class_label"] == 10).any():
            self.guided.append(self.times[-1])
        return answer(x_t, t[0].item(), learn_sigma=True)


def test_a_sample_depends_on_its_number_and_not_on_its_batch() -> None:
    sampling = Sampling(sampler="ancestral", num_steps=5, guidance_scale=1.0)
    together = drawn(Waves(), sampling, [1, 2, 3], learn_sigma=True)
    apart = [drawn(Waves(), sampling, numbers, learn_sigma=True) for numbers in ([3], [2, 1])]
    assert torch.equal(together, torch.cat([apart[1].flip(0), apart[0]]))
    assert len({sample.sum().item() for sample in together}) == 3


def test_the_guidance_interval_counts_t_1_as_data_although_the_model_counts_it_as_noise() -> None:
    model = Waves()
    drawn(model, Sampling(num_steps=10, spacing="leading", guidance_interval=[0.8, 1.0]), [0], learn_sigma=True)
    assert model.times == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert model.guided == [0.2, 0.1, 0.0]


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--sampling.spacing=leading", "--diffusion.objective=flow_matching"], "sampling.spacing", ["ddpm"]),
        (["--sampling.timestep_shift=3"], "sampling.timestep_shift = 3.0", ["ddpm"]),
        (["--sampling.sampler=heun"], 'sampling.sampler = "heun"', ["euler", "ddim", "ancestral"]),
        (["--sampling.num_steps=1001"], "sampling.num_steps = 1001", ["1000"]),
        (["--sampling.num_steps=1", "--sampling.spacing=leading"], "sampling.spacing", ["trailing"]),
    ],
)
def test_options_that_do_not_fit_are_refused(flags: list[str], about: str, mentions: list[str]) -> None:
    with refused(about, *mentions):
        load_config(["--diffusion.objective=ddpm", *flags])
