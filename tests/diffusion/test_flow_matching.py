# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The objective, timestep distributions and samplers against closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from solving import solve
from torch import nn

from torchditan.config.options import Diffusion, Model, Sampling
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.samplers import Velocity, guided_prediction, is_guided
from torchditan.diffusion.timesteps import Timesteps, shift_timesteps
from torchditan.errors import ConfigError
from torchditan.models import ClassLabels, Unconditional, build_model_spec
from torchditan.randomness import Randomness, draw
from torchditan.registry import SAMPLERS, registered


class Recorder(nn.Module):
    """Answers with a function of its inputs, and remembers them."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x_t, t, cond):
        self.x_t, self.t, self.cond = x_t, t, cond
        return self.answer(x_t, t, cond)


def test_the_path_runs_from_noise_at_0_to_data_at_1_in_float32() -> None:
    x = torch.randn(3, 1, 2, 2)
    randomness = Randomness(draw(0, [0, 1, 2], (1, 2, 2)), timestep=torch.tensor([0.0, 0.25, 1.0]))
    objective = FlowMatching(conditioning=Unconditional(), timesteps=Timesteps(kind="uniform"), label_dropout=0)
    model = Recorder(lambda x_t, *_: x_t.bfloat16())
    loss = objective.loss(model, {"sample": x}, randomness)
    assert loss.dtype == model.x_t.dtype == model.t.dtype == torch.float32
    torch.testing.assert_close(model.x_t[0], randomness.noise[0])
    torch.testing.assert_close(model.x_t[1], 0.75 * randomness.noise[1] + 0.25 * x[1])
    torch.testing.assert_close(model.x_t[2], x[2])


def test_labels_are_dropped_where_the_draw_is_below_the_rate() -> None:
    randomness = Randomness(draw(0, [0, 1, 2], (1, 2, 2)), label_dropout=torch.tensor([0.05, 0.5, 0.0999]))
    objective = FlowMatching(conditioning=ClassLabels(10), timesteps=Timesteps(kind="uniform"), label_dropout=0.1)
    model = Recorder(lambda x_t, *_: x_t)
    batch = {"sample": torch.randn(3, 1, 2, 2), "class_label": torch.tensor([3, 4, 5])}
    objective.loss(model, batch, randomness)
    assert model.cond["class_label"].tolist() == [10, 4, 10]
    assert batch["class_label"].tolist() == [3, 4, 5]


def test_logit_normal_timesteps_have_the_mean_and_spread_they_are_given() -> None:
    uniform = (torch.arange(20000) + 0.5) / 20000
    t = Timesteps(kind="logit_normal", mean=-0.4, std=1.2)(uniform)
    logit = torch.logit(t.double())
    assert logit.mean().item() == pytest.approx(-0.4, abs=0.01)
    assert logit.std().item() == pytest.approx(1.2, abs=0.01)
    assert torch.equal(Timesteps(kind="uniform")(uniform), uniform)


def test_shift_moves_to_noise_and_keeps_the_ends() -> None:
    t = torch.tensor([0.0, 0.5, 1.0])
    # Noise level 0.5 shifted by 3: 3 * 0.5 / (1 + 2 * 0.5) = 0.75.
    torch.testing.assert_close(shift_timesteps(t, 3.0), torch.tensor([0.0, 0.25, 1.0]))
    assert Timesteps(kind="uniform").grid(4) == [0.0, 0.25, 0.5, 0.75, 1.0]


def ancestral(velocity: Velocity, start: torch.Tensor, timesteps: list[float]) -> torch.Tensor:
    fresh = torch.Generator().manual_seed(1)

    def step_noise(step: int) -> torch.Tensor:
        return torch.randn(start.shape, generator=fresh, dtype=start.dtype)

    return registered(SAMPLERS, "ancestral")().flow(velocity, start, timesteps=timesteps, step_noise=step_noise)


def test_an_ancestral_step_draws_from_the_posterior_of_its_sample() -> None:
    noise, sample = torch.randn(100_000, generator=torch.Generator().manual_seed(0)), 2.0
    start = 0.2 * sample + 0.8 * noise
    after = ancestral(lambda x, t: (sample - x) / (1 - t), start, [0.2, 0.5])
    noise_after = (after - 0.5 * sample) / 0.5
    assert noise_after.mean() == pytest.approx(0, abs=0.015) and noise_after.std() == pytest.approx(1, abs=0.015)
    assert (noise * noise_after).mean() == pytest.approx(0.2 / 0.5 * 0.5 / 0.8, abs=0.015)


def test_ancestral_samples_of_a_known_velocity_have_the_spread_of_the_data() -> None:
    noise, spread, steps = torch.randn(100_000, generator=torch.Generator().manual_seed(0)), 0.5, 100
    samples = ancestral(
        lambda x, t: x * (t * spread**2 - (1 - t)) / (t**2 * spread**2 + (1 - t) ** 2),
        noise,
        Timesteps(kind="uniform").grid(steps),
    )
    assert samples.std() == pytest.approx(spread, rel=4 / steps)  # of first order
    assert (noise * samples).mean() == pytest.approx(0, abs=0.01)  # the first step keeps nothing of the start


def test_one_ancestral_step_is_eulers() -> None:
    start = torch.randn(8, generator=torch.Generator().manual_seed(0))
    euler = solve(lambda x, t: -x * (1 + t), start, timesteps=[0.0, 1.0], method="euler")
    assert torch.equal(ancestral(lambda x, t: -x * (1 + t), start, [0.0, 1.0]), euler)


def test_guidance_includes_the_ends_of_its_interval() -> None:
    grid = torch.linspace(0, 1, 11, dtype=torch.float64).tolist()  # the fourth is 0.30000000000000004
    assert [is_guided(t, (0.1, 0.3)) for t in grid[:6]] == [False, True, True, True, False, False]


def test_guidance_extrapolates_from_null_inside_its_interval_and_on_its_channels() -> None:
    """Further channels than those of x, such as a learned variance, are the conditional ones."""
    model = Recorder(lambda x_t, t, cond: cond["class_label"].float().view(-1, 1, 1, 1).expand(-1, 8, 2, 2))
    x = torch.zeros(2, 4, 2, 2)

    def velocity(t: float, scale: float, channels: int | None = None) -> torch.Tensor:
        return guided_prediction(
            model,
            conditioning=ClassLabels(10),
            cond={"class_label": torch.tensor([1, 2])},
            guidance_scale=scale,
            guidance_interval=(0.3, 1.0),
            guidance_channels=channels,
        )(x, t)

    assert velocity(0.5, 3.0)[:, 0, 0, 0].tolist() == [10 + 3 * (1 - 10), 10 + 3 * (2 - 10)]
    assert velocity(0.2, 3.0)[:, 0, 0, 0].tolist() == [1, 2]
    assert len(model.x_t) == 2  # outside the interval the null condition costs nothing
    assert velocity(0.5, 1.0)[:, 0, 0, 0].tolist() == [1, 2]
    assert velocity(0.5, 3.0)[0, :, 0, 0].tolist() == [-17] * 4 + [1] * 4
    assert velocity(0.5, 3.0, channels=3)[0, :, 0, 0].tolist() == [-17] * 3 + [1] * 5


def test_an_objective_that_asks_for_features_is_refused_with_a_model_that_lacks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(1, 8, 8), num_classes=10)
    assert spec.features == ["blocks.0", "blocks.1", "blocks.2"]
    monkeypatch.setattr(FlowMatching, "features", ("blocks.1", "blocks.3"))
    right = "asks for the features blocks.3, and dit debugmodel has blocks.0 to blocks.2"
    with pytest.raises(ConfigError, match=f'diffusion.objective = "flow_matching": {right}'):
        build_objective(Diffusion(), spec)
    with pytest.raises(ConfigError, match=r"asks for the features blocks.1, blocks.3, and dit debugmodel has none"):
        build_objective(Diffusion(), dataclasses.replace(spec, features=()))


def test_sampling_may_have_another_shift_than_training() -> None:
    timesteps = Timesteps(kind="uniform", shift=2.0)
    objective = FlowMatching(conditioning=Unconditional(), timesteps=timesteps, label_dropout=0)
    for given, shift in ((None, 2.0), (1.0, 1.0), (3.0, 3.0)):
        seen: list[float] = []

        def predict(x: torch.Tensor, t: float, seen: list[float] = seen) -> torch.Tensor:
            seen.append(t)
            return x

        objective.sample(
            predict,
            torch.zeros(1),
            sampling=Sampling(num_steps=4, timestep_shift=given),
            step_noise=lambda step: torch.zeros(()),
        )
        assert seen == [t / (t + shift * (1 - t)) for t in (0.0, 0.25, 0.5, 0.75)]
