# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Chooses the patches that a model with token dropping keeps in a training step (models/token_dropping.py).

Notable:
- the kept patches of a sample are a pure function of (seed, index, number of patches): those with the smallest hashes.
  Each patch is equally likely to be kept. No other random number of the run changes;
- the hash is that of `randomness.uniform`, in integer operations on the device: the host never waits, and a CPU and a
  GPU keep the same patches;
- the model gets them as `cond["kept_tokens"]` of each call in the loss. A teacher does not: it sees all patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchditan.config.errors import option_error
from torchditan.config.options import Config
from torchditan.diffusion.objectives import Loss
from torchditan.models.spec import ModelSpec
from torchditan.models.token_dropping import KEPT_TOKENS
from torchditan.randomness import Randomness, stream_key

MIN_TOKENS = 256
"""Tokens of a sample in the paper's main setting, ImageNet at 256 x 256: latents of 32 x 32 with patches of 2."""

_TOKENS_PER_INDEX = 2**20
"""Numbers reserved for the patches of one sample, more than any sample has."""


@dataclass(frozen=True)
class TokenDropping:
    """Token dropping of one run."""

    spec: ModelSpec
    seed: int
    steps: int
    """Number of the first steps, which drop tokens."""

    @classmethod
    def of(cls, config: Config, spec: ModelSpec) -> TokenDropping:
        steps = num_dropping_steps(config.training.steps, config.training.dense_ratio)
        return cls(spec, config.training.seed, steps)

    @property
    def num_kept(self) -> int:
        """Number of the patches that a sample of the model's `sample_shape` keeps."""
        return num_kept_tokens(self.spec.num_tokens, dropping=self.spec.token_dropping)

    def mean_over_steps(self, dropping: float, dense: float, before: int, step: int) -> float:
        """Mean over the steps after `before` up to `step`, of which some drop tokens and the others do not."""
        share = max(0, min(step, self.steps) - before) / max(1, step - before)
        return share * dropping + (1 - share) * dense

    def loss_at(self, step: int, loss: Loss) -> Loss:
        """The loss of this step, counted from 1, from the loss with all tokens."""
        if step > self.steps:
            return loss

        def loss_of_kept(model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> torch.Tensor:
            sample = batch["sample"]
            spec = self.spec
            num_tokens = spec.num_tokens * math.prod(sample.shape[1:]) // math.prod(spec.sample_shape)
            num_kept = num_kept_tokens(num_tokens, dropping=spec.token_dropping)
            kept = kept_tokens(self.seed, batch["index"], num_tokens=num_tokens, num_kept=num_kept)
            keeping: Any = _KeepingModel(model, kept, spec.token_dropping)
            return loss(keeping, batch, randomness)

        return loss_of_kept


class _KeepingModel:
    """A model that is called with the kept tokens in its condition. Other attributes are the model's."""

    def __init__(self, model: nn.Module, kept: torch.Tensor, dropping: float) -> None:
        self.model = model
        self.kept = kept
        self.dropping = dropping

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor, cond: Mapping[str, torch.Tensor], **options: Any) -> Any:
        if len(x_t) != len(self.kept):
            right = f"the objective calls the model with {len(x_t)} samples for a batch of {len(self.kept)}; must be 0"
            raise option_error("model.token_dropping", self.dropping, right)
        return self.model(x_t, t, {**cond, KEPT_TOKENS: self.kept}, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def num_dropping_steps(steps: int, dense_ratio: float) -> int:
    """Number of the first steps that drop tokens, of `training.steps`."""
    return steps - round(steps * dense_ratio)


def num_kept_tokens(num_tokens: int, *, dropping: float) -> int:
    """Number of the patches that each sample keeps, at least 1."""
    return max(1, round(num_tokens * (1 - dropping)))


def kept_tokens(seed: int, index: torch.Tensor, *, num_tokens: int, num_kept: int) -> torch.Tensor:
    """The patches that these samples keep, a uniform choice without replacement for each.

    Args:
        seed: the run's seed.
        index: (B,) int64, positions in the training stream.
        num_tokens: patches of a sample, less than 2^20.
        num_kept: how many of them each sample keeps.

    Returns:
        (B, num_kept) int64, ascending, on the device of `index`.
    """
    assert num_tokens < _TOKENS_PER_INDEX, num_tokens
    numbers = index.unsqueeze(1) * _TOKENS_PER_INDEX + torch.arange(num_tokens, device=index.device)  # (B, N)
    hashes = _shift_right(_hash(seed, numbers), 1)  # 63 bits: unsigned order
    return hashes.topk(num_kept, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


def _hash(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """The 64 bits of which `randomness.uniform` takes the first 24. Products of int64 wrap around, as those of uint64.

    A device computes int64 products and shifts exactly, so that the result is the same everywhere.
    """
    first, second = (_signed(key) for key in stream_key(seed, "token_dropping"))
    return _mix(_mix(numbers * _signed(0x9E3779B97F4A7C15) + first) ^ second)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (Steele et al. 2014)."""
    values = (values ^ _shift_right(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift_right(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The shift of unsigned numbers, which fills with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def few_tokens_warning(spec: ModelSpec) -> str | None:
    """A message if samples have fewer tokens than in the paper's main setting."""
    if spec.num_tokens >= MIN_TOKENS:
        return None
    return (
        f"warning: model.token_dropping with {spec.num_tokens} tokens per sample, fewer than the paper's {MIN_TOKENS}: "
        "it saves little time, and quality may suffer; smaller patches or larger images give more tokens"
    )
