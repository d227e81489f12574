# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Maps a record of metrics.jsonl to the course project's TensorBoard tags, listed in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def legacy_scalars(
    record: Mapping[str, Any],
    *,
    max_loss: float | None,
    flops_per_image: float,
    tokens_per_image: int,
    world_size: int,
    memory: Mapping[str, float],
) -> dict[str, float]:
    """Values of the tags that were measured; a tag without a value is left out, never 0.

    Args:
        record: with the keys of metrics.jsonl.
        max_loss: the largest loss of any rank.
        flops_per_image: model FLOPs of forward and backward; adaLN weights count once per image.
        tokens_per_image: patches of one image.
        world_size: number of ranks; `wps` is per device.
        memory: `PeakMemory.allocator`.
    """
    step_time, images = record["step_time_s"], record["images_per_second"]
    per_device = None if images is None else images * tokens_per_image / world_size
    waiting = record["data_loading_percent"]
    values = {
        "loss_metrics/global_avg_loss": record["loss"],
        "loss_metrics/global_max_loss": max_loss,
        "wps": per_device,
        "im/s": images,
        "mfu(%)": record["mfu"],
        "it/s": None if step_time is None else 1 / step_time,
        "num_flop_per_token": flops_per_image / tokens_per_image,
        "time_metrics/end_to_end(s)": step_time,
        "time_metrics/data_loading(s)": None if step_time is None or waiting is None else step_time * waiting / 100,
        "time_metrics/data_loading(%)": waiting,
        **{f"memory/{name}": value for name, value in memory.items()},
    }
    return {tag: value for tag, value in values.items() if value is not None}
