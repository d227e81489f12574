# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Rows of a ledger for tests of reports, with numbers that follow from a few."""

from __future__ import annotations

import math
from typing import Any

from torchditan.extras.ablation.grid import BATCH_SIZE, CHECKPOINTING, COMPILE, FLAVOR, PARALLEL, PATCH_SIZE, PRECISION

DEVICE = "NVIDIA A100-SXM4-80GB"
Row = dict[str, Any]


def row(
    *,
    batch: int | None = 8,
    compiled: bool = False,
    checkpointing: str = "none",
    precision: str = "bfloat16",
    parallel: str = "1,1",
    patch: int = 2,
    throughput: float = 100.0,
    memory: float = 10.0,
    **others: Any,
) -> Row:
    """A completed run; MFU follows the throughput, and a step takes as long as it must."""
    devices = math.prod(map(int, parallel.split(",")))
    name = f"dit-l_bs{batch}_ps{patch}_act{checkpointing}_c{str(compiled).lower()}_d{precision}_p{parallel}"
    step = (batch or 1) * devices / throughput
    return {
        "schema_version": 1,
        "grid": "grid",
        "run_name": name,
        "repeat": 1,
        "status": "completed",
        FLAVOR: "DiT-L",
        PATCH_SIZE: patch,
        BATCH_SIZE: batch,
        PARALLEL: parallel,
        CHECKPOINTING: checkpointing,
        COMPILE: compiled,
        PRECISION: precision,
        "num_devices": devices,
        "steps": 50,
        "window": 10,
        "step_time_s_mean": step,
        "step_time_s_std": 0.01 * step,
        "images_per_second_mean": throughput,
        "images_per_second_std": 0.01 * throughput,
        "images_per_second_per_device_mean": throughput / devices,
        "tflops_per_device_mean": throughput / devices,
        "mfu_mean": throughput / devices / 10,
        "mfu_std": throughput / devices / 1000,
        "peak_memory_gib": memory,
        "peak_reserved_gib": 1.1 * memory,
        "loss_last": 1.5,
        "loss_mean": 1.6,
        "compile_s": 60.0 if compiled else 2.0,
        "git_commit": "3976addf00d",
        "torch_version": "2.13.0",
        "python_version": "3.11.7",
        "device": DEVICE,
        "device_type": "cuda",
        "host": "node07",
        "started": "2026-11-20T10:00:00+00:00",
        **others,
    }
