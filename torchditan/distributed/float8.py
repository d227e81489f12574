# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Float8 training of the blocks' linear layers, through torchao.

Notable:
- the model determines which layers benefit: torchao's rule looks at their sizes, and one forward on the meta device
  counts their input rows. Layers with one row per image (modulations) stay unchanged. No family needs a list of names;
- CUDA's float8 products need an inner dimension that is a multiple of 16. In the weight gradient the inner dimension is
  the number of rows. Layers with another number of rows pad it there with zeros, which do not change the sum.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchditan.config.options import Float8
from torchditan.errors import option_error

if TYPE_CHECKING:
    from torchditan.models.spec import ModelSpec

_ALIGNMENT = 16
"""The inner dimension and the columns of a float8 product must be multiples of this number of elements."""
_AMD_ARCHITECTURES = ("gfx942", "gfx950", "gfx1200", "gfx1201")
"""AMD's GPUs whose float8 products torch uses. torchao chooses their type: fnuz on gfx942, else OCP's."""


def check_float8(config: Float8, *, device: torch.device) -> None:
    """Check that this device and this installation support the float8 options.

    Raises:
        ConfigError: torchao is missing, or the device has no float8 products and emulation is off.
    """
    option = "float8.enable_float8_linear"
    if importlib.util.find_spec("torchao") is None:
        raise option_error(option, True, "needs torchao; pip install 'torchditan[float8]'")
    if config.emulate:
        return
    if not _has_float8_products(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        needs = "compute capability 8.9 (H100, L40S, RTX 4090)"
        if torch.version.hip is not None:
            needs = f"one of {', '.join(_AMD_ARCHITECTURES)} (MI300, MI350, RX 9000)"
        right = f"{name} has no float8 products; needs {needs}, or --float8.emulate to compute them slowly"
        raise option_error(option, True, right)


def _has_float8_products(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 9)
    architecture: str = torch.cuda.get_device_properties(device).gcnArchName  # such as gfx942:sramecc+:xnack-
    return architecture.split(":")[0] in _AMD_ARCHITECTURES


def convert_to_float8(
    *, model: nn.Module, spec: ModelSpec, config: Float8, batch_size: int, varied_shapes: bool = False
) -> str:
    """Replace the linear layers of the blocks by torchao's Float8Linear, in place. Names stay unchanged.

    Small layers and layers with one row per image do not benefit and stay unchanged. So do layers whose sizes are not
    multiples of 16, which the hardware requires. Emulation, which is slow in any layer, converts small ones too.

    Args:
        model: built from `spec`.
        spec: provides the input rows of each layer.
        config: recipe and emulation.
        batch_size: samples in one forward pass.
        varied_shapes: whether samples have other shapes in addition to `spec.sample_shape`.

    Returns:
        One line for the log: how many layers were converted, and how many of them pad, or why there are none.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_linear import Float8Linear

    options = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate)
    has_float8_gradient = options.cast_config_input_for_grad_weight.scaling_type is not ScalingType.DISABLED
    rows_of = rows_of_linears(spec, batch_size=batch_size)
    blocks = spec.blocks(model)
    num_linears = sum(isinstance(module, nn.Linear) for module in blocks.modules())

    def gains(linear: nn.Module, name: str) -> bool:
        assert isinstance(linear, nn.Linear)
        fits = linear.in_features % _ALIGNMENT == 0 == linear.out_features % _ALIGNMENT
        pays = config.emulate or is_large_enough(linear)
        return fits and pays and max(rows_of.get(name, set()), default=0) > batch_size

    # torchao's own entry point also works around a miscompilation of the compiled backward pass.
    convert_to_float8_training(blocks, config=options, module_filter_fn=gains)
    converted_layers = {name: module for name, module in blocks.named_modules() if isinstance(module, Float8Linear)}
    num_padded = 0
    for name, converted in converted_layers.items():
        is_odd = any(number % _ALIGNMENT for number in rows_of[name])
        if has_float8_gradient and (is_odd or varied_shapes):
            products = converted.linear_mm_config
            pads = products.grad_weight._replace(pad_inner_dim=True)
            converted.linear_mm_config = products._replace(grad_weight=pads)
            num_padded += 1
    line = f"float8: {len(converted_layers)} of {num_linears} linear layers of the blocks"
    if num_padded:
        line += f", {num_padded} of them padded to a multiple of {_ALIGNMENT} rows"
    if not converted_layers and not config.emulate:
        line += ": none gains below a width of about 2,048, so the run trains without float8"
    return line


def is_large_enough(linear: nn.Linear) -> bool:
    """Whether products of this size are faster in float8: the thresholds of torchao 0.18 for scales per row.

    torchao measured them on an H100 (`_auto_filter_for_rowwise` in torchao/float8/float8_linear_utils.py). They serve
    every recipe: its looser ones for scales per tensor select all such layers of DiT-XL/2, which took 1.22 times the
    time of bfloat16 on an H200, and it has none for `rowwise_with_gw_hp`.
    """
    outputs, inputs = linear.weight.shape
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


def rows_of_linears(spec: ModelSpec, *, batch_size: int) -> dict[str, set[int]]:
    """Numbers of input rows of each linear layer of the blocks, by its name in `spec.blocks`.

    Counted in a forward on the meta device, which computes nothing. Layers that never run have no rows.
    """
    rows: dict[str, set[int]] = {}
    with torch.device("meta"), torch.no_grad():
        model = spec.build().to("meta")  # the buffers too
        for name, module in spec.blocks(model).named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(
                    lambda _module, inputs, name=name: rows.setdefault(name, set()).add(inputs[0][..., 0].numel())
                )
        model(*spec.example_inputs(batch_size=batch_size))
    return rows
