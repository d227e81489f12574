# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The precision that suits a device: "auto" in `AUTOMATIC`."""

from __future__ import annotations

import torch

from torchditan.config.options import Config, flatten

AUTOMATIC = ("training.mixed_precision_param", "optimizer.ns_dtype")
"""Options that take "auto"."""
_CPU_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Instructions that multiply in bfloat16: of Intel and AMD, then of Arm. Names of `torch.cpu.get_capabilities`."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies in bfloat16; others emulate it, which is slower than float32.

    Apple's GPUs count as devices that do not: TorchDiTan trains in float32 there (mps.py).
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return any(found.get(name) for name in _CPU_PRODUCTS)
    return False


def precision_for(device: torch.device) -> str:
    """What "auto" means on this device: bfloat16 or float32."""
    return "bfloat16" if multiplies_bfloat16(device) else "float32"


def automatic(config: Config) -> list[str]:
    """The options of this configuration that are "auto"."""
    values = flatten(config)
    return [option for option in AUTOMATIC if values[option] == "auto"]


def float64_device(device: torch.device) -> torch.device:
    """Where to compute in float64: this device, or the CPU instead of an Apple GPU, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def precision_advice(precision: str, device: torch.device) -> str | None:
    """A message if bfloat16 is slow on this CPU, else None."""
    if device.type == "cpu" and precision == "bfloat16" and not multiplies_bfloat16(device):
        return "hint: this CPU has no bfloat16 products; --training.mixed_precision_param float32 can be 4 times faster"
    return None
