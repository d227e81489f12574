# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss on held-out images with fixed noise and timesteps, so the curve has no sampling noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchditan.data_stream.datasets import GroupedDataset, ImageDataset, read_image
from torchditan.diffusion.objectives import Loss
from torchditan.latents.sample_space import SampleSpace
from torchditan.randomness import Randomness, normal

_GOLDEN_RATIO = 0.6180339887498949


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    *,
    loss: Loss,
    dataset: ImageDataset,
    space: SampleSpace,
    num_images: int,
    batch_size: int,
    corrupt_images: Literal["error", "skip"],
    device: torch.device,
) -> float:
    """Mean loss over evenly spaced images. Images, noise and timesteps are the same at every call and world size.

    The noise seed is a constant, so that runs with different seeds are comparable. Timesteps follow a
    low-discrepancy sequence through the training distribution, and no label is dropped.

    Args:
        model: the model, called equally often on every rank.
        loss: returns the loss of each sample under the run's objective.
        dataset: held-out images.
        space: converts images to the model's samples.
        num_images: images to use, at most the dataset's.
        batch_size: images at once on each rank.
        corrupt_images: as in training.
        device: where the model is.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = min(num_images, len(dataset))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows, real in _batches(dataset, count, batch_size=batch_size, rank=rank, world_size=world_size):
        chosen = [row * len(dataset) // count for row in rows]
        items = [
            read_image(dataset, index, num_classes=len(dataset.class_names), corrupt_images=corrupt_images)
            for index in chosen
        ]
        batch = {
            name: torch.stack([torch.as_tensor(item[name]) for item in items]).to(device)
            for name, value in items[0].items()
            if isinstance(value, torch.Tensor) or name == "class_label"
        }
        batch["index"] = torch.tensor(rows, device=device)
        randomness = Randomness(
            noise=normal(0, "validation", rows, space.shape_in(batch)),
            timestep=(torch.tensor(rows, dtype=torch.float32) * _GOLDEN_RATIO + 0.5) % 1,
            label_dropout=torch.ones(len(rows)),
        ).to(device)
        with torch.compiler.set_stance("force_eager"):
            losses = loss(model, space.prepare(batch), randomness)
        total += losses[real.to(device)].double().sum()
    dist.all_reduce(total)
    return total.item() / count


def _batches(
    dataset: ImageDataset, count: int, *, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield (image numbers of a batch with one shape, which of them are not padding), equally often on each rank."""
    groups = [np.arange(count)]
    if isinstance(dataset, GroupedDataset):
        chosen = np.arange(count) * len(dataset) // count
        groups = [np.flatnonzero(np.isin(chosen, group)) for group in dataset.groups()]
    for group in groups:
        for start in range(0, len(group), batch_size * world_size):
            places = np.arange(start + rank * batch_size, start + (rank + 1) * batch_size)
            yield group[places.clip(max=len(group) - 1)].tolist(), torch.from_numpy(places < len(group))
