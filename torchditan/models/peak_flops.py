# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The peak FLOP/s of GPUs, for the MFU and the planner."""

from __future__ import annotations

PEAK_TFLOPS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA H100 80GB HBM3": 989,  # the SXM part
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "AMD Instinct MI250X": 191.5,  # per GCD, which is one device
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "NVIDIA GeForce RTX 4090": 165,
}
"""Dense bf16 TFLOP/s from the data sheets, by the exact name that the driver reports."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device by its exact reported name; None if unknown."""
    peak = PEAK_TFLOPS.get(device_name)
    return None if peak is None else peak * 1e12
