# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Loss scaling: small gradients survive float16, an overflow costs only one step, and a real NaN ends the run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from torchditan.optim import loss_scaling
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.loss_scaling import INITIAL_SCALE, LossScaler

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


def test_a_run_in_float16_follows_float32_and_resumes_with_its_scale(run_script, tmp_path) -> None:
    flags = [
        "--job.config_file=quickstart",
        "--model.flavor=debugmodel",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=6",
        "--training.global_batch_size=8",
        "--metrics.log_freq=1",
        "--metrics.enable_sampling=false",
        "--validation.freq=0",
        "--checkpoint.enable_checkpoint",
        "--lr_scheduler.schedule=constant",
    ]
    losses = {}
    for precision in ("float32", "float16"):
        assert (
            run_script(
                "train.py",
                *flags,
                f"--training.mixed_precision_param={precision}",
                f"--metrics.experiment_name={precision}",
            ).code
            == 0
        )
        lines = (tmp_path / precision / "metrics.jsonl").read_text().splitlines()
        losses[precision] = [json.loads(line)["loss"] for line in lines]
    assert losses["float16"] != losses["float32"]
    assert losses["float16"] == pytest.approx(losses["float32"], rel=2e-3)
    flags[3] = "--training.steps=8"
    assert (
        run_script(
            "train.py", *flags, "--training.mixed_precision_param=float16", "--metrics.experiment_name=float16"
        ).code
        == 0
    )
    progress = json.loads((tmp_path / "float16/checkpoint/step-00000008/progress.json").read_text())
    assert progress["loss_scale"] == INITIAL_SCALE and progress["loss_scale_steps"] == 8
