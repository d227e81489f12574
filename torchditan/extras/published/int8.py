# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The frozen base of a LoRA in float32, bfloat16 or int8.

Notable:
- int8 is symmetric with one scale per output row, absmax / 127. A product saves the int8 weight for its backward pass.
  The dequantised copy is made once in each direction and freed immediately;
- scales are float32 numbers that bfloat16 represents exactly. FSDP gathers them in the precision of the run and so does
  not change them. float16 does not reach below 6e-5: rows whose largest weight is under 0.008 lose precision there;
- a model is prepared on the meta device and filled afterwards, one full tensor at a time, by its published names;
- FSDP gathers int8 as int8 on torch 2.13. torch 2.11 first casts it to the precision of the run. The results are the
  same (integers to 127 are exact in bfloat16), but the gathered block takes bfloat16's memory. Shards are int8 on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.models.initialization import fill

_MAX = 127


class Int8Linear(nn.Linear):
    """A frozen linear layer with an int8 weight (out, in), a float32 scale (out,) and the original bias.

    It computes in the dtype of its input. Only the input gets a gradient.

    Args:
        linear: the layer that it replaces, on the same device. On the meta device no values are computed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        out_features, in_features = linear.weight.shape
        device, bias = linear.weight.device, linear.bias
        super().__init__(in_features, out_features, bias=False, device="meta")
        if device.type == "meta":
            quantized = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
            scale = torch.empty(out_features, dtype=torch.float32, device=device)
        else:
            quantized, scale = self.quantize(linear.weight)
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    @staticmethod
    @torch.no_grad()
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 (out, in) and float32 scale (out,) such that weight = int8 * scale, within half a scale.

        The scale is absmax / 127 rounded to bfloat16; the largest weight of a row still rounds to 127.
        """
        largest = weight.float().abs().amax(dim=1)
        scale = (largest / _MAX).bfloat16().float().clamp_min(torch.finfo(torch.float32).tiny)
        quantized = torch.div(weight.float(), scale[:, None]).round_().clamp_(-_MAX, _MAX)
        return quantized.to(torch.int8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), in the dtype of x."""
        return _Int8Product.apply(x, self.weight, self.scale, self.bias)


class _Int8Product(torch.autograd.Function):
    """x (..., in) times the dequantised weight (out, in). The backward pass dequantises the weight again."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, _dequantize(weight, scale, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, weight, scale, _ = inputs
        ctx.save_for_backward(weight, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        return gradient @ _dequantize(weight, scale, gradient.dtype), None, None, None


def _dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight * scale[:, None]).to(dtype)


def quantize_base(
    model: nn.Module, blocks: Iterable[nn.Module], *, base: Literal["float32", "bfloat16", "int8"] = "bfloat16"
) -> None:
    """Freeze a model and store its weights in the precision of a LoRA's base, in place. Call it before `add_lora`.

    Args:
        model: usually on the meta device, where nothing is computed.
        blocks: its repeated blocks. With int8 their linear layers become `Int8Linear`.
        base: float32 changes no dtype. With bfloat16 and int8 every other parameter becomes bfloat16. Buffers keep
            their dtype.
    """
    model.requires_grad_(False)
    if base == "float32":
        return
    if base == "int8":
        for block in blocks:
            _quantize_linears(block)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_quantized = isinstance(module, Int8Linear) and name in ("weight", "scale")
            if parameter.is_floating_point() and not is_quantized:
                parameter.data = parameter.data.to(torch.bfloat16)


def _quantize_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and not isinstance(child, Int8Linear):
            setattr(module, name, Int8Linear(child))
        else:
            _quantize_linears(child)


def base_names(model: nn.Module) -> list[str]:
    """Names of the tensors that a published file must contain: without LoRA's wrappers and int8 scales."""
    names = []
    for name in model.state_dict():
        if ".lora_" in name:
            continue
        module, _, leaf = name.rpartition(".")
        if leaf == "scale" and isinstance(model.get_submodule(module), Int8Linear):
            continue
        names.append(name.replace(".base_layer.", "."))
    return names


def fill_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Copy a full tensor into a parameter or buffer of the base, quantising and sharding it as the layer requires.

    No communication: every rank passes the same value, one tensor at a time.

    Args:
        model: on a real device, plain or sharded, with or without LoRA around its layers.
        name: its name in the published file, see `base_names`.
        value: the full tensor, of any floating-point dtype, on the CPU.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module = getattr(module, "base_layer", module)
    if isinstance(module, Int8Linear) and leaf == "weight":
        quantized, scale = Int8Linear.quantize(value)
        fill(module.weight, quantized)
        fill(module.scale, scale)
    else:
        fill(getattr(module, leaf), value)
