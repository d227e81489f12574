# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One process in lower precision: a plain module that computes with copies of its float32 weights.

Notable:
- each block, and the rest of the model, copies its weights when its forward pass begins. Autograd casts the gradients
  back and adds them up in float32;
- parameters, state dict, optimizer and EMA only know the float32 weights, so whatever is written to them counts from
  the next forward pass on. A copy is an ordinary attribute of the module that owns the weight, which Python finds
  before the parameter of the same name;
- the backward pass frees the copies of a block when it has the gradients of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compute_in(dtype: torch.dtype, model: nn.Module, *, blocks: Iterable[nn.Module]) -> None:
    """Let each block, and the rest of the model, compute with copies of its weights in `dtype`, in place."""
    in_blocks = {module for block in blocks for module in block.modules()}
    rest = [module for module in model.modules() if module not in in_blocks]
    for unit, owners in [*((block, block.modules()) for block in blocks), (model, rest)]:
        working = WorkingWeights(owners, dtype)
        if working.places:
            unit.register_forward_pre_hook(working.copy)


class WorkingWeights:
    """Copies of the weights that some modules own, and not of those of their submodules."""

    def __init__(self, owners: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.places = [
            (owner, name)
            for owner in owners
            for name, weight in owner.named_parameters(recurse=False)
            if weight.is_floating_point() and weight.dtype != dtype
        ]
        self.weights: list[nn.Parameter] = []
        self.num_pending = 0
        """Number of forward passes that await their backward pass."""

    def copy(self, *_: Any) -> None:
        """Renew the copies. A forward pre-hook."""
        if not self.weights:  # the constructor may have seen others: leaving the meta device replaces parameters
            self.weights = [dict(owner.named_parameters(recurse=False))[name] for owner, name in self.places]
        self.num_pending += torch.is_grad_enabled()
        copies: tuple[torch.Tensor, ...] = _Copy.apply(self, *self.weights)
        for (owner, name), weight, copy in zip(self.places, self.weights, copies, strict=True):
            # Also without gradients: activation checkpointing may compute again with this copy.
            vars(owner)[name] = copy if copy.requires_grad else copy.requires_grad_(weight.requires_grad)

    def release(self) -> None:
        """Free the copies after the last backward pass that may read them."""
        self.num_pending -= 1
        if self.num_pending == 0:
            for owner, name in self.places:
                del vars(owner)[name]


class _Copy(torch.autograd.Function):
    """Copies of weights in the dtype of their `WorkingWeights`; gradients return in the dtypes of the weights."""

    @staticmethod
    def forward(ctx: Any, working: WorkingWeights, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.working = working
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(weight, dtype=working.dtype) for weight in weights]
        torch._foreach_copy_(copies, weights)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        working: WorkingWeights = ctx.working
        working.release()
        narrow = [gradient for gradient in gradients if gradient is not None]
        pairs = zip(working.weights, gradients, strict=True)
        wide = [torch.empty_like(weight) for weight, gradient in pairs if gradient is not None]
        torch._foreach_copy_(wide, narrow)
        left = iter(wide)
        return None, *(None if gradient is None else next(left) for gradient in gradients)
