# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation loss on held-out images with fixed noise and timesteps, so the curve has no sampling noise.

The bins of t need forward passes in addition to those of the validation loss. The latter follow the training
distribution, which leaves both ends of [0, 1] almost empty. Of 256 logit-normal (0, 1) timesteps, 7 are below 1/8 and
50 are between 3/8 and 1/2. The bins double the time of a validation: the 256 images of the quickstart take 2.1 s of
CPU time instead of 1.1 s, and a training step takes 1.9 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchditan.data_stream.datasets import Batch, GroupedDataset, ImageDataset, read_image
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.diffusion.objectives import Objective, split
from torchditan.distributed.precision import float64_device
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Permutation, Randomness, draw, normal

_GOLDEN_RATIO = 0.6180339887498949
_NUM_BINS = 8
BIN_KEYS = tuple(f"validation_loss_by_t/{i / _NUM_BINS:.3f}-{(i + 1) / _NUM_BINS:.3f}" for i in range(_NUM_BINS))
"""Keys of the bins of t in metrics.jsonl, from noise to data. Trackers group them by the part before the slash."""


@torch.no_grad()
def validation_losses(
    model: nn.Module,
    *,
    objective: Objective,
    uniform: Objective | None,
    dataset: ImageDataset,
    space: SampleSpace,
    num_images: int,
    batch_size: int,
    corrupt_images: Literal["error", "skip"],
    device: torch.device,
    leave_out: Callable[[Mapping[int, str]], None] = lambda skipped: None,
) -> dict[str, float]:
    """Mean loss over evenly spaced images. Images, noise and timesteps are the same at every call and world size.

    The noise seed is a constant, so that runs with different seeds are comparable. No label is dropped. The timesteps
    of `validation_loss` follow a low-discrepancy sequence through the training distribution.

    The bins have the same images and noise, but the timesteps of `stratified_timesteps`, not weighted by the training
    distribution. The model computes each batch once more for them; images are read and encoded once. Fewer than 8
    images are computed several times more, so that every bin has a loss.

    Args:
        model: the model, called equally often on every rank.
        objective: `validation_objective` of the run.
        uniform: `uniform_objective` of the run, for the bins; None omits them. A sample belongs to the bin of the t in
            its inputs.
        dataset: held-out images.
        space: converts images to the model's samples.
        num_images: images to use, at most the dataset's.
        batch_size: images at once on each rank.
        corrupt_images: as in training.
        device: where the model is.
        leave_out: called with unreadable images, which the next ones replace: index -> name and reason.

    Returns:
        `validation_loss` and one loss for each of `BIN_KEYS`. Bins that the objective never reaches are left out.
    """
    count = min(num_images, len(dataset))
    stratified = stratified_timesteps(count * -(-_NUM_BINS // count)).view(-1, count)  # (passes, count)
    if uniform is None:
        stratified = stratified[:0]
    sums_on = float64_device(device)
    total = torch.zeros((), dtype=torch.float64, device=sums_on)
    bins = torch.zeros(2, _NUM_BINS, dtype=torch.float64, device=sums_on)  # sum and number of the losses
    for rows, real in _batches(dataset, count, batch_size=batch_size):
        items = [
            read_image(
                dataset,
                row * len(dataset) // count,
                num_classes=len(dataset.class_names),
                corrupt_images=corrupt_images,
            )
            for row in rows
        ]
        leave_out({index: named for item in items for index, named in item["skipped"].items()})
        batch = _stack(items, device)
        batch["index"] = torch.tensor(rows, device=device)
        real = real.to(device)
        shape = space.shape_in(batch)
        others = {name: kind for name, kind in objective.numbers.items() if name not in NOISE_TIMESTEP_DROPOUT}
        randomness = Randomness(
            noise=normal(0, "validation", rows, shape),
            timestep=(torch.tensor(rows, dtype=torch.float32) * _GOLDEN_RATIO + 0.5) % 1,
            label_dropout=torch.ones(len(rows)),
            **draw(0, rows, shape, others),
        ).to(device)
        batch = space.prepare(batch)
        with torch.compiler.set_stance("force_eager"):
            losses = split(objective.validation_loss(model, batch, randomness))[1]["loss"]
            total += losses[real].to(sums_on).double().sum()
            for timesteps in stratified:
                randomness = Randomness(randomness, timestep=timesteps[rows].to(device))
                assert uniform is not None
                losses = split(uniform.validation_loss(model, batch, randomness))[1]["loss"]
                times = uniform.model_time(uniform.inputs(batch, randomness).t)
                bins += _sums_in_bins(losses.to(sums_on), times.to(sums_on), real.to(sums_on))
    dist.all_reduce(total)
    dist.all_reduce(bins)
    means = {key: sum_ / number for key, sum_, number in zip(BIN_KEYS, *bins.tolist(), strict=True) if number}
    return {"validation_loss": total.item() / count, **means}


def stratified_timesteps(count: int) -> torch.Tensor:
    """Timesteps (count,) float32 in (0, 1), in a fixed random order: equally many in each bin, or one more.

    The timesteps of a bin are the centers of equal parts of it.
    """
    parts = np.array_split(np.arange(count), _NUM_BINS)
    timesteps = [(i + (np.arange(len(part)) + 0.5) / len(part)) / _NUM_BINS for i, part in enumerate(parts)]
    order = Permutation(0, "validation timesteps", 0, length=count)(np.arange(count))
    return torch.from_numpy(np.concatenate(timesteps)[order]).float()


def _sums_in_bins(losses: torch.Tensor, timesteps: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Sum and number (2, bins) float64 of the real samples' losses (B,) in each bin of their timesteps (B,)."""
    places = (timesteps * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)  # t = 1 belongs to the last bin
    is_in = (places[:, None] == torch.arange(_NUM_BINS, device=places.device)) & real[:, None]  # (B, bins)
    return torch.stack([torch.where(is_in, losses[:, None].double(), 0.0).sum(0), is_in.double().sum(0)])


def _stack(items: list[dict[str, Any]], device: torch.device) -> Batch:
    return {
        name: torch.stack([torch.as_tensor(item[name]) for item in items]).to(device)
        for name, value in items[0].items()
        if isinstance(value, torch.Tensor) or name == "class_label"
    }


def _batches(dataset: ImageDataset, count: int, *, batch_size: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield (image numbers of a batch with one shape, which of them are not padding), equally often on each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [np.arange(count)]
    if isinstance(dataset, GroupedDataset):
        chosen = np.arange(count) * len(dataset) // count
        groups = [np.flatnonzero(np.isin(chosen, group)) for group in dataset.groups()]
    for group in groups:
        for start in range(0, len(group), batch_size * world_size):
            places = np.arange(start + rank * batch_size, start + (rank + 1) * batch_size)
            yield group[places.clip(max=len(group) - 1)].tolist(), torch.from_numpy(places < len(group))
