# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Rows of a grid of samples: classes or prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SampleRows:
    """Rows of a grid, and the condition of each.

    Args:
        names: label next to each row.
        numbers: number of each row. It keys the noise, so a class starts from the same noise in every grid.
        tensors: the condition of the rows, (n, ...) each, by the names in the model's spec.
        references: (n, C, H, W) pixels in [-1, 1] of the same captions, or None.
    """

    names: list[str]
    numbers: list[int]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    references: torch.Tensor | None = None

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

    def tensors_of(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """The condition of samples of these rows, (len(rows), ...) each."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}
