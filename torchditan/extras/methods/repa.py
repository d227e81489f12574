# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""REPA and iREPA: tokens of an early block are aligned with features of the clean image from a frozen encoder.

REPA (Yu et al. 2024, arXiv 2410.06940): loss + weight * mean over tokens of -cos(MLP(h), y), where h are the tokens
after a block, and y the encoder's features at their positions.

iREPA (arXiv 2512.10794): the projector is a 3 x 3 convolution over the grid of tokens, and y is normalised over
positions in each channel: (y - mean) / (std + 1e-6), with the unbiased std.

Notable:
- the projector is a head of the model: it trains, is sharded and averaged with it, and is in checkpoints. Samples,
  exports and new runs leave it out;
- the encoder is a `Target` (models/frozen.py): the loss reads its features from the batch;
- with `encoder=latents` the sample itself is y: latents that are features of an encoder (RAE).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.config.options import Config
from torchditan.diffusion.objectives import Ingredient, Losses, Objective
from torchditan.errors import option_error
from torchditan.extras.methods.image_features import OPTION, ImageFeatures, to_tokens
from torchditan.models.frozen import Target
from torchditan.models.spec import Head, ModelSpec
from torchditan.randomness import Randomness

NAME = "alignment"
"""Of the head, and of the features in the batch."""
LATENTS = "latents"
STD_EPS = 1e-6


@dataclass(frozen=True)
class Aligned(Ingredient):
    """Adds weight * `distance` of the projected tokens of a block from the encoder's features. Subclasses project."""

    spec: ModelSpec
    block: int
    weight: float
    target: Target | None
    """None: the sample itself."""

    method: ClassVar[str]
    features = (NAME,)

    @classmethod
    def around(
        cls,
        base: Objective,
        spec: ModelSpec,
        encoder: str,
        block: int = 8,
        weight: float = 0.5,
        cache: bool = False,
    ) -> Aligned:
        """Build it for a model. The encoder is not opened: those who only sample build it too."""
        if spec.features and not 1 <= block <= len(spec.features):
            right = f"must be 1 to {len(spec.features)}, the blocks of {spec.name} {spec.flavor}"
            raise option_error(OPTION, f"{cls.method} block={block}", right)
        target = None if encoder == LATENTS else ImageFeatures(encoder, grid_of(spec), cache)
        return cls(base, spec, block, weight, target)

    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        if config.dataset.aspect_buckets:
            yield "dataset.aspect_buckets", f"{cls.method} aligns the tokens of one grid; leave one of them out"

    @property
    def targets(self) -> Mapping[str, Target]:
        return self.base.targets if self.target is None else {**self.base.targets, NAME: self.target}

    @property
    def heads(self) -> Mapping[str, Head]:
        feature = self.spec.features[self.block - 1] if self.spec.features else ""
        return {**self.base.heads, NAME: Head(feature, self.build_projector)}

    def build_projector(self) -> nn.Module:
        width = self.spec.sample_shape[0] if self.target is None else self.target.tensor.shape[1]
        return self.projector(self.spec.config.width, width)

    def projector(self, width: int, target_width: int) -> nn.Module:
        """The head: tokens (B, N, width) -> (B, N, target_width)."""
        raise NotImplementedError

    def distance(self, projected: Tensor, features: Tensor) -> Tensor:
        """(B,) of projected tokens and the encoder's features, (B, N, C) each."""
        return -F.cosine_similarity(projected, features, dim=-1).mean(1)

    def loss(self, model: Any, batch: dict[str, Tensor], randomness: Randomness) -> Losses:
        inputs = self.base.inputs(batch, randomness)
        prediction, found = model(*inputs, features=self.features)
        error = self.base.error(prediction, inputs, batch, randomness)
        features = batch[NAME].float() if self.target is not None else to_tokens(batch["sample"], grid_of(self.spec))
        distance = self.distance(found[NAME].float(), features)
        return Losses(error + self.weight * distance, {"loss": error.detach(), "similarity": -distance.detach()})


@dataclass(frozen=True)
class REPA(Aligned):
    width: int = 2048
    """Of the projector's two hidden layers."""

    method = "repa"

    @classmethod
    def around(
        cls,
        base: Objective,
        spec: ModelSpec,
        encoder: str,
        block: int = 8,
        weight: float = 0.5,
        cache: bool = False,
        width: int = 2048,
    ) -> Aligned:
        built: Any = super().around(base, spec, encoder, block, weight, cache)
        return dataclasses.replace(built, width=width)

    def projector(self, width: int, target_width: int) -> nn.Module:
        sizes = (width, self.width, self.width, target_width)
        first, *others = (nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        return nn.Sequential(first, *(layer for linear in others for layer in (nn.SiLU(), linear)))


@dataclass(frozen=True)
class IREPA(Aligned):
    method = "irepa"

    def projector(self, width: int, target_width: int) -> nn.Module:
        return TokenConvolution(width, target_width, grid_of(self.spec))

    def distance(self, projected: Tensor, features: Tensor) -> Tensor:
        std, mean = torch.std_mean(features, dim=1, keepdim=True)
        return super().distance(projected, (features - mean) / (std + STD_EPS))


class TokenConvolution(nn.Conv2d):
    """A 3 x 3 convolution over the grid of tokens: (B, N, width) -> (B, N, width_out)."""

    def __init__(self, width: int, width_out: int, grid: tuple[int, int]) -> None:
        super().__init__(width, width_out, 3, padding=1)
        self.grid = grid

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens.transpose(1, 2).unflatten(2, self.grid))
        return x.flatten(2).transpose(1, 2)


def grid_of(spec: ModelSpec) -> tuple[int, int]:
    """Rows and columns of the model's tokens."""
    height, width = spec.sample_shape[-2:]
    side = max(1, math.isqrt(height * width // spec.num_tokens))
    return height // side, width // side
