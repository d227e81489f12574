# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Attention as `F.scaled_dot_product_attention`, and what replaces it on a CPU.

torch's CPU kernel multiplies one head of one sample at a time. For few tokens in bfloat16, its backward pass takes most
of a training step. Batched products are faster there: see `is_faster_by_products`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MOST_PAIRS = 144 * 144
"""Of a query and a key. With 196 * 196, torch's kernel is as fast, and it keeps no matrix of the pairs."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v, (B, H, N, K).

    Args:
        q: (B, H, N, K). `k` and `v`: (B, H, M, K). `q` and `k` may be float32 where `v` has another dtype.
        mask: bool that broadcasts to (B, H, N, M), false for keys that a query ignores. Every query has at least one.
    """
    # Only a CPU's norms leave q in float32; the planner traces them on the meta device.
    if (q.device.type == "cpu" or q.dtype != v.dtype) and is_faster_by_products(q, v):
        return attention_by_products(q, k, v, mask)
    return F.scaled_dot_product_attention(q.type_as(v), k.type_as(v), v, attn_mask=mask)


def is_faster_by_products(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a CPU attends faster by `attention_by_products` than by torch's kernel: bfloat16 and few tokens."""
    return v.dtype == torch.bfloat16 and q.shape[-2] * v.shape[-2] <= _MOST_PAIRS


def attention_by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The same by batched products. Scores and softmax are float32, as in torch's kernels; the weights are rounded."""
    scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-2, -1)  # (B, H, N, M)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v
