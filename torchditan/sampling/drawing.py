# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A `Drawing`: which samples to draw, with which model and options.

Grids of a run, torchditan generate, `load().sample` and evaluations say in this way what sampler.py draws.

Notable:
- a sample is the k-th of its row, a class or a prompt. Its noise is keyed to (seed, row, k), so it is the same picture
  in a grid, in generate and in an evaluation, at any world size and batch split;
- `digest` names a drawing: files of its samples are never taken for those of another one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from torchditan.config.options import Sampling

_OTHERS = (
    *("images_per_class", "max_classes", "prompts", "at_start"),  # choose rows and steps
    "embedded_guidance",  # of published models only
)


@dataclass(frozen=True)
class SampleRows:
    """Classes or prompts, and the condition of each.

    Args:
        names: label next to each row of a grid.
        numbers: number of each row. It keys the noise, so a class starts from the same noise in every drawing.
        tensors: the condition of the rows, (R, ...) each, by the names in the model's spec.
        prompts: the whole texts; None for classes.
        references: (R, C, H, W) pixels in [-1, 1] of the same captions, or None.
        negative: of prompts: embeddings of the negative prompt, one sample of each; without one, of the empty caption.
    """

    names: list[str]
    numbers: list[int]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    prompts: list[str] | None = None
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

    @classmethod
    def first_classes(cls, most: int, *, class_names: Sequence[str]) -> SampleRows:
        """The rows of a grid: the first classes, or the one row of an unconditional model."""
        return cls.of_classes(range(min(most, max(1, len(class_names)))), class_names=class_names)

    @classmethod
    def all_classes(cls, class_names: Sequence[str]) -> SampleRows:
        """A row for each class, or the one row of an unconditional model."""
        return cls.of_classes(range(max(1, len(class_names))), class_names=class_names)

    def in_turn(self, num_samples: int) -> Tensor:
        """The rows of samples that take one row after the other: (num_samples,) int64."""
        return torch.arange(num_samples) % len(self.numbers)

    def each(self, num_samples: int) -> Tensor:
        """The rows of a grid, row by row: (R * num_samples,) int64."""
        return torch.arange(len(self.numbers)).repeat_interleave(num_samples)


@dataclass(frozen=True)
class Drawing:
    """Samples of one model, in order, and all that determines them but the rounding of the device."""

    rows: SampleRows
    order: Tensor
    """(N,) int64: the row of each sample."""
    sampling: Sampling
    seed: int
    """Of the noise."""
    model: Any = None
    """JSON that identifies the weights together with the next two, such as the id of the run."""
    step: int = 0
    weights: Literal["ema", "raw"] = "raw"

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def noise_numbers(self) -> list[int]:
        """Key of each sample's noise: the number of its row, and its place among the samples of this row."""
        drawn: Counter[int] = Counter()
        keys = []
        for row in self.order.tolist():
            keys.append((self.rows.numbers[row] << 32) + drawn[row])
            drawn[row] += 1
        return keys

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64 requested class of each sample; None without classes."""
        labels = self.rows.tensors.get("class_label")
        return None if labels is None else labels[self.order]

    def prompts_of(self, numbers: Sequence[int]) -> list[str] | None:
        """The captions of these samples; None without captions."""
        prompts = self.rows.prompts
        return None if prompts is None else [prompts[row] for row in self.order[list(numbers)].tolist()]

    def conditions_of(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The conditions of these samples, (len(numbers), ...) each."""
        return {name: tensor[self.order[list(numbers)]] for name, tensor in self.rows.tensors.items()}

    def digest(self, *more: Any) -> str:
        """Hexadecimal SHA-256 of all that determines the samples.

        Args:
            more: JSON values that determine what is made of them, such as the decoder.
        """
        rows = self.rows.numbers if self.rows.prompts is None else self.rows.prompts
        model = [self.model, self.step, self.weights]
        sampling = [sampling_settings(self.sampling), self.sampling.embedded_guidance, self.seed]
        settings = [*model, *sampling, rows, self.order.tolist(), *more]
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """The `[sampling]` options that change a sample of our models."""
    return {key: value for key, value in asdict(sampling).items() if key not in _OTHERS}
