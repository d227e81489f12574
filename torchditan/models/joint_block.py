# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The block of `model.text = "joint"`: text and patches have their own weights and one attention (MM-DiT of Stable
Diffusion 3; Esser et al. 2024, arXiv 2403.03206).

The last block also updates the text, which nothing reads afterwards. All blocks are therefore alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from torchditan.models.dit import Block, DiTBlock, DiTConfig, modulate, rotate


class JointBlock(Block):
    """Two streams of tokens, text first. Tokens of timestep and label (conditioning `in_context`) count as text."""

    residual_weights = DiTBlock.residual_weights
    reads_text_jointly = True

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.num_text = config.num_context_tokens
        own = replace(config, text=None)
        self.text, self.patches = DiTBlock(own), DiTBlock(own)

    @classmethod
    def option_mistakes(cls, config: DiTConfig) -> Iterator[tuple[str, str]]:
        if config.text != "joint":
            yield "model.block", "needs captions as tokens; set --model.text joint, or leave it out"

    def forward(
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Block.forward`. The first `num_text` of the tokens x are text."""
        streams = (self.text, self.patches)
        sizes = [self.num_text, x.shape[1] - self.num_text]
        parts = x.split(sizes, dim=1)  # (B, L, D) and (B, N, D)
        modulations = [_modulation(stream, c) for stream in streams]
        heads = []
        for stream, part, (shift, scale, *_) in zip(streams, parts, modulations, strict=True):
            attn = stream.attn
            q, k, v = (
                attn.qkv(_normalize(stream.norm1, part, shift, scale)).unflatten(-1, (3, -1, attn.head_dim)).unbind(2)
            )
            heads.append((attn.q_norm(q), attn.k_norm(k), v))
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))  # 3 of (B, L + N, H, K)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        mixed = self.patches.attn.mix_tokens(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        changes = mixed.transpose(1, 2).flatten(2).split(sizes, dim=1)  # (B, L, D) and (B, N, D)
        results = []
        for stream, part, change, (*_, gate, shift, scale, gate_mlp) in zip(
            streams, parts, changes, modulations, strict=True
        ):
            part = _add(part, stream.attn.proj(change), gate)
            results.append(_add(part, stream.mlp(_normalize(stream.norm2, part, shift, scale)), gate_mlp))
        return torch.cat(results, dim=1)


def _modulation(stream: DiTBlock, c: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """6 of (B, 1, D), or of None without adaLN: shift, scale and gate of attention, then of the MLP."""
    return (None,) * 6 if c is None else stream.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)


def _normalize(
    norm: nn.Module, x: torch.Tensor, shift: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    x = norm(x)
    return x if shift is None or scale is None else modulate(x, shift, scale)


def _add(x: torch.Tensor, change: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    return x + (change if gate is None else gate * change)
