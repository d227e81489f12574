# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""MeanFlow against a Gaussian with a known mean velocity, its derivative against differences, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from minimal_parts import ALIGNED
from random_models import random_model
from refusals import refused
from torch import nn

from torchditan.config.loader import load_config, parse_config
from torchditan.config.options import Diffusion, Model, Sampling
from torchditan.diffusion.derivative import derivative
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.mean_flow import GUIDANCE, INTERVAL, MeanFlow
from torchditan.diffusion.objectives import build_objective, split
from torchditan.diffusion.timesteps import Timesteps
from torchditan.extras.methods.ddt import DDT, DDTConfig
from torchditan.models import ClassLabels, ModelSpec, Unconditional, build_model_spec, scalars_of
from torchditan.models.dit import DiT, DiTConfig
from torchditan.models.flops import count_model_flops
from torchditan.randomness import Randomness, draw
from torchditan.sampling.sampler import Sampler

MEAN, STD = 1.5, 0.4


class Gaussian(nn.Module):
    """The mean velocity of the path from noise to data N(MEAN, STD^2). `scale` is 1 for the true one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    @staticmethod
    def deviation(t: torch.Tensor) -> torch.Tensor:
        return ((1 - t) ** 2 + (t * STD) ** 2).sqrt()

    def velocity(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = wide(t, x_t)
        slope = (-(1 - t) + t * STD**2) / self.deviation(t) ** 2
        return MEAN + slope * (x_t - t * MEAN)

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        h = wide(cond[INTERVAL], x_t)
        start, end = wide(t, x_t), wide(t, x_t) + h
        arrived = end * MEAN + self.deviation(end) / self.deviation(start) * (x_t - start * MEAN)
        mean_velocity = (arrived - x_t) / torch.where(h == 0, torch.ones_like(h), h)
        return self.scale * torch.where(h == 0, self.velocity(x_t, t), mean_velocity)


def objective_of(**options: Any) -> MeanFlow:
    return MeanFlow(Unconditional(), Timesteps(kind="uniform"), label_dropout=0.0, **options)


def pairs(count: int = 8) -> tuple[dict[str, torch.Tensor], Randomness]:
    generator = torch.Generator().manual_seed(0)
    numbers = objective_of().numbers
    randomness = draw(0, list(range(count)), (2, 4, 4), numbers)
    return {"sample": MEAN + STD * torch.randn(count, 2, 4, 4, generator=generator)}, randomness


@pytest.mark.parametrize("tangent", ["model", "data"])
def test_the_true_mean_velocity_regresses_on_the_velocity_of_the_sample(tangent: str) -> None:
    """V = u - h du/dt of the true u is the velocity at t for every h, if the derivative is along that velocity."""
    model, (batch, randomness) = Gaussian(), pairs()
    objective = objective_of(tangent=tangent)
    total, numbers = split(objective.loss(model, batch, randomness))
    t, h = objective.interval(randomness)
    assert (h[::2] == 0).all() and (h[1::2] > 0).all() and ((t + h) <= 1).all()
    x, noise = batch["sample"], randomness.noise
    x_t = (1 - wide(t, x)) * noise + wide(t, x) * x
    error = (model.velocity(x_t, t) - (x - noise)).square().flatten(1).mean(1)
    if tangent == "model":
        torch.testing.assert_close(numbers["loss"], error, rtol=1e-4, atol=1e-4)
    else:  # the direction is another one where h > 0
        torch.testing.assert_close(numbers["loss"][::2], error[::2])
        assert not torch.allclose(numbers["loss"][1::2], error[1::2], rtol=1e-2)
    summed = 32 * numbers["loss"]
    torch.testing.assert_close(total.detach(), summed / (summed + 0.01))


def test_the_gradient_is_that_of_the_prediction_alone() -> None:
    """u is regressed on a constant: the derivative and the weight have no gradients."""
    model, (batch, randomness) = Gaussian(), pairs()
    objective = objective_of()
    with torch.no_grad():
        model.scale.fill_(0.7)
    objective.loss(model, batch, randomness).total.sum().backward()

    t, h = objective.interval(randomness)
    x, noise = batch["sample"], randomness.noise
    x_t = (1 - wide(t, x)) * noise + wide(t, x) * x
    with torch.no_grad():
        u = model(x_t, t, {INTERVAL: h})
        v = model(x_t, t, {INTERVAL: torch.zeros_like(h)})
        e = 1e-3

        def along(step: float) -> torch.Tensor:
            return model(x_t + step * v, t + step, {INTERVAL: h - step})

        du_dt = (along(e) - along(-e)) / (2 * e)
        difference = u - wide(h, x) * du_dt * (wide(h, x) > 0) - (x - noise)
        squared = difference.square().flatten(1).sum(1)
        by_scale = (2 * difference * u / 0.7).flatten(1).sum(1) / (squared + 0.01)
    assert model.scale.grad is not None
    assert model.scale.grad.item() == pytest.approx(by_scale.sum().item(), rel=2e-3)


def test_with_h_0_the_loss_is_that_of_flow_matching() -> None:
    (batch, randomness), model = pairs(), Gaussian()
    randomness["second_timestep"] = randomness.timestep
    plain = FlowMatching(Unconditional(), Timesteps(kind="uniform"), label_dropout=0.0)

    def velocity(x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        return model.velocity(x_t, t)

    expected = plain.loss(velocity, batch, randomness)  # type: ignore[arg-type]
    objective = objective_of()
    torch.testing.assert_close(objective.loss(model, batch, randomness).logged["loss"], expected)
    torch.testing.assert_close(objective.validation_loss(model, batch, randomness), expected)
    odd = {"sample": batch["sample"][:3]}, Randomness({name: value[:3] for name, value in randomness.items()})
    torch.testing.assert_close(objective.validation_loss(model, *odd), expected[:3])


@pytest.mark.parametrize("num_steps", [1, 4])
def test_any_number_of_steps_ends_at_the_sample(num_steps: int) -> None:
    model, noise = Gaussian(), torch.randn(3, 2, 4, 4)
    calls = []

    def predict(x: torch.Tensor, t: float, **scalars: float) -> torch.Tensor:
        calls.append((t, scalars[INTERVAL]))
        numbers = torch.full((3,), t), torch.full((3,), scalars[INTERVAL])
        return model(x, numbers[0], {INTERVAL: numbers[1]}).detach()

    sampling = Sampling(num_steps=num_steps)
    found = objective_of().sample(predict, noise, sampling=sampling, step_noise=lambda step: noise)
    torch.testing.assert_close(found, MEAN + STD * noise, rtol=1e-4, atol=1e-4)
    assert len(calls) == num_steps == objective_of().num_evaluations(sampling)
    assert [t for t, _ in calls] == pytest.approx([i / num_steps for i in range(num_steps)])


MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "official": {"norm_type": "np_layernorm", "qk_norm": False, "mlp": "gelu", "position": "sincos"},
    "in context": {"conditioning": "in_context", "norm_type": "layernorm"},
    "DiT-DH": {"head_depth": 1, "head_width": 48, "head_heads": 2, "timestep_frequencies": "gaussian"},
    "adaLN-single, cross-attention": {
        "conditioning": "adaln_single",
        "num_classes": 0,
        "text": "cross_attention",
        "text_tokens": 4,
        "text_width": 6,
        "pooled_width": 5,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_derivative_of_a_dit_is_that_of_central_differences(name: str) -> None:
    sizes: dict[str, Any] = {"depth": 2, "width": 32, "num_heads": 2, "patch_size": 2, "input_channels": 3}
    options = {**sizes, "image_size": (8, 8), "num_classes": 10, "timestep_scale": 1.0, **MODELS[name]}
    model_type, config_type = (DDT, DDTConfig) if "head_depth" in options else (DiT, DiTConfig)
    config = config_type(scalars=((INTERVAL, 1.0),), **options)
    model = random_model(config, model_type).double()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_t, dx_t = normal(3, 3, 8, 8), normal(3, 3, 8, 8)
    t, h = (torch.rand(3, generator=generator, dtype=torch.float64) for _ in range(2))
    cond = {"class_label": torch.tensor([1, 2, 10])}
    if config.text:
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
        cond = {"prompt_embeds": normal(3, 4, 6), "pooled_prompt_embeds": normal(3, 5), "prompt_attention_mask": mask}
    inputs, tangents = (x_t, t, {**cond, INTERVAL: h}), (dx_t, torch.ones_like(t), {INTERVAL: -torch.ones_like(h)})
    u, du_dt = derivative(model, inputs, tangents)

    def along(step: float) -> torch.Tensor:
        return model(x_t + step * dx_t, t + step, {**cond, INTERVAL: h - step})

    with torch.no_grad():
        assert (u - along(0)).abs().max() < 1e-12
        expected = (along(1e-5) - along(-1e-5)) / 2e-5
    assert du_dt.abs().max() > 0.1
    assert (du_dt - expected).abs().max() < 1e-7 * du_dt.abs().max()


def spec_of(objective: str, **options: Any) -> tuple[Diffusion, ModelSpec]:
    diffusion = Diffusion(objective=objective)
    model = Model(flavor="debugmodel", timestep_scale=1.0)
    spec = build_model_spec(
        model, sample_shape=(2, 8, 8), num_classes=options.pop("num_classes", 10), scalars=scalars_of(diffusion)
    )
    return diffusion, spec.with_heads(build_objective(diffusion, spec).heads)


RATIOS = {"imf tangent=data": 4 / 3, "imf": 3 / 2, "imf guidance=true": 11 / 6}


@pytest.mark.parametrize("objective", RATIOS)
def test_a_step_costs_what_its_passes_cost(objective: str) -> None:
    """Forward and backward are 3 forwards. The derivative is 2 for half of the samples, and each velocity is 1."""
    diffusion, spec = spec_of(objective)
    found = count_loss_flops(diffusion, spec)
    plain = count_model_flops(spec)
    assert found.total / plain.total == pytest.approx(RATIOS[objective], rel=0.03)  # attention has two tangents


class Guided(nn.Module):
    """Velocities that only depend on label and guidance; it remembers what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        self.cond = cond
        value = torch.where(cond["class_label"] == 10, 0.5, 2.0) + 0.1 * cond["guidance"]
        return wide(value, x_t) + 0 * x_t + self.offset


def test_the_guided_target_moves_away_from_the_null_label_inside_the_interval() -> None:
    objective = MeanFlow(ClassLabels(10), Timesteps(kind="uniform"), label_dropout=0.25, guidance=8.0)
    numbers = draw(0, list(range(6)), (1, 2, 2), objective.numbers)
    numbers |= {"timestep": torch.full((6,), 0.2), "second_timestep": torch.full((6,), 0.2)}
    numbers |= {"label_dropout": torch.tensor([0.9, 0.9, 0.1, 0.9, 0.9, 0.1])}
    numbers |= {"guidance": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), "guidance_end": torch.rand(6)}
    numbers |= {"guidance_start": torch.tensor([0.0, 0.0, 0.0, 0.9, 0.0, 0.0])}
    batch = {"sample": torch.randn(6, 1, 2, 2), "class_label": torch.arange(6)}
    model = Guided()
    losses = objective.loss(model, batch, Randomness(numbers))
    strength = torch.tensor([0, 7 / 8, 7 / 8, 7 / 8, 7 / 8, 7 / 8])  # 1 - 1 / scale
    torch.testing.assert_close(model.cond["guidance"], strength)
    torch.testing.assert_close(model.cond["guidance_start"], torch.tensor([0, 0, 0, 0.45, 0, 0]))
    torch.testing.assert_close(model.cond["guidance_end"], (1 + numbers["guidance_end"]) / 2)
    unguided = objective.inputs(batch, Randomness(numbers)).cond
    assert [unguided[name].unique().tolist() for name in GUIDANCE] == [[0], [0], [1]]
    velocity = batch["sample"] - numbers["noise"]
    # Scale 1, guided with scale 8, without a label, before the interval, guided, without a label.
    target = velocity + wide(torch.tensor([0, 7 / 8, 0, 0, 7 / 8, 0]), velocity) * (1.5 + 0.1 * 7 / 8)
    prediction = wide(torch.tensor([2.0, 2.0, 0.5, 2.0, 2.0, 0.5]) + 0.1 * strength, velocity)
    squared = (prediction - target).square().flatten(1)
    torch.testing.assert_close(losses.logged["loss"], squared.mean(1))
    losses.total.sum().backward()
    assert model.offset.grad is not None  # the target is constant
    expected = 2 * (prediction - target).flatten(1).sum(1) / (squared.sum(1) + 0.01)
    torch.testing.assert_close(model.offset.grad, expected.sum())


def test_guidance_as_a_condition_takes_no_second_evaluation() -> None:
    evaluations, given = {}, {}
    for name in ("imf", "imf guidance=true"):
        diffusion, spec = spec_of(name)
        objective = build_objective(diffusion, spec)
        sampling = Sampling(num_steps=2, guidance_scale=4.0, guidance_interval=[0.1, 0.8])
        evaluations[name] = Sampler(spec, objective, torch.device("cpu")).evaluations_per_sample(sampling)

        def predict(x: torch.Tensor, t: float, name: str = name, **scalars: float) -> torch.Tensor:
            given[name] = scalars
            return x

        noise = torch.randn(1, 2, 8, 8)
        objective.sample(predict, noise, sampling=sampling, step_noise=lambda step: torch.empty(0))
    assert evaluations == {"imf": 2 + 1, "imf guidance=true": 2}
    assert given["imf"].keys() == {INTERVAL}
    assert [given["imf guidance=true"][name] for name in GUIDANCE] == [0.75, 0.1, 0.8]


def test_it_has_defaults_of_its_own_that_a_typed_value_replaces() -> None:
    flags = ["--job.config_file=quickstart", "--diffusion.objective=imf"]
    config = load_config(flags)
    assert (config.model.timestep_scale, config.sampling.num_steps, config.diffusion.logit_normal_mean) == (1, 1, 0.4)
    config = load_config([*flags, "--sampling.num_steps=50", "--diffusion.logit_normal_mean=0"])
    assert (config.sampling.num_steps, config.diffusion.logit_normal_mean) == (50, 0)
    plain = parse_config(flags[:1])
    assert (plain.model.timestep_scale, plain.sampling.num_steps) == (1000, 50)


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--model.timestep_scale=1000"], "model.timestep_scale = 1000.0", ["imf", "1", "refit_time"]),
        (["--diffusion.prediction=x"], 'diffusion.prediction = "x"', ["imf", "v"]),
        (["--model.name=flux", "--model.flavor=debugmodel"], 'diffusion.objective = "imf"', ["flow_matching", "flux"]),
        ([f"--diffusion.ingredients={ALIGNED}"], "diffusion.ingredients", ["imf", ALIGNED]),
        (["--diffusion.objective=imf guidance=3", "--sampling.guidance_scale=4"], "sampling.guidance_scale = 4", ["3"]),
        (
            ["--diffusion.objective=imf guidance=3", "--sampling.guidance_interval", "0.6", "0.9"],
            "sampling.guidance_interval = [0.6, 0.9]",
            ["0.5"],
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: list[str], about: str, mentions: list[str]) -> None:
    with refused(about, *mentions):
        load_config(["--job.config_file=quickstart", "--diffusion.objective=imf", *flags])


def test_wrong_options_are_refused_in_one_line() -> None:
    with refused('diffusion.objective = "imf tangent=noise"', "model", "data"):
        spec_of("imf tangent=noise")


def test_the_largest_scale_is_an_option() -> None:
    diffusion, spec = spec_of("imf guidance=3")
    objective = build_objective(diffusion, spec)
    numbers = {**dict.fromkeys(GUIDANCE, torch.tensor([0.0, 0.5, 1.0]))}
    assert isinstance(objective, MeanFlow)
    strength = objective.guidance_of(Randomness(numbers))["guidance"]
    torch.testing.assert_close(1 / (1 - strength), torch.tensor([1.0, 3**0.5, 3.0]))
