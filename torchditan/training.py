# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Training in one call from Python."""

from __future__ import annotations

import json
import os
from typing import Any

from torchditan.config.loader import parse_config
from torchditan.config.schema import options
from torchditan.data_stream.datasets import ImageDataset
from torchditan.errors import ConfigError
from torchditan.extras.weights.trained_model import TrainedModel, load
from torchditan.job.prepare import prepare
from torchditan.trainer import Trainer


def train(
    config_file: str,
    *,
    dataset: ImageDataset | None = None,
    validation_dataset: ImageDataset | None = None,
    **given: Any,
) -> TrainedModel:
    """Train a configuration, as `torchditan train NAME` does, and open the finished run.

    A run that exists is continued. Under torchrun, every rank calls it.

    Args:
        config_file: a name in train_configs/, a path, or `module:function`.
        dataset: training images, instead of those of `[dataset]`.
        validation_dataset: held-out images for it, if `validation.freq` or `evaluation.freq` is set.
        given: options, as `steps=600` or `**{"training.steps": 600}`. A name without section is that of `[training]`,
            or the only one of this name.

    Returns:
        The run, to draw samples from.

    Raises:
        ConfigError: settings that cannot work together or on this machine.
        Interrupted: a signal stopped the run, and its state is saved.
    """
    texts = {name: _text(value) for name, value in given.items()}
    flags = [f"--{_full_name(name)}={text}" for name, text in texts.items()]
    job = prepare(parse_config([f"--job.config_file={config_file}", *flags]), dataset, validation_dataset)
    if job is None:
        raise ConfigError("cache.only trains nothing; leave it out")
    Trainer(job).train()
    return load(job.run_directory.path)


def _text(value: Any) -> str:
    """A value as a flag states it."""
    if value is None:
        return "none"
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else json.dumps(value)


def _full_name(name: str) -> str:
    found = [option for option in options() if option.split(".")[1] == name]
    for full_name in (name, f"training.{name}"):
        if full_name in options():
            return full_name
    if len(found) > 1:
        raise ConfigError(f"{name} is {' or '.join(found)}; give one of these names")
    return found[0] if found else name  # an unknown name is refused with the others
