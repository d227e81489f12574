# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws the samples of a `Drawing`, divided over the ranks.

Notable:
- batch b holds samples b * B to (b + 1) * B - 1 on any number of ranks, so samples are the same to the bit. With
  another batch size, the last digits of the model's output may differ;
- every rank runs the same number of forward passes, including padding, so under FSDP no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchditan.config.options import Sampling
from torchditan.diffusion.objectives import Objective
from torchditan.diffusion.samplers import guided_prediction, is_guided
from torchditan.distributed.process_group import rank_and_world_size
from torchditan.models.spec import ModelSpec, TextEmbeddings, Unconditional
from torchditan.randomness import normal
from torchditan.run.progress import Advance, report_progress
from torchditan.sampling.drawing import Drawing

ToPixels = Callable[[Tensor], Tensor]
"""Decodes samples (B, C, H, W) to pixels in [-1, 1], (B, 1 or 3, H', W') on the CPU; for pixels, the identity."""


class Sampler:
    """Draws samples of models of one spec.

    Args:
        spec: of the model.
        objective: the training objective, which converts predictions to samples.
        device: where the model is.
    """

    def __init__(self, spec: ModelSpec, objective: Objective, device: torch.device) -> None:
        self.spec = spec
        self.objective = objective
        self.device = device

    def draw_all(
        self, model: nn.Module, drawing: Drawing, *, batch_size: int, say: Callable[[str], None] | None = None
    ) -> Tensor:
        """All samples, on all ranks: (N, *sample_shape) float32 on the CPU. See `draw`."""
        _, world_size = rank_and_world_size()
        batch_size = min(batch_size, -(-len(drawing) // world_size))
        samples = torch.zeros(len(drawing), *self.spec.sample_shape, device=self.device)
        for numbers, drawn in self.draw(model, drawing, batch_size=batch_size, say=say):
            samples[numbers] = drawn
        if world_size > 1:
            dist.all_reduce(samples)  # each sample is zero on all ranks but the one that drew it
        return samples.cpu()

    def draw(
        self,
        model: nn.Module,
        drawing: Drawing,
        *,
        batch_size: int,
        finished: Collection[range] = (),
        say: Callable[[str], None] | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Draw this rank's share of the samples. All ranks call it, and take all that it yields.

        Args:
            model: the model to sample from, whole on each rank or sharded over the ranks.
            batch_size: samples at once on each rank, at most.
            finished: numbers of samples that are left out, the same on all ranks.
            say: receives lines of progress; None writes them to stderr.

        Yields:
            The numbers of a batch, and its samples (B, *sample_shape) on the device.
        """
        rank, world_size = rank_and_world_size()
        is_missing = np.ones(len(drawing), dtype=bool)
        for known in finished:
            is_missing[known.start : known.stop] = False
        starts = range(0, len(drawing), batch_size)
        batches = [(start + np.flatnonzero(is_missing[start : start + batch_size])).tolist() for start in starts]
        batches = [batch for batch in batches if batch]
        num_finished = len(drawing) - int(is_missing.sum())
        what = f"drawing {len(drawing) - num_finished:,} samples"
        what += f" ({num_finished:,} are finished)" if num_finished else ""
        num_passes = -(-len(batches) // world_size)
        total = num_passes * self.objective.num_evaluations(drawing.sampling)
        with report_progress(what, total=total, unit="model steps", say=say) as advance, self.spec.sampling(model):
            for first in range(0, len(batches), world_size):
                is_padding = first + rank >= len(batches)
                numbers = [0] if is_padding else batches[first + rank]
                samples = self.draw_batch(model, drawing, numbers, advance=advance)
                if not is_padding:
                    yield numbers, samples

    @torch.no_grad()
    def draw_batch(
        self, model: nn.Module, drawing: Drawing, numbers: Sequence[int], *, advance: Advance = lambda amount: None
    ) -> Tensor:
        """Draw one batch on this rank: (B, *sample_shape) on the device.

        Args:
            numbers: of the samples in the drawing.
            advance: called with 1 after each model step.
        """
        sampling, objective, negative = drawing.sampling, self.objective, drawing.rows.negative
        conditioning = self.spec.conditioning
        if isinstance(conditioning, TextEmbeddings):
            conditioning = conditioning.with_guidance(sampling.embedded_guidance)
            assert negative is not None
            conditioning = conditioning.with_null(self._on_device(negative))
        batch = self._on_device({**drawing.conditions_of(numbers), "index": torch.arange(len(numbers))})
        predict = guided_prediction(
            model,
            conditioning=conditioning,
            cond=conditioning.from_batch(batch),
            guidance_scale=self._guidance_scale(sampling),
            guidance_interval=self._guidance_interval(sampling),
            guidance_channels=sampling.guidance_channels,
        )
        noise_numbers = [drawing.noise_numbers[number] for number in numbers]

        def noise(purpose: str) -> Tensor:
            return normal(drawing.seed, purpose, noise_numbers, self.spec.sample_shape).to(self.device)  # (B, C, H, W)

        def predict_and_count(x: Tensor, t: float, **scalars: float) -> Tensor:
            predicted = predict(x, t, **scalars)
            advance(1)
            return predicted

        # Training compiled the blocks for its batch shape; other shapes run eagerly instead of recompiling.
        with torch.compiler.set_stance("force_eager"):
            return objective.sample(
                predict_and_count,
                noise("sample"),
                sampling=sampling,
                step_noise=lambda step: noise(f"sample step {step}"),
            )

    def evaluations_per_sample(self, sampling: Sampling) -> int:
        """Forward passes of the model for one sample. A step with guidance counts two, for it doubles the batch.

        The sampler runs once without a model to count them.
        """
        timesteps: list[float] = []

        def predict(x: Tensor, t: float, **_: float) -> Tensor:
            timesteps.append(t)
            return torch.cat([x, x], dim=1) if self.spec.learn_sigma else x

        noise = torch.zeros(1, *self.spec.sample_shape)
        self.objective.sample(predict, noise, sampling=sampling, step_noise=lambda step: noise)
        if isinstance(self.spec.conditioning, Unconditional) or self._guidance_scale(sampling) == 1:
            return len(timesteps)
        return len(timesteps) + sum(is_guided(t, self._guidance_interval(sampling)) for t in timesteps)

    def _on_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _guidance_scale(self, sampling: Sampling) -> float:
        """Of the second prediction; 1 leaves it out."""
        return 1.0 if self.objective.embeds_guidance else sampling.guidance_scale

    def _guidance_interval(self, sampling: Sampling) -> tuple[float, float]:
        """In the model's time."""
        low, high = sorted(map(self.objective.model_time, sampling.guidance_interval))
        return low, high
