# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a job will train on, without training: `torchditan train NAME --preview`."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from torchditan.config.options import Config
from torchditan.config.rules import validate_parts
from torchditan.data_stream.datasets import CorruptImageError, SequentialDataset
from torchditan.distributed.process_group import Rank
from torchditan.job.description import describe_data, describe_memory
from torchditan.job.prepare import open_datasets, open_space
from torchditan.registry import FAMILIES
from torchditan.run.directory import run_path
from torchditan.sampling.grid_picture import save_grid, stills

NUM_SAMPLES = 16
_SIDE = 128
"""Pixels of a sample in the picture."""


def preview(config: Config) -> list[str]:
    """Save a grid of 16 samples with their captions or classes in the folder of the run.

    Returns:
        Lines about the data, the memory by the plan, and the path of the picture.

    Raises:
        ConfigError: as in training, as far as data and options are concerned.
    """
    validate_parts(config)
    dataset, held_out = open_datasets(config)
    rank = Rank.from_environment()
    channels, *_, height, width = dataset.sample_shape
    found = {"dataset.image_size": [height, width], "dataset.num_classes": len(dataset.class_names)}
    if config.model.name not in FAMILIES and not config.autoencoder.online:
        found["model.input_channels"] = channels
    known = config.fill_in(found)
    lines = describe_data(dataset, held_out)
    lines += describe_memory(known, device=rank.device, num_devices=rank.world_size)
    space = None if dataset.index is None else open_space(config, dataset, device=rank.device)
    samples, labels = [], []
    for item in islice(_readable(dataset, skips=config.dataset.corrupt_images == "skip"), NUM_SAMPLES):
        sample = item["sample"]
        if space is not None:
            sample = space.to_pixels(sample[None])[0].cpu()
        samples.append(_fit(stills(sample[None, None])[0, 0]))
        names = dataset.class_names
        labels.append(item["caption"] if "caption" in item else names[int(item["class_label"])] if names else "")
    path = run_path(config) / "preview.png"
    title = f"{config.metrics.experiment_name}: samples of {dataset.name}"
    save_grid(path, torch.stack(samples)[:, None], None, labels, title=title, scale=1, heading="as trained on")
    return [*lines, f"{len(samples)} samples: {path}; nothing was trained"]


def _readable(dataset: Any, *, skips: bool) -> Any:
    """Items spread over the dataset, in random order."""
    if isinstance(dataset, SequentialDataset):
        for item in dataset.iterate(rank=0, world_size=1):
            if isinstance(item, Exception):  # an unreadable image: a worker could not raise it
                raise item
            yield item
    for index in np.random.default_rng(0).permutation(len(dataset)).tolist():
        try:
            yield dataset[index]
        except CorruptImageError:
            if not skips:
                raise


def _fit(sample: torch.Tensor) -> torch.Tensor:
    """(C, H, W) pixels -> (3, 128, 128), on grey."""
    channels, height, width = sample.shape
    scale = _SIDE / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    mode = {"mode": "nearest"} if scale > 1 else {"mode": "area"}
    image = F.interpolate(sample[None].float(), size=size, **mode)[0]  # type: ignore[arg-type]
    canvas = torch.full((3, _SIDE, _SIDE), 0.7)
    top, left = (_SIDE - size[0]) // 2, (_SIDE - size[1]) // 2
    canvas[:, top : top + size[0], left : left + size[1]] = image[:3] if channels >= 3 else image[:1]
    return canvas
