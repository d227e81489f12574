# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A DiT with the projection head of self-alignment (diffusion/alignment.py), which only training has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from torchditan.models.dit import DiT, DiTConfig
from torchditan.models.saved_weights import TRAINING_ONLY

FEATURE = TRAINING_ONLY.removesuffix(".")


class AlignedDiT(DiT):
    """A DiT with one more feature, "alignment_head": the patch tokens after one block, projected by an MLP.

    The head has three layers of the model's width with SiLU between them, as in REPA (Yu et al. 2024, arXiv
    2410.06940). `init_weights` fills it as other linear layers. A forward without the feature does not compute it.

    Args:
        config: of the DiT.
        block: index of the block whose tokens the head reads.
    """

    def __init__(self, config: DiTConfig, *, block: int) -> None:
        super().__init__(config)
        width = config.width
        layers = [nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)]
        self.alignment_head = nn.Sequential(*layers)
        self.aligned_block = f"blocks.{block}"
        self.init_outside_meta()

    def forward(
        self, x_t: torch.Tensor, t: torch.Tensor, cond: Mapping[str, torch.Tensor], features: Collection[str] = ()
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if FEATURE not in features:
            return super().forward(x_t, t, cond, features)
        prediction, found = super().forward(x_t, t, cond, {*features, self.aligned_block})
        asked = {name: tokens for name, tokens in found.items() if name in features}
        return prediction, {**asked, FEATURE: self.alignment_head(found[self.aligned_block])}
