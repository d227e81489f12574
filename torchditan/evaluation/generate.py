# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Generated samples from a model, divided over the ranks, and the real ones to lay beside them.

Notable:
- sample k of class c starts from noise keyed to (seed, c, k): the same picture at any world size, batch
  split and grid shape;
- every rank runs the same number of forward passes, padding included, so under FSDP no rank waits for another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torchditan.config import Sampling
from torchditan.diffusion.samplers import guided_velocity, solve, timestep_grid
from torchditan.models.spec import Condition, Conditioning
from torchditan.randomness import normal
from torchditan.stream import CorruptImageError, ImageDataset

_SAMPLES_PER_CLASS = 1 << 32  # room for the sample's number in its noise index
_SEARCH_LIMIT = 20_000


@torch.no_grad()
def generate(
    model: nn.Module,
    *,
    labels: list[int],
    samples_per_label: int,
    sample_shape: tuple[int, ...],
    conditioning: Conditioning,
    conditional: bool,
    sampling: Sampling,
    timestep_shift: float,
    seed: int,
    batch_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Sample the model by the `[sampling]` options; all ranks call it and all get the result.

    Args:
        model: predicts the velocity.
        labels: class labels, one row of samples each.
        samples_per_label: samples of each label.
        sample_shape: (C, H, W).
        conditioning: gives the null condition.
        conditional: False samples without labels; `labels` then only names the noise.
        sampling: solver, steps and guidance.
        timestep_shift: as in training.
        seed: seed of the starting noise.
        batch_size: samples at once on each rank.
        device: where the model is.

    Returns:
        (len(labels), samples_per_label, C, H, W) float32 on the CPU.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wanted = [(label, number) for label in labels for number in range(samples_per_label)]
    per_rank = -(-len(wanted) // world_size)
    padded = wanted + [wanted[-1]] * (per_rank * world_size - len(wanted))
    mine = padded[rank * per_rank : (rank + 1) * per_rank]

    samples = []
    timesteps = timestep_grid(sampling.num_steps, shift=timestep_shift)
    low, high = sampling.guidance_interval
    for start in range(0, per_rank, batch_size):
        chunk = mine[start : start + batch_size]
        noise_index = [label * _SAMPLES_PER_CLASS + number for label, number in chunk]
        noise = normal(seed, "sample", noise_index, sample_shape).to(device)  # (b, C, H, W)
        cond: Condition = {}
        if conditional:
            cond = {"class_label": torch.tensor([label for label, _ in chunk], device=device)}
        velocity = guided_velocity(
            model,
            conditioning=conditioning,
            cond=cond,
            guidance_scale=sampling.guidance_scale,
            guidance_interval=(low, high),
            guidance_channels=sampling.guidance_channels,
        )
        # Training compiled the blocks for its own batch; other shapes run eagerly instead of recompiling.
        with torch.compiler.set_stance("force_eager"):
            samples.append(solve(velocity, noise, timesteps=timesteps, method=sampling.sampler))
    local = torch.cat(samples)  # (per_rank, C, H, W)
    everything = _gather(local, world_size)[: len(wanted)].cpu()
    return everything.unflatten(0, (len(labels), samples_per_label))


def _gather(local: torch.Tensor, world_size: int) -> torch.Tensor:
    if world_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local)
    return torch.cat(parts)


def real_samples(dataset: ImageDataset, *, labels: list[int], samples_per_label: int) -> torch.Tensor:
    """The first samples of each label in a dataset, to lay beside generated ones.

    Where a label has too few among the first 20,000 samples, its last one repeats (black if it has none).

    Returns:
        (len(labels), samples_per_label, C, H, W) float32 in [-1, 1].
    """
    found: dict[int, list[torch.Tensor]] = {label: [] for label in labels}
    # A folder of images is sorted by class, so neighbours are alike: walk in strides through all of it.
    stride = max(1, len(dataset) // _SEARCH_LIMIT)
    missing = len(labels) * samples_per_label
    for index in range(0, len(dataset), stride):
        if missing == 0:
            break
        known = getattr(dataset, "labels", None)
        if (
            known is not None
            and len(found.get(int(known[index]), [None] * samples_per_label)) >= samples_per_label
        ):
            continue
        try:
            item = dataset[index]
        except CorruptImageError:
            continue
        row = found.get(int(item.get("class_label", labels[0])))
        if row is not None and len(row) < samples_per_label:
            row.append(item["sample"])
            missing -= 1
    black = torch.full(dataset.sample_shape, -1.0)
    rows = [
        (row + [row[-1] if row else black] * samples_per_label)[:samples_per_label] for row in found.values()
    ]
    return torch.stack([torch.stack(row) for row in rows])
