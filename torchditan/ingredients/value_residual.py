# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The DiT block with value residuals (ResFormer; Zhou et al. 2024, arXiv 2410.17897).

Notable:
- block n attends with the values a_n V_1 + b_n V_n. V_n are its own values and V_1 those of the first block, before
  mixing. The scalars a_n and b_n are trained, as in the paper's learnable variant;
- they start at 0 and 1, so that the model starts as the one without value residuals, to the bit. The paper's fixed
  variant has 1/2 and 1/2;
- the first block has the two scalars too, so that all blocks are alike. There they scale its values by a_1 + b_1;
- V_1 leaves the first block as a second output and enters the others as an argument, which compile, activation
  checkpointing and FSDP support. Training keeps these (B, N, D) until the backward pass of the first block.
"""

from __future__ import annotations

import torch
from torch import nn

from torchditan.models.dit import Attention, DiTBlock, DiTConfig, modulate


class ValueResidualAttention(Attention):
    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.first_scale = nn.Parameter(torch.empty(1))
        self.own_scale = nn.Parameter(torch.empty(1))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, rope: torch.Tensor | None, mask: torch.Tensor | None, first: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (B, N, D) and the first block's values (B, N, H, K)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)  # 3 of (B, N, H, K)
        if first is None:
            first = v.contiguous()  # a view would keep q and k in memory
        return self.attend(q, k, self.first_scale * first + self.own_scale * v, rope, mask), first


class ValueResidualBlock(DiTBlock):
    """`DiTBlock` whose values are mixed with the first block's."""

    zero_weights = (*DiTBlock.zero_weights, "attn.first_scale")

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.attn = ValueResidualAttention(config)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `Block.forward`. Without `first`, the values (B, N, H, K) of the first block, this is the first block."""
        is_first, own_mask = first is None, mask if text is None else None
        if c is None:
            attention, first = self.attn(self.norm1(x), rope, own_mask, first)
            x = x + attention
            x = x + self.mlp(self.norm2(x))
        else:
            chunks = self.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)  # 6 of (B, 1, D)
            shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = chunks
            attention, first = self.attn(modulate(self.norm1(x), shift_attn, scale_attn), rope, own_mask, first)
            x = x + gate_attn * attention
            if text is not None:
                x = x + self.cross_attn(self.norm_cross(x), text, mask)
            x = x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return (x, first) if is_first else x
