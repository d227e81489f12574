# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Creates a run directory from an exported file of weights. It can be sampled and evaluated, not continued.

The file may be untrusted. Before anything is written, its configuration passes the same checks as a user's, and its
tensors must match the model of this configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchditan.checkpoint.files import ChecksummingWriter, read_back
from torchditan.checkpoint.manager import publish_checkpoint
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import from_dict, override, to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import trajectory
from torchditan.run import provenance
from torchditan.run.atomic_files import sync_folder, temporary_path, write_file
from torchditan.run.directory import check_folders
from torchditan.run.reading import read_config
from torchditan.run.training_progress import Progress
from torchditan.weights.exported import StoredWeights, key_of, read_weights_metadata
from torchditan.weights.initial import refuse_other_model
from torchditan.weights.safetensors_files import open_file
from torchditan.weights.trained_model import stored_spec


def import_weights(path: Path, run: Path, *, flags: Sequence[str] = (), overwrite: bool = False) -> StoredWeights:
    """Create a run directory from an exported file: it can be sampled and evaluated, not continued.

    Args:
        path: the file.
        run: the directory to create.
        flags: `--dataset.root_dir value` and `--autoencoder.path value`, their locations on this machine.
        overwrite: replace `run` if it was imported, too.

    Raises:
        ConfigError: `path` is not an exported file or does not match its own configuration, or `run` exists or cannot
            be written.
    """
    stored = read_weights_metadata(path)
    refuse_existing(run, overwrite=overwrite)
    config = _check_config(stored, flags)
    refuse_other_model(_meta_model(config), stored, [])
    create_run(run, stored, config, record={"file": path.name, "step": stored.step, "weights": stored.weights})
    return stored


def create_run(run: Path, stored: StoredWeights, config: Config, *, record: dict[str, Any]) -> None:
    """Create a run directory with a checkpoint of these weights only, or replace one that `refuse_existing` accepted.

    Args:
        run: the directory.
        stored: a file with the weights.
        config: the complete configuration of their model.
        record: stored as `imported` in the run's config.json.

    Raises:
        ConfigError: the directory cannot be written.
    """
    partial = temporary_path(run)
    try:
        partial.mkdir(parents=True)
        _write_run(partial, stored, config, record)
        if run.exists():
            shutil.rmtree(run)
        os.replace(partial, run)
        sync_folder(run.parent)
    except OSError as error:
        raise ConfigError(f"{run} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(run: Path, *, overwrite: bool) -> None:
    """Refuse to replace a run; an imported one may be replaced with `overwrite`, a trained one never."""
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not run.is_dir() or "imported" not in read_config(run):
        raise ConfigError(f"{run} exists and was not imported; choose another name")
    if not overwrite:
        raise ConfigError(f"{run} exists; choose another name, or replace it with --overwrite")


def _check_config(stored: StoredWeights, flags: Sequence[str]) -> Config:
    """Apply the flags to the configuration in a file, and check it like a user's."""
    assert stored.config is not None
    try:
        config = override(from_dict(stored.config), [], sections=())
        check_folders(to_dict(config))
    except ConfigError as error:
        raise ConfigError(f"{stored.path} has a configuration that is not valid here: {error}") from None
    if None in (config.dataset.image_size, config.dataset.num_classes, config.model.input_channels):
        raise ConfigError(f"{stored.path} has a configuration that does not set image size, classes or channels")
    config = override(config, list(flags), sections=("dataset", "autoencoder"))
    if config.autoencoder.name is None and config.autoencoder.path is not None:
        right = "these weights were trained on pixels, so there is nothing to decode; leave it out"
        raise option_error("autoencoder.path", config.autoencoder.path, right)
    return config.replace({"ema.enable": stored.weights == "ema"})  # tells the scripts which weights a run has


def _meta_model(config: Config) -> nn.Module:
    with torch.device("meta"):
        return stored_spec(config).build()


def _write_run(run: Path, stored: StoredWeights, config: Config, record: dict[str, Any]) -> None:
    assert stored.step is not None and stored.images_seen is not None
    origin = f"{stored.path.name} (to start a new run from it, use --checkpoint.initial_load_path)"
    identity = {**trajectory(config), "imported_from": origin}  # train.py never creates this key
    _write_checkpoint(run / config.checkpoint.folder, stored, config, identity)
    content = {
        "run_id": uuid4().hex[:8],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": to_dict(config),
        "trajectory": identity,
        "versions": provenance.versions("torch", "torchditan"),
        "git_commit": stored.git_commit,
        "imported": record,
        "command": sys.argv,
    }
    write_file(run / "config.json", json.dumps(content, indent=2, ensure_ascii=False).encode())


def _write_checkpoint(folder: Path, stored: StoredWeights, config: Config, identity: dict[str, Any]) -> None:
    """Write a checkpoint with weights only, in the dtype of the file."""
    assert stored.step is not None and stored.images_seen is not None
    target = folder / f"step-{stored.step:08d}"
    partial = target.with_suffix(".partial")
    partial.mkdir(parents=True)
    writer = ChecksummingWriter(partial)
    try:
        with open_file(stored.path) as file, warnings.catch_warnings():
            # Saving in a single process is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            weights = {name: file.get_tensor(name) for name in stored.shapes}  # memory-mapped until written
            dcp.save({key_of(stored.weights): weights}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise writer.error or RuntimeError(f"the checkpoint cannot be written: {error}") from None
    read_back(partial, writer.checksums)
    numbers = Progress(step=stored.step, images_seen=stored.images_seen).state_dict()
    publish_checkpoint(partial, target, writer.checksums, numbers=numbers, config=to_dict(config), trajectory=identity)
