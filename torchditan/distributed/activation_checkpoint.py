# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Activation checkpointing: which blocks recompute which activations in the backward pass.

It replaces a block's `forward` on the instance instead of wrapping the module. Parameter names stay unchanged, which
initialization, checkpoints and weight decay rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_OPS_TO_SAVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_VARLEN_ATTENTION = "torch_attn._varlen_attn.default"
"""torch defines it when it is used."""


def _save_expensive_ops(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_saved = op in _OPS_TO_SAVE or str(op) == _VARLEN_ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_save_expensive_ops)


# Without this name of the policy, torch does not read the graphs of checkpointed blocks from its cache.
_selective_contexts.cache_hash = " ".join([*sorted(map(str, _OPS_TO_SAVE)), _VARLEN_ATTENTION])  # type: ignore[attr-defined]


def apply_activation_checkpoint(
    blocks: nn.ModuleList,
    *,
    mode: Literal["none", "full", "selective", "fraction"],
    selective_option: str = "2",
    fraction: float = 1.0,
) -> None:
    """Checkpoint the repeated blocks of a model, in place.

    Args:
        blocks: the model's repeated blocks.
        mode: none, full (every block), selective or fraction.
        selective_option: for mode selective; "n" checkpoints every n-th block, "op" checkpoints all blocks but
            keeps the outputs of matrix products and attention.
        fraction: for mode fraction; the fraction of the blocks, 0 to 1, rounded to whole blocks and spread evenly.
    """
    if mode == "none":
        return
    chosen, options = list(blocks), {}
    if mode == "selective" and selective_option == "op":
        options["context_fn"] = _selective_contexts
    elif mode == "selective":
        chosen = chosen[int(selective_option) - 1 :: int(selective_option)]
    elif mode == "fraction":
        count, total = round(fraction * len(chosen)), len(chosen)
        chosen = [block for i, block in enumerate(chosen) if (i + 1) * count // total > i * count // total]
    for block in chosen:
        block.forward = _checkpointed(block.forward, **options)


def _checkpointed(forward: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing is kept then; and torch 2.11 cannot checkpoint in forward mode
            return forward(*args, **kwargs)
        # The blocks draw no random numbers, so no random state needs to be preserved.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return run
