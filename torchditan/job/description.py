# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Describes the data of a job and the memory that it needs, for the first lines of a run and for `--preview`."""

from __future__ import annotations

from typing import Any

import torch

from torchditan.config.options import Config
from torchditan.data_stream.datasets import SequentialDataset
from torchditan.errors import ConfigError, counted, printable, some
from torchditan.registry import job_part

_MOST_CLASSES = 10


def describe_data(dataset: Any, held_out: Any, *, encoded: tuple[int, ...] | None = None) -> list[str]:
    """Lines about the images, their classes or captions, and how they were read.

    Args:
        dataset: an ImageDataset, a SequentialDataset, or captioned images.
        held_out: the held-out images, if the job uses them.
        encoded: shape of the latents, if training encodes the images.
    """
    images = "streamed images" if isinstance(dataset, SequentialDataset) else counted(len(dataset), "image")
    shape = "x".join(map(str, dataset.sample_shape))
    if encoded is not None:
        shape += f", encoded to {'x'.join(map(str, encoded))}"
    lines = [f"on {dataset.name}: {images} of {shape}"]
    if dataset.class_names:
        classes = "1 class" if len(dataset.class_names) == 1 else f"{len(dataset.class_names):,} classes"
        lines.append(f"  {classes}: {some(dataset.class_names, most=_MOST_CLASSES)}")
    lines += [f"  {line}" for line in dataset.reading]
    is_counted = held_out is not None and not isinstance(held_out, SequentialDataset)
    if is_counted and not any(line.startswith("held out") for line in dataset.reading):
        lines.append(f"  held out: {counted(len(held_out), 'image')}")
    return [printable(line) for line in lines]


def describe_memory(config: Config, *, device: torch.device, num_devices: int) -> list[str]:
    """A line with the memory that the plan expects; none for what the planner does not know."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        plan = job_part("memory")(config, device=name, num_devices=num_devices)
    except ConfigError:
        return []
    return [f"memory by the plan: {plan.peak_memory_gib:.3g} GiB of tensors at the peak of a step"]
