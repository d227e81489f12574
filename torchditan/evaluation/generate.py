# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Generates samples from a model, divided over the ranks, and selects real ones to compare with.

Notable:
- the starting noise of sample k of class c is keyed to (seed, c, k): it gives the same picture at any world size,
  batch split and grid shape;
- every rank runs the same number of forward passes, including padding, so under FSDP no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchditan.config.options import Sampling
from torchditan.data_stream.datasets import CorruptImageError, ImageDataset, SequentialDataset
from torchditan.diffusion.objectives import Objective
from torchditan.diffusion.samplers import guided_prediction
from torchditan.evaluation.sample_rows import SampleRows
from torchditan.models.spec import Conditioning
from torchditan.randomness import normal
from torchditan.run.progress import Advance, report_progress

_SEARCH_LIMIT = 20_000


def noise_number(row: int, number: int) -> int:
    """Key of the starting noise of sample `number` < 2^32 of a class, or of another row of a grid."""
    return (row << 32) + number


@torch.no_grad()
def generate(
    model: nn.Module,
    *,
    rows: SampleRows,
    samples_per_row: int,
    sample_shape: tuple[int, ...],
    conditioning: Conditioning,
    objective: Objective,
    sampling: Sampling,
    seed: int,
    batch_size: int,
    device: torch.device,
    say: Callable[[str], None] | None = None,
) -> torch.Tensor:
    """Sample the model with the `[sampling]` options; all ranks call it and all get the result.

    Args:
        model: the model to sample from.
        rows: the condition of each row of samples.
        samples_per_row: number of samples per row.
        sample_shape: (C, H, W) or (C, F, H, W).
        conditioning: provides the condition and the null condition.
        objective: the training objective, which converts predictions to samples.
        sampling: solver, steps and guidance.
        seed: seed of the starting noise.
        batch_size: samples at once on each rank.
        device: where the model is.
        say: receives lines of progress; None writes them to stderr.

    Returns:
        (len(rows.names), samples_per_row, *sample_shape) float32 on the CPU.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wanted = [(row, number) for row in range(len(rows.numbers)) for number in range(samples_per_row)]
    per_rank = -(-len(wanted) // world_size)
    padded = wanted + [wanted[-1]] * (per_rank * world_size - len(wanted))
    mine = padded[rank * per_rank : (rank + 1) * per_rank]

    samples = []
    total = objective.num_evaluations(sampling) * -(-per_rank // batch_size)
    with report_progress(f"drawing {len(wanted)} samples", total=total, unit="model steps", say=say) as advance:
        for start in range(0, per_rank, batch_size):
            chunk = mine[start : start + batch_size]
            samples.append(
                draw_batch(
                    model,
                    noise_numbers=[noise_number(rows.numbers[row], number) for row, number in chunk],
                    tensors=rows.tensors_of([row for row, _ in chunk]),
                    sample_shape=sample_shape,
                    conditioning=conditioning,
                    objective=objective,
                    sampling=sampling,
                    seed=seed,
                    device=device,
                    advance=advance,
                )
            )
    local = torch.cat(samples)  # (per_rank, C, H, W)
    parts = [local]
    if world_size > 1:
        parts = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(parts, local)
    everything = torch.cat(parts)[: len(wanted)].cpu()
    return everything.unflatten(0, (len(rows.names), samples_per_row))


@torch.no_grad()
def draw_batch(
    model: nn.Module,
    *,
    noise_numbers: Sequence[int],
    tensors: Mapping[str, torch.Tensor],
    sample_shape: tuple[int, ...],
    conditioning: Conditioning,
    objective: Objective,
    sampling: Sampling,
    seed: int,
    device: torch.device,
    advance: Advance,
) -> torch.Tensor:
    """Draw one batch of samples on this rank: (B, *sample_shape) on the device. Other arguments: as in `generate`.

    Args:
        noise_numbers: key of each sample's noise, see `noise_number`.
        tensors: the condition of the samples, (B, ...) each, by the names in the model's spec.
        advance: called with 1 after each model step.
    """
    conditioning = conditioning.with_guidance(sampling.embedded_guidance)
    batch = {**tensors, "index": torch.arange(len(noise_numbers))}
    low, high = sorted(map(objective.model_time, sampling.guidance_interval))
    predict = guided_prediction(
        model,
        conditioning=conditioning,
        cond=conditioning.from_batch({name: tensor.to(device) for name, tensor in batch.items()}),
        guidance_scale=sampling.guidance_scale,
        guidance_interval=(low, high),
        guidance_channels=sampling.guidance_channels,
    )

    def draw(purpose: str) -> torch.Tensor:
        return normal(seed, purpose, noise_numbers, sample_shape).to(device)  # (B, C, H, W)

    def predict_and_count(x: torch.Tensor, t: float, **scalars: float) -> torch.Tensor:
        predicted = predict(x, t, **scalars)
        advance(1)
        return predicted

    # Training compiled the blocks for its batch shape; other shapes run eagerly instead of recompiling.
    with torch.compiler.set_stance("force_eager"):
        return objective.sample(
            predict_and_count,
            draw("sample"),
            sampling=sampling,
            step_noise=lambda step: draw(f"sample step {step}"),
        )


def real_samples(
    dataset: ImageDataset, *, labels: list[int], samples_per_label: int, conditional: bool
) -> torch.Tensor | None:
    """Real samples of each label, to show next to generated ones; None if the dataset can only be streamed.

    If a label has too few samples, its last one repeats; a label without samples is black. If the labels are not known
    in advance, 20,000 samples are searched.

    Returns:
        (len(labels), samples_per_label, C, H, W) float32 in [-1, 1].
    """
    if isinstance(dataset, SequentialDataset):
        return None
    rows = []
    for indices in _candidates(dataset, labels=labels if conditional else [], wanted=samples_per_label):
        row: list[torch.Tensor] = []
        for index in indices:
            if len(row) == samples_per_label:
                break
            with suppress(CorruptImageError):
                row.append(dataset[int(index)]["sample"])
        black = torch.full(dataset.sample_shape, -1.0)
        rows.append(torch.stack((row + [row[-1] if row else black] * samples_per_label)[:samples_per_label]))
    return torch.stack(rows)


def _candidates(dataset: ImageDataset, *, labels: list[int], wanted: int) -> list[np.ndarray]:
    """Indices of samples with each label; without labels, one row of indices spread over the dataset."""
    spread = np.arange(0, len(dataset), max(1, len(dataset) // _SEARCH_LIMIT))
    if not labels:
        return [_spread(spread, wanted)]
    known = dataset.class_labels
    if known is not None:
        return [_spread(np.flatnonzero(np.asarray(known) == label), wanted) for label in labels]
    found: dict[int, list[int]] = {label: [] for label in labels}
    for index in spread:
        with suppress(CorruptImageError):
            found.get(int(dataset[int(index)]["class_label"]), []).append(int(index))
        if all(len(indices) >= wanted for indices in found.values()):
            break
    return [np.array(indices, dtype=np.int64) for indices in found.values()]


def _spread(indices: np.ndarray, wanted: int) -> np.ndarray:
    """Evenly spaced indices first (neighbours may be similar), then the rest."""
    stride = max(1, len(indices) // wanted)
    return np.concatenate([indices[start::stride] for start in range(stride)])
