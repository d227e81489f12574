# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The model memorises eight images with different labels, and the sampler reproduces them."""

from __future__ import annotations

import math

import pytest
import torch

from torchditan.config.options import Model, Optimizer, Sampling
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.timesteps import Timesteps
from torchditan.models import build_model_spec
from torchditan.optim.optimizers import build_optimizer
from torchditan.randomness import draw
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.sampler import Sampler

IMAGES, STEPS = 8, 1200


@pytest.mark.slow
def test_eight_images_are_memorised_and_sampled_back() -> None:
    from torchditan.config.options import Dataset
    from torchditan.datasets.digits import build

    digits = build(Dataset(), split="train", input_channels=None)
    x = torch.stack([digits[index]["sample"] for index in range(IMAGES)])  # (8, 1, 8, 8)
    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(1, 8, 8), num_classes=IMAGES)
    model = spec.build()
    model.init_weights(0)
    objective = FlowMatching(
        conditioning=spec.conditioning,
        timesteps=Timesteps(kind="logit_normal"),
        label_dropout=0.0,
    )
    batch = {"sample": x.repeat(4, 1, 1, 1), "class_label": torch.arange(IMAGES).repeat(4)}
    fixed = draw(1, list(range(32)), (1, 8, 8))

    def fixed_loss() -> float:
        with torch.no_grad():
            return objective.loss(model, batch, fixed).mean().item()

    start = fixed_loss()
    optimizer = build_optimizer(model, Optimizer(lr=3e-3, beta2=0.99))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3 * (1 - step / STEPS)
        loss = objective.loss(model, batch, draw(0, list(range(32 * step, 32 * step + 32)), (1, 8, 8))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert fixed_loss() < 0.05 * start
    sampler = Sampler(spec, objective, torch.device("cpu"))
    rows = SampleRows.of_classes(range(IMAGES), class_names=[str(label) for label in range(IMAGES)])
    drawing = Drawing(rows, rows.each(1), Sampling(guidance_scale=1.0, num_steps=50), seed=0)
    samples = sampler.draw_all(model, drawing, batch_size=IMAGES)
    squared_error = (samples.clamp(-1, 1) - x).square().mean((1, 2, 3))
    psnr = [10 * math.log10(4 / error) for error in squared_error.tolist()]  # images span 2
    print(f"loss {start:.4f} -> {fixed_loss():.4f} ({fixed_loss() / start:.1%}), PSNR {min(psnr):.1f} dB at least")
    assert min(psnr) > 25
