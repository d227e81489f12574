# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Loss scaling: small gradients survive float16, an overflow costs only one step, and a real NaN ends the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import KEEP
from torch import nn

from torchditan.optim import loss_scaling
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.loss_scaling import INITIAL_SCALE, LossScaler
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import Train

CPU = torch.device("cpu")


def test_gradients_that_underflow_in_float16_come_back_whole() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    for scale, expected in ((1.0, 0.0), (INITIAL_SCALE, 1e-8)):
        half = weight.half()
        weight.grad = torch.autograd.grad(half.sum().float() * 1e-8 * scale, half)[0].float()
        scaler = LossScaler(CPU)
        scaler.load_state_dict({"loss_scale": scale, "loss_scale_steps": 0})
        scaler.unscale([weight])
        assert weight.grad.item() == pytest.approx(expected, rel=1e-2)


def test_an_overflow_halves_the_scale_and_skips_the_step_alone() -> None:
    weight = nn.Parameter(torch.ones(3))
    guard, scaler = DivergenceGuard(torch.optim.AdamW([weight], fused=True)), LossScaler(CPU)
    weight.grad = torch.full((3,), math.inf)
    norm = torch.tensor(math.inf)
    guard.step(1, norm, None, scaler.judge(norm))
    assert torch.equal(weight, torch.ones(3)) and scaler.scale == INITIAL_SCALE / 2 and scaler.num_skipped == 1
    weight.grad = torch.ones(3)
    norm = torch.tensor(1.0)
    guard.step(2, norm, None, scaler.judge(norm))
    assert not torch.equal(weight, torch.ones(3)) and scaler.scale == INITIAL_SCALE / 2


def test_a_gradient_that_no_scale_helps_is_a_divergence() -> None:
    weight = nn.Parameter(torch.ones(3))
    guard, scaler = DivergenceGuard(torch.optim.AdamW([weight], fused=True)), LossScaler(CPU)
    norm = torch.tensor(math.nan)
    with pytest.raises(DivergenceError, match="step 17"):
        for step in range(1, 30):
            guard.step(step, norm, None, scaler.judge(norm))


def test_the_scale_grows_again(monkeypatch) -> None:
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)
    scaler = LossScaler(CPU)
    scales = []
    for _ in range(6):
        scaler.judge(torch.tensor(1.0))
        scales.append(scaler.scale.item() / INITIAL_SCALE)
    assert scales == [1, 1, 2, 2, 2, 4]


def test_a_run_in_float16_follows_float32_and_resumes_with_its_scale(train: Train, zoo: Zoo, tmp_path: Path) -> None:
    half = [*KEEP, "--training.mixed_precision_param=float16"]
    train("float16", *half)
    losses, expected = (
        [record["loss"] for record in read_metrics(run)] for run in (tmp_path / "float16", zoo("digits"))
    )
    assert losses != expected and losses == pytest.approx(expected, rel=2e-3)
    train("float16", *half, "--training.steps=8")
    progress = json.loads((tmp_path / "float16/checkpoint/step-00000008/progress.json").read_text())
    assert progress["loss_scale"] == INITIAL_SCALE and progress["loss_scale_steps"] == 8
