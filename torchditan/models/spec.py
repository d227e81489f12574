# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the rest of the house may know of a model: `ModelSpec`, and how a model is conditioned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

Condition = dict[str, torch.Tensor]


class TensorSpec(NamedTuple):
    """One sample's part of a tensor of the condition."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Conditioning(Protocol):
    """How a batch becomes the `cond` of a model, and how to take the condition away."""

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """What a batch must hold of it, by name."""
        ...

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        """The model's `cond` of a batch."""
        ...

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        """Without the condition where `mask` (B,) bool is true."""
        ...

    def null(self, cond: Condition) -> Condition:
        """Without any condition: the other half of classifier-free guidance."""
        ...

    def with_guidance(self, guidance: float) -> Conditioning:
        """With another guidance scale, for models that embed one; others stay as they are."""
        ...


@dataclass(frozen=True)
class ClassLabels:
    """Labels 0 to num_classes - 1; the label num_classes is the null class."""

    num_classes: int

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {"class_label": TensorSpec((), torch.int64)}

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        return {"class_label": batch["class_label"]}

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {"class_label": cond["class_label"].masked_fill(mask, self.num_classes)}

    def null(self, cond: Condition) -> Condition:
        return {"class_label": torch.full_like(cond["class_label"], self.num_classes)}

    def with_guidance(self, guidance: float) -> ClassLabels:
        return self


@dataclass(frozen=True)
class Unconditional:
    """No condition at all."""

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return {}

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        return {}

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {}

    def null(self, cond: Condition) -> Condition:
        return {}

    def with_guidance(self, guidance: float) -> Unconditional:
        return self


@dataclass(frozen=True)
class TextEmbeddings:
    """Embeddings of a caption, made before the training; without a condition they are those of the empty caption.

    Args:
        tensors: what a batch holds.
        kept: of those, what says nothing of the caption (the first frame of a video), and stays without it.
        null: the empty caption's, one sample of each; None: zeros, as in a benchmark.
        guidance: guidance scale, for a model that embeds one: `cond["guidance"]` (B,) float32.
    """

    tensors: dict[str, TensorSpec]
    kept: frozenset[str] = frozenset()
    null_tensors: dict[str, torch.Tensor] | None = None
    guidance: float | None = None

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        cond = {name: batch[name] for name in self.tensors}
        if self.guidance is not None:
            size, device = len(batch["index"]), batch["index"].device
            cond["guidance"] = torch.full((size,), self.guidance, device=device)
        return cond

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {name: torch.where(_like(mask, value), self._null(name, value), value) for name, value in cond.items()}

    def null(self, cond: Condition) -> Condition:
        return {name: self._null(name, value).expand_as(value) for name, value in cond.items()}

    def with_null(self, null: dict[str, torch.Tensor]) -> TextEmbeddings:
        """With these embeddings of the empty caption; masks that come with them are part of the condition too."""
        masks = {name: TensorSpec(tuple(mask.shape), mask.dtype) for name, mask in null.items() if "mask" in name}
        return replace(self, tensors={**self.tensors, **masks}, null_tensors=null)

    def with_guidance(self, guidance: float) -> TextEmbeddings:
        """With another scale, where the model embeds one."""
        return replace(self, guidance=guidance) if self.guidance is not None else self

    def _null(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name in self.kept or name not in self.tensors:
            return value
        if self.null_tensors is None:
            return torch.zeros_like(value)
        return self.null_tensors[name].to(value)


def _like(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """mask (B,) -> (B, 1, ...) to broadcast over value (B, ...)."""
    return mask.view(-1, *[1] * (value.dim() - 1))


@dataclass(frozen=True)
class ModelSpec:
    """One model of a given size. Checkpointing, compile and FSDP work on its `blocks`, never on its class."""

    name: str
    """Architecture: dit, flux, ..."""
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
    """(C, H, W) of a sample, or (C, F, H, W)."""
    learn_sigma: bool
    """The prediction has twice the channels of the sample."""
    num_tokens: int
    """Tokens the image becomes."""
    num_condition_tokens: int
    """Tokens the condition adds to the sequence, or that cross-attention looks at."""
    timestep_shift: float = 1.0
    """Shift of the timesteps that its publisher samples with, for samples of this shape."""
    sampling: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()
    """What a built model is put into while it is sampled."""
    condition_layers: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: ()
    """Linear layers that see the condition's tokens alone; none named: all that see `num_condition_tokens` rows."""
    features: Sequence[str] = ()
    """Names that `forward(x_t, t, cond, features=names)` can return tokens (B, num_tokens, D) of, in the order in which
    they are computed. Empty: the model returns its prediction only."""

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, Condition]:
        """Inputs (x_t, t, cond) of the right shapes, on the current default device."""
        batch = {"index": torch.zeros(batch_size, dtype=torch.int64)}
        for name, (shape, dtype) in self.conditioning.tensors.items():
            batch[name] = torch.zeros(batch_size, *shape, dtype=dtype)
        x_t = torch.zeros(batch_size, *self.sample_shape)
        return x_t, torch.zeros(batch_size), self.conditioning.from_batch(batch)
