# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Attention of few tokens in bfloat16 on a CPU is computed by batched products, and is what torch's kernel computes."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchditan.models.attention import attention


def heads(num_queries: int, num_keys: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (num_queries, num_keys, num_keys)
    return [torch.randn(3, 4, size, 32, generator=generator).to(dtype).requires_grad_() for size in sizes]


def padding(num_keys: int) -> torch.Tensor:
    """(3, 1, 1, M): the samples have M, M - 1 and one token."""
    lengths = torch.tensor([num_keys, num_keys - 1, 1])
    return (torch.arange(num_keys) < lengths[:, None])[:, None, None]


def backward_kernel(output: torch.Tensor) -> str:
    assert output.grad_fn is not None
    return output.grad_fn.name()


@pytest.mark.parametrize("num_keys", [17, 256])
@pytest.mark.parametrize("is_masked", [False, True])
def test_products_round_as_little_as_the_kernel(num_keys: int, is_masked: bool) -> None:
    """Outputs and gradients, against float64: at most 1.5 times the kernel's error, which is 0.2% to 0.4%."""
    mask = padding(num_keys) if is_masked else None
    inputs = heads(16, num_keys)
    upstream = torch.randn(3, 4, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()

    def results(function, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = function(*leaves, mask)
        return [x.double() for x in (output, *torch.autograd.grad(output, leaves, upstream.to(dtype)))]

    def kernel(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    exact = results(kernel, torch.float64)
    products, torchs = (results(function, torch.bfloat16) for function in (attention, kernel))
    assert "FlashAttention" not in backward_kernel(attention(*inputs, mask))
    for ours, theirs, right in zip(products, torchs, exact, strict=True):
        assert (ours - right).norm() < 1.5 * (theirs - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize(
    ("inputs", "by_products"),
    [
        (heads(16, 17), True),
        (heads(144, 144), True),
        (heads(144, 145), False),  # more pairs than _MOST_PAIRS
        (heads(16, 16, torch.float32), False),
    ],
    ids=["text", "most", "too many", "float32"],
)
def test_only_few_tokens_in_bfloat16_leave_the_kernel(inputs: list[torch.Tensor], by_products: bool) -> None:
    assert ("FlashAttention" in backward_kernel(attention(*inputs))) is not by_products


def test_products_have_a_forward_derivative() -> None:
    """As `derivative` needs it, which requires a backend that has one."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        exact, ours = (
            forward_ad.unpack_dual(
                attention(*(forward_ad.make_dual(x.to(dtype), x.flip(0).to(dtype)) for x in heads(16, 17)))
            ).tangent
            for dtype in (torch.float64, torch.bfloat16)
        )
    assert exact is not None and ours is not None
    assert (ours.double() - exact).norm() < 0.01 * exact.norm()
