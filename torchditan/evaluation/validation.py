# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss on held-out images with fixed noise and timesteps: a curve without the noise of training's."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from torchditan.autoencoders.latent_space import SampleSpace
from torchditan.diffusion.flow_matching import Objective
from torchditan.randomness import Randomness, normal
from torchditan.stream import ImageDataset, read_image

_GOLDEN_RATIO = 0.6180339887498949


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    *,
    objective: Objective,
    dataset: ImageDataset,
    space: SampleSpace,
    num_images: int,
    batch_size: int,
    corrupt_images: Literal["error", "skip"],
    device: torch.device,
) -> float:
    """Mean loss over evenly spaced images; the same images, noise and timesteps at every call and world size.

    The noise seed is a constant, so that runs of different seeds can be compared. Timesteps follow a
    low-discrepancy sequence through the training distribution, and no label is dropped.

    Args:
        model: the model, called equally often on every rank.
        objective: gives the per-sample loss.
        dataset: held-out images.
        space: makes them what the model sees.
        num_images: images to use, at most the dataset's.
        batch_size: images at once on each rank.
        corrupt_images: as in training.
        device: where the model is.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = min(num_images, len(dataset))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, count, batch_size * world_size):
        numbers = range(start + rank * batch_size, start + (rank + 1) * batch_size)
        real = torch.tensor([number < count for number in numbers])
        rows = [min(number, count - 1) for number in numbers]
        chosen = [row * len(dataset) // count for row in rows]
        items = [
            read_image(dataset, index, num_classes=len(dataset.class_names), corrupt_images=corrupt_images)
            for index in chosen
        ]
        batch = {"sample": torch.stack([item["sample"] for item in items]).to(device)}
        if "class_label" in items[0]:
            batch["class_label"] = torch.tensor([item["class_label"] for item in items], device=device)
        randomness = Randomness(
            noise=normal(0, "validation", rows, space.sample_shape),
            timestep=(torch.tensor(rows, dtype=torch.float32) * _GOLDEN_RATIO + 0.5) % 1,
            label_dropout=torch.ones(len(rows)),
        ).to(device)
        with torch.compiler.set_stance("force_eager"):
            losses = objective.loss(model, space.prepare(batch), randomness)
        total += losses[real.to(device)].double().sum()
    dist.all_reduce(total)
    return total.item() / count
