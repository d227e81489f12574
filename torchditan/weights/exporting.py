# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writes weights to one safetensors file, with their configuration as its metadata. opening.py reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchditan.config.errors import ConfigError
from torchditan.models.saved_weights import TRAINING_ONLY
from torchditan.run.directory import to_json
from torchditan.run.training_progress import Progress
from torchditan.weights.opening import FORMAT, VERSION, Kind, Weights
from torchditan.weights.safetensors_files import TensorToWrite, write_weights


def save_weights(out: Path, weights: Weights, *, dtype: torch.dtype) -> None:
    """Write weights with their description to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_model_file(out, weights, dtype=dtype)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None


def export_model(
    path: Path, weights: Mapping[str, Tensor], *, config: dict[str, dict[str, Any]], progress: Progress, kind: Kind
) -> None:
    """Write the weights of a model in training, which may be sharded, to one file in float32. All ranks call it.

    Args:
        path: the file, in the checkpoint folder of the run; an existing one is replaced.
        weights: by name.
        config: the resolved configuration of the run.
        progress: how far the run is.
        kind: whether the weights are averaged.

    Raises:
        OSError: on rank 0, the file cannot be written.
    """
    left = {name: tensor for name, tensor in sorted(weights.items()) if not name.startswith(TRAINING_ONLY)}
    shapes = {name: tuple(tensor.shape) for name, tensor in left.items()}

    def read(name: str) -> Tensor:
        tensor = left.pop(name)
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            own = Weights(path, shapes, read, config, progress.step, progress.images_seen, kind)
            write_model_file(path, own.of_its_run(), dtype=torch.float32)
    finally:
        for name in list(left):  # all ranks gather every weight, also if rank 0 could not write it
            read(name)


def write_model_file(path: Path, weights: Weights, *, dtype: torch.dtype) -> None:
    """`save_weights` that raises the OSError itself."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(weights.config),
        "step": str(weights.step),
        "images_seen": str(weights.images_seen),
        "weights": str(weights.kind),
    }
    if weights.git_commit is not None:
        metadata["git_commit"] = weights.git_commit
    if weights.class_names:
        metadata["class_names"] = to_json(weights.class_names).decode()
    entries = [
        TensorToWrite(name, shape, dtype, partial(weights.tensor, name)) for name, shape in weights.shapes.items()
    ]
    write_weights(path, entries, metadata)
