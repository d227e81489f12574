# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""RMSNorm on a CPU against torch's, with its gradients and forward derivative."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

from torchditan.models.rms_norm import RMSNorm, _RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, gradient, tangent = torch.randn(3, 4, 5, 2, 48, dtype=dtype)

    def results(function):
        leaf, weight = (tensor.detach().clone().requires_grad_() for tensor in (x, norm.weight))
        output = function(leaf, weight)
        output.backward(gradient)
        with torch.no_grad(), forward_ad.dual_level():
            change = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent), norm.weight)).tangent
        return output.detach(), leaf.grad, weight.grad, change

    ours = results(lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)))
    theirs = results(lambda x, weight: F.rms_norm(x, (48,), weight, 1e-6))
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left, right)
    wide = RMSNorm(48, eps=1e-6, stays_float32=True).to(dtype)
    wide.load_state_dict(norm.state_dict())
    assert wide(x).dtype == torch.float32
    torch.testing.assert_close(wide(x).to(dtype), ours[0])


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    normalize = lambda x, weight: _RMSNorm.apply(x, weight, 1e-6, torch.float64)  # noqa: E731
    assert torch.autograd.gradcheck(normalize, (x, weight), check_forward_ad=True)
