# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the rest of the house may know of a model: `ModelSpec`, and how a model is conditioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from torchditan.flops import ModelFlops, count_model_flops

Condition = dict[str, torch.Tensor]


class Conditioning(Protocol):
    """How a batch becomes the `cond` of a model, and how to take the condition away."""

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        """The model's `cond` of a batch."""
        ...

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        """Without the condition where `mask` (B,) bool is true."""
        ...

    def null(self, cond: Condition) -> Condition:
        """Without any condition: the other half of classifier-free guidance."""
        ...


@dataclass(frozen=True)
class ClassLabels:
    """Labels 0 to num_classes - 1; the label num_classes is the null class."""

    num_classes: int

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        return {"class_label": batch["class_label"]}

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {"class_label": cond["class_label"].masked_fill(mask, self.num_classes)}

    def null(self, cond: Condition) -> Condition:
        return {"class_label": torch.full_like(cond["class_label"], self.num_classes)}


@dataclass(frozen=True)
class Unconditional:
    """No condition at all."""

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        return {}

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {}

    def null(self, cond: Condition) -> Condition:
        return {}


@dataclass(frozen=True)
class ModelSpec:
    """One model of a given size. Checkpointing, compile and FSDP work on its `blocks`, never on its class."""

    name: str
    """Architecture: dit."""
    flavor: str
    """Size, one of `flavors`."""
    flavors: Sequence[str]
    config: Any
    """The architecture's own resolved options (DiTConfig), for the run's config.json."""
    build: Callable[[], nn.Module]
    """Build the model on the current default device (`with torch.device("meta")`), its weights not yet set:
    call `init_weights(seed)` after `to_empty`."""
    blocks: Callable[[nn.Module], nn.ModuleList]
    """The repeated blocks of a built model."""
    conditioning: Conditioning
    sample_shape: tuple[int, ...]
    """(C, H, W) of a sample."""
    learn_sigma: bool
    """The prediction has twice the channels of the sample."""
    num_tokens: int
    """Tokens the image becomes."""
    num_condition_tokens: int
    """Tokens the condition adds to the sequence."""

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, Condition]:
        """Inputs (x_t, t, cond) of the right shapes, on the current default device."""
        batch = {"class_label": torch.zeros(batch_size, dtype=torch.int64)}
        x_t = torch.zeros(batch_size, *self.sample_shape)
        return x_t, torch.zeros(batch_size), self.conditioning.from_batch(batch)

    def flops(self) -> ModelFlops:
        """FLOPs of one sample's training step."""
        return count_model_flops(self)
