# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A DiT whose middle blocks skip patches in training (SPRINT; Park et al. 2025, arXiv 2510.21986).

Notable:
- the first blocks process all patches. The middle blocks process only those of `cond["kept_tokens"]`; a trained mask
  token takes the places of the others. The result and the output of the first blocks are concatenated, and a linear
  layer fuses them (2 D -> D) for the last blocks, which process all patches again;
- without `kept_tokens` the middle blocks process all patches: in sampling, validation and the last part of training;
- every sample keeps the same number of patches, so that the batch stays dense. Context tokens are never dropped;
- the fusion starts as other linear layers and the mask token at N(0, 0.02);
- the paper also trains without the middle blocks for some samples, and guides with such predictions (path-drop
  guidance). This model does not.

Shapes: as in dit.py; S context tokens and kept patches, T context tokens and all patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from torchditan.config.errors import option_error
from torchditan.models.dit import DiT, DiTConfig
from torchditan.models.initialization import draw_normal, fill, named_parameters_to_fill

KEPT_TOKENS = "kept_tokens"
"""Name in `cond` of the kept patches (B, number of kept patches) int64: their numbers, row by row, ascending."""


class SparseDenseFusion(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mask_token = nn.Parameter(torch.empty(width))
        self.proj = nn.Linear(2 * width, width)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Fuse the outputs of the first blocks, (B, T, D), and of the middle blocks, (B, S, D) at `places` (B, S)."""
        if places is not None:
            masked = self.mask_token.type_as(sparse).expand_as(dense)
            sparse = masked.scatter(1, places.unsqueeze(-1).expand_as(sparse), sparse)  # (B, T, D)
        return self.proj(torch.cat([dense, sparse], dim=-1))


class TokenDroppingDiT(DiT):
    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.fusion = SparseDenseFusion(config.width)
        self.init_outside_meta()

    def run_blocks(
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None,
        mask: torch.Tensor | None,
        cond: Mapping[str, torch.Tensor],
        features: Collection[str],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `DiT.run_blocks`. `cond` may contain `KEPT_TOKENS`."""
        context, dense_blocks = self.config.num_context_tokens, self.config.token_dropping_blocks
        places = None
        if KEPT_TOKENS in cond:
            kept = cond[KEPT_TOKENS] + context
            places = torch.cat([torch.arange(context, device=kept.device).expand(len(kept), -1), kept], dim=1)  # (B, S)
        found: dict[str, torch.Tensor] = {}
        carried: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks):
            if i == dense_blocks:
                dense, of_all_tokens = x, (rope, mask, carried)
                if places is not None:
                    x, rope, mask = _keep(x, places), _keep_rope(rope, places), _keep_mask(mask, text, places)
                    carried = [_keep(tensor, places) for tensor in carried]
            if i == len(self.blocks) - dense_blocks:
                x, (rope, mask, carried) = self.fusion(dense, x, places), of_all_tokens
            x = block(x, c, rope, text, mask, *carried)
            is_dense = i < dense_blocks or i >= len(self.blocks) - dense_blocks
            if isinstance(x, tuple):
                x, *carried = x
                if not is_dense:
                    right = "its middle blocks pass tensors to later blocks; must be 0"
                    raise option_error("model.token_dropping", self.config.token_dropping, right)
            if (name := f"blocks.{i}") in features:
                assert is_dense, f"{name} has no output for all patches"
                found[name] = x
        return x, found

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        for name, parameter in named_parameters_to_fill(self):
            if name == "fusion.mask_token":
                fill(parameter, draw_normal(seed, name, parameter.shape, std=0.02))


def _keep(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B, T, ...) -> (B, S, ...)."""
    return x.gather(1, places.view(*places.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _keep_rope(rope: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
    """(T, 1, K / 2, 2) -> (B, S, 1, K / 2, 2), each sample's angles."""
    return None if rope is None else rope[places]


def _keep_mask(mask: torch.Tensor | None, text: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
    """The mask of the tokens that attention reads: context and patches, or the text of cross-attention."""
    if mask is None or text is not None:
        return mask
    return mask.gather(3, places[:, None, None])  # (B, 1, 1, T) -> (B, 1, 1, S)


def option_mistakes(config: DiTConfig) -> Iterator[tuple[str, str]]:
    """(option of `[model]`, what would be right)."""
    if 2 * config.token_dropping_blocks >= config.depth:
        right = f"leaves no middle block: must be at least 1 and less than half of the {config.depth} blocks"
        yield "model.token_dropping_blocks", right


def dense_features(config: DiTConfig) -> list[str]:
    """Names of the blocks that always process all patches."""
    dense_blocks = config.token_dropping_blocks
    return [f"blocks.{i}" for i in (*range(dense_blocks), *range(config.depth - dense_blocks, config.depth))]
