# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Devices of the planner: memory and peaks from their datasheets. ECC takes 2 to 4 GiB of a40, l4 and l40s.

bfloat16 peaks are those of models/peak_flops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchditan.errors import did_you_mean, option_error
from torchditan.models.peak_flops import peak_flops


@dataclass(frozen=True)
class Device:
    name: str
    driver_name: str
    """Name in the driver and in the table of peaks in models/peak_flops.py."""
    memory_gib: float
    float32_tflops: float
    """Dense matrix products in float32, as torch computes them by default (no TF32)."""
    has_float8: bool
    memory_gb_per_s: float
    devices_per_node: int = 8
    workspace_mib: float = 8.125
    """Workspace that cuBLAS takes from the allocator."""

    @property
    def bfloat16_flops(self) -> float:
        peak = peak_flops(self.driver_name)
        assert peak is not None
        return peak

    @property
    def float32_flops(self) -> float:
        return self.float32_tflops * 1e12

    @property
    def tf32_flops(self) -> float:
        """Of float32 products in TF32: half the bfloat16 peak of an NVIDIA GPU. Other GPUs are planned without TF32."""
        is_nvidia = self.driver_name.startswith("NVIDIA")
        return max(self.bfloat16_flops / 2, self.float32_flops) if is_nvidia else self.float32_flops


# name, driver's name, GiB, float32 TFLOP/s, float8, memory GB/s, devices per node, cuBLAS MiB
_TABLE = (
    Device("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, 19.5, False, 1555),
    Device("a100-80gb", "NVIDIA A100-SXM4-80GB", 80, 19.5, False, 2039),
    Device("a100-40gb-pcie", "NVIDIA A100-PCIE-40GB", 40, 19.5, False, 1555),
    Device("a100-80gb-pcie", "NVIDIA A100 80GB PCIe", 80, 19.5, False, 1935),
    Device("a40", "NVIDIA A40", 44.4, 37.4, False, 696),
    Device("l4", "NVIDIA L4", 22, 30.3, True, 300),
    Device("l40s", "NVIDIA L40S", 44.4, 91.6, True, 864),
    Device("h100", "NVIDIA H100 80GB HBM3", 80, 67, True, 3350, 8, 32),
    Device("h100-pcie", "NVIDIA H100 PCIe", 80, 51, True, 2000, 8, 32),
    Device("h100-nvl", "NVIDIA H100 NVL", 94, 60, True, 3900, 8, 32),
    Device("h200", "NVIDIA H200", 140, 67, True, 4800, 8, 32),
    Device("h20", "NVIDIA H20", 96, 44, True, 4000, 8, 32),
    Device("gh200", "NVIDIA GH200 480GB", 96, 67, True, 4000, 1, 32),
    Device("b200", "NVIDIA B200", 179, 75, True, 7700, 8, 32),
    Device("gb200", "NVIDIA GB200", 184, 80, True, 8000, 72, 32),
    Device("mi250x", "AMD Instinct MI250X", 64, 47.9, False, 1638),
    Device("mi300x", "AMD Instinct MI300X", 192, 163.4, True, 5300),
    Device("mi325x", "AMD Instinct MI325X", 256, 163.4, True, 6000),
    Device("rtx4090", "NVIDIA GeForce RTX 4090", 24, 82.6, True, 1008),
)
DEVICES = {device.name: device for device in _TABLE}
NAMES = [*DEVICES, "cpu"]
"""Values of `--device`."""


def device_named(name: str) -> Device:
    """The device with this short name or driver name.

    Raises:
        ConfigError: the name is unknown.
    """
    for device in _TABLE:
        if name.lower() == device.name or name == device.driver_name:
            return device
    same_chip = [known_name for known_name in NAMES if name and known_name.startswith(name.lower())]
    hint = f"; did you mean {' or '.join(same_chip)}?" if same_chip else did_you_mean(name, NAMES)
    right = f"the planner knows {', '.join(NAMES)}{hint}"
    raise option_error("--device", name, right)
