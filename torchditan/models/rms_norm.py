# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), on a CPU by fewer passes over memory than torch's.

torch computes it there by single operations, and differentiates each. With r = (|x|^2 / D + eps)^-1/2 and y = x r w,
the gradient of x is that of LayerNorm for a mean of 0 and a standard deviation of 1 / r, plus (g . w) r / D in every
element of a row. So LayerNorm's backward kernel does most of the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension. Computes in float32.

    Args:
        dim: size of the last dimension.
        eps: added to the mean square.
        stays_float32: on a CPU, return float32 instead of the dtype of the input. For queries and keys: attention
            multiplies them in float32 there, so that they are never rounded, nor cast several times.
    """

    def __init__(self, dim: int, *, eps: float, stays_float32: bool = False) -> None:
        super().__init__(dim, eps=eps)
        self.stays_float32 = stays_float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_eager_on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        return self.forward_on_cpu(x) if is_eager_on_cpu else super().forward(x)

    def forward_on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32) if self.stays_float32 else x.dtype
        output: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps, dtype)
        return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        wide = at_least_float32(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.save_for_forward(x, weight, r)
        ctx.dtype = dtype
        return (wide * r).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        g, w = at_least_float32(gradient), at_least_float32(weight)
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward.default(
            g, at_least_float32(x), w.shape, torch.zeros_like(r), r, w, None, [True, True, False]
        )
        of_x.addcmul_((g @ w).unsqueeze(-1), r, value=1 / w.numel())
        return of_x.type_as(x), of_weight.type_as(weight), None, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, dweight: torch.Tensor | None, _eps: None, _dtype: None) -> torch.Tensor:
        x, weight, r = ctx.saved_tensors
        wide, dx = at_least_float32(x), at_least_float32(dx)
        change = r * (dx - wide * r.square() * (wide * dx).mean(-1, keepdim=True)) * weight
        return (change if dweight is None else change + wide * r * dweight).to(ctx.dtype)
