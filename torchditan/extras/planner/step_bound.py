# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A lower bound of the time of a step: FLOPs over the device's peak, and bytes over its memory bandwidth.

Notable:
- FLOPs are those of the MFU: matrix products without recomputation, divided evenly among the devices, and those of the
  optimizer (Muon's) on the rank with the most of them;
- every step reads and writes each byte of the model's state at least once, unless it is offloaded. That takes memory
  bandwidth, except for a state so small that it stays in a cache;
- the bound is the longer of the two. It leaves out everything else, such as activations and collectives. A real step
  takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchditan.config.options import Config
from torchditan.extras.planner.devices import Device

_FLOAT8_SPEEDUP = 2
"""Peak of products in float8 over that in bfloat16."""


@dataclass(frozen=True)
class StepBound:
    """Seconds that no step can be shorter than."""

    products: float
    """Of the matrix products at the peak."""
    state: float
    """Of the accesses to the model's state at the full bandwidth."""

    @property
    def seconds(self) -> float:
        return max(self.products, self.state)


def step_bound(
    config: Config, device: Device, *, model_flops: float, optimizer_flops: float, state_bytes: float
) -> StepBound:
    """The bound of a step, from the FLOPs of a device and the bytes of the state on it."""
    bytes_moved = 0.0 if config.training.enable_cpu_offload else 2 * state_bytes
    return StepBound(
        products=model_flops / model_peak(config, device) + optimizer_flops / _optimizer_peak(config, device),
        state=bytes_moved / (device.memory_gb_per_s * 1e9),
    )


def model_peak(config: Config, device: Device) -> float:
    """FLOP/s of the model's products. In float8 not all of them are, but the bound takes them all as such."""
    if config.training.mixed_precision_param == "float32":
        return _float32_peak(config, device)
    return device.bfloat16_flops * (_FLOAT8_SPEEDUP if config.float8.enable_float8_linear and device.has_float8 else 1)


def _optimizer_peak(config: Config, device: Device) -> float:
    return _float32_peak(config, device) if config.optimizer.ns_dtype == "float32" else device.bfloat16_flops


def _float32_peak(config: Config, device: Device) -> float:
    return device.float32_flops if config.training.float32_matmul_precision == "highest" else device.tf32_flops
