# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The interface between a model and the rest of the package: `ModelSpec` and the conditioning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

Condition = dict[str, torch.Tensor]


class TensorSpec(NamedTuple):
    """Shape and dtype of one sample in a tensor of the condition."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Conditioning:
    """Converts a batch to the model's `cond`, and removes the condition. The defaults suit a model without one."""

    tensors: Mapping[str, TensorSpec] = MappingProxyType({})
    """Tensors that a batch must contain, by name."""

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        """The model's `cond` for a batch."""
        return {name: batch[name] for name in self.tensors}

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        """Replace the condition by the null condition where `mask` (B,) bool is true."""
        return cond

    def null(self, cond: Condition) -> Condition:
        """The null condition for all samples, for classifier-free guidance."""
        return cond


@dataclass(frozen=True)
class Unconditional(Conditioning):
    """No condition."""


@dataclass(frozen=True)
class ClassLabels(Conditioning):
    """Labels 0 to num_classes - 1; the label num_classes is the null class."""

    num_classes: int

    tensors = MappingProxyType({"class_label": TensorSpec((), torch.int64)})

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {"class_label": cond["class_label"].masked_fill(mask, self.num_classes)}

    def null(self, cond: Condition) -> Condition:
        return {"class_label": torch.full_like(cond["class_label"], self.num_classes)}


@dataclass(frozen=True)
class TextEmbeddings(Conditioning):
    """Precomputed caption embeddings. The null condition is the embeddings of the empty caption.

    Args:
        tensors: the tensors of a batch.
        kept: those that do not depend on the caption (the first frame of a video); the null condition keeps them.
        null_tensors: embeddings of the empty caption, one sample of each; None: zeros, as in a benchmark.
        guidance: guidance scale, for a model that embeds one: `cond["guidance"]` (B,) float32.
    """

    tensors: Mapping[str, TensorSpec] = field()
    kept: frozenset[str] = frozenset()
    null_tensors: dict[str, torch.Tensor] | None = None
    guidance: float | None = None

    def from_batch(self, batch: Mapping[str, torch.Tensor]) -> Condition:
        cond = super().from_batch(batch)
        if self.guidance is not None:
            size, device = len(batch["index"]), batch["index"].device
            cond["guidance"] = torch.full((size,), self.guidance, device=device)
        return cond

    def drop(self, cond: Condition, mask: torch.Tensor) -> Condition:
        return {name: torch.where(_like(mask, value), self._null(name, value), value) for name, value in cond.items()}

    def null(self, cond: Condition) -> Condition:
        return {name: self._null(name, value).expand_as(value) for name, value in cond.items()}

    def with_null(self, null: dict[str, torch.Tensor]) -> TextEmbeddings:
        """With these embeddings of the empty caption. Masks among them become part of the condition."""
        masks = {name: TensorSpec(tuple(mask.shape), mask.dtype) for name, mask in null.items() if "mask" in name}
        return replace(self, tensors={**self.tensors, **masks}, null_tensors=null)

    def with_guidance(self, guidance: float) -> TextEmbeddings:
        """With another guidance scale, if the model embeds one."""
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
class Head:
    """A part of the model that only training uses, such as a projection of tokens for an alignment loss."""

    feature: str
    """Name in `ModelSpec.features` of the tokens (B, N, D) that it reads."""
    build: Callable[[], nn.Module]
    """Build it on the current default device. Its linear layers are initialized as the model's."""


@dataclass(frozen=True)
class ModelSpec:
    """One model of a given size. Checkpointing, compile and FSDP use its `blocks` and do not depend on its class."""

    name: str
    """Architecture: dit, flux, ..."""
    flavor: str
    """Size, one of `flavors`."""
    flavors: Sequence[str]
    config: Any
    """The architecture's resolved options (DiTConfig), for the run's config.json."""
    build: Callable[[], nn.Module]
    """Build the model on the current default device (`with torch.device("meta")`), with uninitialized weights.
    Call `init_weights(seed)` after `to_empty`."""
    blocks: Callable[[nn.Module], nn.ModuleList]
    """The repeated blocks of a built model."""
    conditioning: Conditioning
    sample_shape: tuple[int, ...]
    """(C, H, W) of a sample, or (C, F, H, W)."""
    learn_sigma: bool
    """Whether the prediction has twice the channels of the sample."""
    num_tokens: int
    """Number of image tokens."""
    timestep_shift: float = 1.0
    """The publisher's timestep shift, for samples of this shape."""
    sampling_shift: Callable[[int], float] | None = None
    """Number of steps -> shift of the publisher's sampling. None: the shift of training."""
    sampling: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()
    """Context manager to enter with the built model during sampling."""
    features: Sequence[str] = ()
    """Names for `forward(x_t, t, cond, features=names)`, which then returns their tokens (B, num_tokens, D), in the
    order in which they are computed. Empty: the model returns only its prediction."""
    scalars: Collection[str] = ()
    """Names of the scalar conditions (B,) float32 that the model embeds besides t."""
    can_have_heads: bool = False
    """Whether the model has `add_heads`."""
    init_unsaved: Callable[[nn.Module, int], None] = lambda model, seed: None
    """Fills a model after `to_empty` with what checkpoints lack: buffers, and the weights under an adapter."""
    turn_off_adapter: Callable[[nn.Module], None] | None = None
    """Restores the frozen model under its trained adapter, in place; checkpoints contain only the adapter. None: the
    model has no adapter."""
    restore_published: Callable[[nn.Module, int], None] | None = None
    """Restores the published weights that training started from, in place; the argument is the seed. None: training
    started from random numbers."""
    is_sampled_in_half: bool = False
    """Whether a trained model is opened in bfloat16, if it was trained in half precision."""
    is_one_graph: bool = True
    """Whether torch.compile can trace the whole model (`compile.scope = "model"`)."""
    warning: str | None = None
    """Printed before training starts."""

    @property
    def takes_prompts(self) -> bool:
        """Whether the model is conditioned on captions."""
        return isinstance(self.conditioning, TextEmbeddings)

    def example_batch(self, batch_size: int) -> dict[str, torch.Tensor]:
        """The tensors of a batch of zeros, on the current default device."""
        shapes = {"sample": TensorSpec(self.sample_shape), "index": TensorSpec((), torch.int64)}
        return {
            name: torch.zeros(batch_size, *shape, dtype=dtype)
            for name, (shape, dtype) in {**shapes, **self.conditioning.tensors}.items()
        }

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, Condition]:
        """Inputs (x_t, t, cond) of the right shapes, on the current default device."""
        batch = self.example_batch(batch_size)
        scalars = {name: torch.zeros(batch_size) for name in self.scalars}
        return batch["sample"], torch.zeros(batch_size), {**self.conditioning.from_batch(batch), **scalars}

    def with_heads(self, heads: Mapping[str, Head]) -> ModelSpec:
        """The same model with heads for training."""
        if not heads:
            return self

        def build() -> nn.Module:
            model: Any = self.build()
            model.add_heads(heads)
            return model

        return replace(self, build=build)
