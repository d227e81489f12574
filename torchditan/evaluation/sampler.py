# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws samples of a model, divided over the ranks: for grids, torchditan generate, `load().sample` and evaluations.

Notable:
- the starting noise of sample k of class c is keyed to (seed, c, k): it gives the same picture at any world size,
  batch split and grid shape;
- every rank runs the same number of forward passes, including padding, so under FSDP no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchditan.config.options import Sampling
from torchditan.diffusion.objectives import Objective
from torchditan.diffusion.samplers import guided_prediction
from torchditan.distributed.process_group import rank_and_world_size
from torchditan.models.spec import ModelSpec, TextEmbeddings, Unconditional
from torchditan.randomness import normal
from torchditan.run.progress import Advance, report_progress


def noise_number(row: int, number: int) -> int:
    """Key of the starting noise of sample `number` < 2^32 of a class, or of another row of a grid."""
    return (row << 32) + number


@dataclass(frozen=True)
class SamplePlan:
    """Samples to draw, in order."""

    noise_numbers: list[int]
    """Key of each sample's noise, see `noise_number`."""
    conditions: dict[str, Tensor] = field(default_factory=dict)
    """(R, ...) each, by the names in the model's spec."""
    rows: Tensor | None = None
    """(N,) int64: which of the R conditions each sample has; None without conditions."""
    texts: list[str] | None = None
    """The R captions that the conditions embed; None without captions."""
    negative: dict[str, Tensor] | None = None
    """Embeddings of the negative prompt, one sample of each; None: guidance moves away from the empty caption."""

    def __len__(self) -> int:
        return len(self.noise_numbers)

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64 requested class of each sample; None without classes."""
        labels = self.conditions.get("class_label")
        return None if labels is None else labels[self.rows]

    def prompts_of(self, numbers: Sequence[int]) -> list[str] | None:
        """The captions of these samples; None without captions."""
        if self.texts is None or self.rows is None:
            return None
        return [self.texts[row] for row in self.rows[list(numbers)].tolist()]

    def conditions_of(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The conditions of these samples, (len(numbers), ...) each."""
        if self.rows is None:
            return {}
        rows = self.rows[list(numbers)]
        return {name: tensor[rows] for name, tensor in self.conditions.items()}


@dataclass(frozen=True)
class SampleRows:
    """Rows of a grid of samples, classes or prompts, and the condition of each.

    Args:
        names: label next to each row.
        numbers: number of each row. It keys the noise, so a class starts from the same noise in every grid.
        tensors: the condition of the rows, (n, ...) each, by the names in the model's spec.
        references: (n, C, H, W) pixels in [-1, 1] of the same captions, or None.
        negative: embeddings of the negative prompt, one sample of each; None without one.
    """

    names: list[str]
    numbers: list[int]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    references: Tensor | None = None
    negative: dict[str, Tensor] | None = None

    @classmethod
    def of_classes(cls, labels: Sequence[int], *, class_names: Sequence[str]) -> SampleRows:
        """A row for each label; without class names, unconditional rows."""
        if not class_names:
            return cls(names=["" for _ in labels], numbers=list(labels))
        return cls(
            names=[class_names[label] for label in labels],
            numbers=list(labels),
            tensors={"class_label": torch.tensor(labels, dtype=torch.int64)},
        )

    def plan(self, samples_per_row: int) -> SamplePlan:
        """The samples of all rows, row by row."""
        return SamplePlan(
            noise_numbers=[noise_number(row, number) for row in self.numbers for number in range(samples_per_row)],
            conditions=self.tensors,
            rows=torch.arange(len(self.numbers)).repeat_interleave(samples_per_row) if self.tensors else None,
            negative=self.negative,
        )


class Sampler:
    """Draws samples with the `[sampling]` options.

    Args:
        spec: of the model.
        objective: the training objective, which converts predictions to samples.
        sampling: solver, steps and guidance.
        device: where the model is.
    """

    def __init__(self, spec: ModelSpec, objective: Objective, sampling: Sampling, device: torch.device) -> None:
        self.spec = spec
        self.objective = objective
        self.sampling = sampling
        self.device = device

    def draw_rows(
        self,
        model: nn.Module,
        rows: SampleRows,
        *,
        samples_per_row: int,
        seed: int,
        batch_size: int,
        say: Callable[[str], None] | None = None,
    ) -> Tensor:
        """The samples of a grid; all ranks call it and all get the result.

        Args:
            model: the model to sample from, whole on each rank or sharded over the ranks.
            rows: the condition of each row of samples.
            samples_per_row: number of samples per row.
            seed: of the starting noise.
            batch_size: samples at once on each rank, at most.
            say: receives lines of progress; None writes them to stderr.

        Returns:
            (len(rows.names), samples_per_row, *sample_shape) float32 on the CPU.
        """
        plan = rows.plan(samples_per_row)
        _, world_size = rank_and_world_size()
        batch_size = min(batch_size, -(-len(plan) // world_size))
        batches = [list(range(len(plan)))[start : start + batch_size] for start in range(0, len(plan), batch_size)]
        samples = torch.zeros(len(plan), *self.spec.sample_shape, device=self.device)
        what = f"drawing {len(plan)} samples"
        for numbers, drawn in self.draw(model, plan, batches, seed=seed, what=what, say=say):
            samples[numbers] = drawn
        if world_size > 1:
            dist.all_reduce(samples)  # each sample is zero on all ranks but the one that drew it
        return samples.cpu().unflatten(0, (len(rows.names), samples_per_row))

    def draw(
        self,
        model: nn.Module,
        plan: SamplePlan,
        batches: Sequence[list[int]],
        *,
        seed: int,
        what: str,
        say: Callable[[str], None] | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Draw this rank's share of batches of samples. All ranks call it, and take all that it yields.

        Args:
            batches: the numbers of the samples of each batch in the plan; every `world_size`-th one is this rank's.
            what: description of the progress.

        Yields:
            The numbers of a batch, and its samples (B, *sample_shape) on the device.
        """
        rank, world_size = rank_and_world_size()
        num_passes = -(-len(batches) // world_size)
        total = num_passes * self.objective.num_evaluations(self.sampling)
        with report_progress(what, total=total, unit="model steps", say=say) as advance, self.spec.sampling(model):
            for first in range(0, len(batches), world_size):
                is_padding = first + rank >= len(batches)
                numbers = [0] if is_padding else batches[first + rank]
                samples = self.draw_batch(model, plan, numbers, seed=seed, advance=advance)
                if not is_padding:
                    yield numbers, samples

    @torch.no_grad()
    def draw_batch(
        self, model: nn.Module, plan: SamplePlan, numbers: Sequence[int], *, seed: int, advance: Advance
    ) -> Tensor:
        """Draw one batch of a plan on this rank: (B, *sample_shape) on the device.

        Args:
            numbers: of the samples in the plan.
            advance: called with 1 after each model step.
        """
        sampling, objective = self.sampling, self.objective
        conditioning = self.spec.conditioning.with_guidance(sampling.embedded_guidance)
        if plan.negative is not None:
            assert isinstance(conditioning, TextEmbeddings)
            conditioning = conditioning.with_null(plan.negative)
        batch = {**plan.conditions_of(numbers), "index": torch.arange(len(numbers))}
        predict = guided_prediction(
            model,
            conditioning=conditioning,
            cond=conditioning.from_batch({name: tensor.to(self.device) for name, tensor in batch.items()}),
            guidance_scale=self._guidance_scale(),
            guidance_interval=self._guidance_interval(),
            guidance_channels=sampling.guidance_channels,
        )
        noise_numbers = [plan.noise_numbers[number] for number in numbers]

        def noise(purpose: str) -> Tensor:
            return normal(seed, purpose, noise_numbers, self.spec.sample_shape).to(self.device)  # (B, C, H, W)

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

    def evaluations_per_sample(self) -> int:
        """Forward passes of the model for one sample. A step with guidance counts two, for it doubles the batch.

        The sampler runs once without a model to count them.
        """
        timesteps: list[float] = []

        def predict(x: Tensor, t: float, **_: float) -> Tensor:
            timesteps.append(t)
            return torch.cat([x, x], dim=1) if self.spec.learn_sigma else x

        noise = torch.zeros(1, *self.spec.sample_shape)
        self.objective.sample(predict, noise, sampling=self.sampling, step_noise=lambda step: noise)
        if isinstance(self.spec.conditioning, Unconditional) or self._guidance_scale() == 1:
            return len(timesteps)
        low, high = self._guidance_interval()
        return len(timesteps) + sum(low <= t <= high for t in timesteps)

    def _guidance_scale(self) -> float:
        """Of the second prediction; 1 leaves it out."""
        return 1.0 if self.objective.embeds_guidance else self.sampling.guidance_scale

    def _guidance_interval(self) -> tuple[float, float]:
        """In the model's time."""
        low, high = sorted(map(self.objective.model_time, self.sampling.guidance_interval))
        return low, high
