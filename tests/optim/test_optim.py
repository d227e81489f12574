# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Schedules, weight decay, clipping, the non-finite guard and the EMA, in one process without FSDP."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchditan.config.options import LRScheduler, Optimizer
from torchditan.models.dit import DiT, DiTConfig
from torchditan.optim.ema import EMA, gamma_of_width
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm, parameters_without_decay
from torchditan.optim.schedules import build_schedule


def rates(schedule: str, **options: float | str) -> list[float]:
    config = LRScheduler(schedule=schedule, **options)
    return [build_schedule(config).rate(step, steps=100, peak=2.0) for step in range(1, 101)]


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant", warmup_steps=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates("constant")[0] == 2.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_decays_fall_from_the_peak_to_their_floor(schedule: str) -> None:
    curve = rates(schedule, warmup_steps=10, min_lr_factor=0.1)
    assert max(curve) == 2.0
    config = LRScheduler(schedule=schedule, warmup_steps=10, min_lr_factor=0.1)
    assert build_schedule(config).rate(101, steps=100, peak=2.0) == pytest.approx(0.2)
    assert curve[9:] == sorted(curve[9:], reverse=True)


def test_decays_pass_through_their_closed_forms() -> None:
    assert rates("cosine")[24] == pytest.approx(1 + math.cos(math.pi * 25 / 101))
    assert rates("linear")[24] == pytest.approx(2 * (1 - 25 / 101))
    wsd = rates("wsd", decay_ratio=0.2)
    assert wsd[:80] == [2.0] * 80
    assert wsd[80:] == pytest.approx([2 * (1 - step / 21) for step in range(1, 21)])


def small_dit(**options: object) -> DiT:
    config = DiTConfig(
        depth=2, width=32, num_heads=2, patch_size=2, input_channels=1, image_size=(8, 8), num_classes=10, **options
    )
    model = DiT(config)
    model.init_weights(0)
    return model


def test_weight_decay_leaves_out_norms_biases_and_embeddings() -> None:
    for options in ({}, {"norm_type": "layernorm", "position": "sincos"}, {"conditioning": "in_context"}):
        model = small_dit(**options)
        plain = parameters_without_decay(model)
        names = {name for name, _ in model.named_parameters()}
        matrices = {
            name for name in names if name.endswith(".weight") and dict(model.named_parameters())[name].dim() > 1
        }
        assert plain == names - matrices | {name for name in names if "embedding_table" in name or "pos_embed" in name}
        assert "blocks.0.attn.qkv.weight" not in plain
        assert "x_embedder.proj.weight" not in plain


def test_optimizer_groups_hold_every_trainable_parameter_once() -> None:
    model = small_dit(position="sincos")
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.1))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_clipping_reports_the_norm_before_and_leaves_the_limit_behind() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = clip_grad_norm(parameters, max_norm=0)
    assert norm.item() == pytest.approx(math.sqrt(28))
    assert parameters[0].grad.tolist() == [2.0] * 3
    clip_grad_norm(parameters, max_norm=1.0)
    assert clip_grad_norm(parameters, max_norm=0).item() == pytest.approx(1.0, rel=1e-5)


def test_ema_warms_up_and_then_follows_its_decay() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    ema = EMA(model, decay=0.9)
    expected = 0.0
    for step in range(1, 200):
        model.weight.data.fill_(float(step))
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert ema.average["weight"].item() == pytest.approx(expected, rel=1e-5)
    assert ema.decay_at(1) == pytest.approx(2 / 11)
    assert EMA(model, decay=0.9, warmup=False).decay_at(1) == 0.9


@pytest.mark.parametrize(("width", "exponent"), [(0.05, 16.97), (0.1, 6.94)])
def test_an_average_of_a_width_is_that_of_edm2(width: float, exponent: float) -> None:
    """Karras et al. 2024: exponents and widths of section 3.1, and the width of a profile in closed form."""
    gamma, steps = gamma_of_width(width), 200
    assert gamma == pytest.approx(exponent, abs=0.005)
    assert math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) == pytest.approx(width, rel=1e-12)
    model = nn.Linear(1, 1, bias=False).double()  # its initial weight does not count
    ema = EMA(model, width=width)
    weights = torch.randn(steps, dtype=torch.float64)
    for step, weight in enumerate(weights, start=1):
        model.weight.data.fill_(weight)
        ema.update(step)
    integral = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** (gamma + 1)  # of the profile up to each step
    assert ema.average["weight"].item() == pytest.approx((integral.diff() * weights).sum().item(), rel=1e-12)
