# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Float8 training of the blocks' linear layers, through torchao."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch
from torch import nn

from torchditan.config import Float8, option_error


def check_float8(config: Float8, *, device: torch.device) -> None:
    """Refuse a float8 request that this device or installation cannot honour.

    Raises:
        ConfigError: torchao is missing, or the device has no float8 products and emulation is off.
    """
    if not config.enable_float8_linear:
        return
    option = "float8.enable_float8_linear"
    if importlib.util.find_spec("torchao") is None:
        raise option_error(option, True, "needs torchao; pip install 'torchditan[float8]'")
    if config.emulate:
        return
    supported = device.type == "cuda" and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)
    )
    if not supported:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        right = (
            f"{name} has no float8 products; needs compute capability 8.9 (H100, L40S, RTX 4090), or --float8.emulate "
            "to compute them slowly"
        )
        raise option_error(option, True, right)


def convert_to_float8(*, blocks: nn.ModuleList, config: Float8) -> None:
    """Replace the linear layers of the blocks by torchao's Float8Linear, in place; names stay.

    Layers whose sizes are no multiple of 16 stay as they are, since the hardware's products need that, and so
    do the adaLN projections, whose single row per image has nothing to gain.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    options = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate)

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or "adaLN_modulation" in name:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    convert_to_float8_training(blocks, config=options, module_filter_fn=is_converted)
