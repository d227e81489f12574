# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The derivative of a model along a direction of its inputs, in forward mode, exact in every mode of training.

Notable:
- one pass without gradients computes the prediction and its derivative. Differentiate the loss through a second,
  ordinary forward pass. Forward mode together with gradients fails under FSDP2 and activation checkpointing;
- compiled blocks would silently drop the tangent (an error of 0.69 of its norm), so this pass runs eagerly;
- attention is computed by products and a softmax (`SDPBackend.MATH`), because the fused kernels have no forward
  derivative. That takes B heads N^2 values of memory in one block at a time;
- torch would also multiply the input of a linear layer by the zero tangent of its weight: three products instead of
  two. `_ForwardMode` leaves it out;
- on a GPU the derivative of a norm in bfloat16 is float32, which the next product refuses. `_ForwardMode` rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_NORMS = (F.rms_norm, F.layer_norm)


class _ForwardMode(TorchFunctionMode):
    """Linear layers with constant weights: the tangent of W x + b is W dx. Tangents of norms have the norm's dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS:
            primal, tangent = forward_ad.unpack_dual(func(*args, **(kwargs or {})))
            return primal if tangent is None else forward_ad.make_dual(primal, tangent.to(primal.dtype))
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        primal, tangent = forward_ad.unpack_dual(x)
        output = func(primal, *args[1:], **(kwargs or {}))
        return output if tangent is None else forward_ad.make_dual(output, func(tangent, weight))


@torch.no_grad()
def derivative(
    model: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]],
    tangents: tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction at `inputs` and its derivative along `tangents`, both (B, ...) without gradients.

    Args:
        model: `model(x_t, t, cond)`, parallelized or compiled in any way.
        inputs: (x_t, t, cond).
        tangents: (dx_t, dt, dcond) of the same shapes; entries of the condition without a tangent are constant.

    Raises:
        NotImplementedError: an operator of the model has no forward derivative.
    """
    (x_t, t, cond), (dx_t, dt, dcond) = inputs, tangents
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(cond[name], tangent) for name, tangent in dcond.items()}
        with _ForwardMode():
            output = model(forward_ad.make_dual(x_t, dx_t), forward_ad.make_dual(t, dt), {**cond, **dual})
        prediction, change = forward_ad.unpack_dual(output)
        assert change is not None, "the model dropped the tangent"
        return prediction, change
