# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Creates a run directory from an exported file of weights. It can be sampled and evaluated, not continued.

The file may be untrusted. Before anything is written, its configuration passes the same checks as a user's, and its
tensors must match the model of this configuration. imported_format.py creates such a run from files of other projects.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from torchditan.checkpoint.files import save_tensors
from torchditan.checkpoint.manager import publish_checkpoint
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import override, to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import trajectory
from torchditan.run import provenance
from torchditan.run.atomic_files import new_folder, write_file
from torchditan.run.directory import to_json
from torchditan.run.reading import read_config
from torchditan.run.training_progress import Progress
from torchditan.weights.exported import StoredWeights, checked_config, key_of, read_weights_metadata
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
    refuse_sources_inside(run, path, config)
    with open_file(path) as file:
        tensors = {name: file.get_tensor(name) for name in stored.shapes}  # memory-mapped until written
        create_run(run, stored, config, tensors)
    return stored


def create_run(
    run: Path,
    stored: StoredWeights,
    config: Config,
    tensors: Mapping[str, Tensor],
    *,
    origin: Mapping[str, Any] = {},
    files: Mapping[str, str] = {},
) -> None:
    """Create a run directory with these weights, completely or not at all.

    Args:
        run: the directory; `refuse_existing` allows to replace it.
        stored: description of the weights, with their step and kind.
        config: the run's configuration.
        tensors: the weights, in the dtype to store.
        origin: what config.json says about the import, in addition to file, step and kind of weights.
        files: name -> text of further files in the directory.

    Raises:
        ConfigError: the weights do not match the model of the configuration, or `run` cannot be written.
    """
    if not config.lora.rank:  # a LoRA is stored without the model that it changes
        with torch.device("meta"):
            model = stored_spec(config).build()
        refuse_other_model(model, stored, [])
    with new_folder(run, replace=True) as partial:
        _write_run(partial, stored, config, tensors, origin)
        for name, text in files.items():
            write_file(partial / name, text.encode())


def refuse_sources_inside(run: Path, path: Path, config: Config) -> None:
    """Refuse to replace a run that contains the weights to import, or the autoencoder."""
    for source in (path, config.autoencoder.path):
        if source is not None and Path(source).resolve().is_relative_to(run.resolve()):
            raise ConfigError(f"{source} is inside {run}, which the import would replace; choose another name")


def refuse_existing(run: Path, *, overwrite: bool) -> None:
    """Refuse to replace a run; an imported one may be replaced with `overwrite`, a trained one never."""
    if run.is_symlink():
        raise ConfigError(f"{run} is a symbolic link; choose another name")
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not run.is_dir() or "imported" not in read_config(run):
        raise ConfigError(f"{run} exists and was not imported; choose another name")
    if not overwrite:
        raise ConfigError(f"{run} exists; choose another name, or replace it with --overwrite")


def _check_config(stored: StoredWeights, flags: Sequence[str]) -> Config:
    """Apply the flags to the configuration in a file, and check it like a user's."""
    config = override(checked_config(stored), list(flags), sections=("dataset", "autoencoder"))
    if config.autoencoder.name is None and config.autoencoder.path is not None:
        right = "these weights were trained on pixels, so there is nothing to decode; leave it out"
        raise option_error("autoencoder.path", config.autoencoder.path, right)
    return config.replace({"ema.enable": stored.weights == "ema"})  # tells the scripts which weights a run has


def _write_run(
    run: Path, stored: StoredWeights, config: Config, tensors: Mapping[str, Tensor], origin: Mapping[str, Any]
) -> None:
    assert stored.step is not None and stored.images_seen is not None
    source = f"{stored.path.name} (to start a new run from it, use --checkpoint.initial_load_path)"
    identity = {**trajectory(config), "imported_from": source}  # train.py never creates this key
    _write_checkpoint(run / config.checkpoint.folder, stored, config, identity, tensors)
    imported = {"file": stored.path.name, "step": stored.step, "weights": stored.weights}
    content = {
        "run_id": uuid4().hex[:8],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": to_dict(config),
        "trajectory": identity,
        "versions": provenance.versions("torch", "torchditan"),
        "git_commit": stored.git_commit,
        "imported": {**imported, **origin},
        "command": sys.argv,
        "class_names": stored.class_names,
    }
    write_file(run / "config.json", to_json(content, indent=2))


def _write_checkpoint(
    folder: Path, stored: StoredWeights, config: Config, identity: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint with weights only, in their dtype."""
    assert stored.step is not None and stored.images_seen is not None
    target = folder / f"step-{stored.step:08d}"
    partial = target.with_suffix(".partial")
    partial.mkdir(parents=True)
    with warnings.catch_warnings():
        # Saving in a single process is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_tensors({key_of(stored.weights): dict(tensors)}, partial, no_dist=True)
    numbers = Progress(step=stored.step, images_seen=stored.images_seen).state_dict()
    publish_checkpoint(partial, target, numbers=numbers, config=to_dict(config), trajectory=identity)
