# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Creates a run directory from weights. It can be sampled and evaluated, not continued.

A file may be untrusted. Before anything is written, its configuration passes the same checks as a user's, and its
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
from torchditan.weights.opening import Weights, open_model
from torchditan.weights.trained_model import stored_spec


def import_weights(path: Path, run: Path, *, flags: Sequence[str] = (), overwrite: bool = False) -> Weights:
    """Create a run directory from weights: it can be sampled and evaluated, not continued.

    Args:
        path: an address of `open_weights`.
        run: the directory to create.
        flags: `--dataset.root_dir value` and `--autoencoder.path value`, their locations on this machine.
        overwrite: replace `run` if it was imported, too.

    Raises:
        ConfigError: they have no configuration or do not match it, or `run` exists or cannot be written.
    """
    weights = open_model(path)
    refuse_existing(run, overwrite=overwrite)
    config = _check_config(weights, flags)
    refuse_sources_inside(run, weights.path, config)
    create_run(run, weights, config)
    return weights


def create_run(
    run: Path,
    weights: Weights,
    config: Config,
    *,
    origin: Mapping[str, Any] = {},
    files: Mapping[str, str] = {},
) -> None:
    """Create a run directory with these weights, completely or not at all.

    Args:
        run: the directory; `refuse_existing` allows to replace it.
        weights: with their step and kind, in the dtype to store.
        config: the run's configuration.
        origin: what config.json says about the import, in addition to file, step and kind of weights.
        files: name -> text of further files in the directory.

    Raises:
        ConfigError: the weights do not match the model of the configuration, or `run` cannot be written.
    """
    with torch.device("meta"):
        model = stored_spec(config).build()
    weights.check(model)
    with new_folder(run, replace=lambda run: True) as partial:
        _write_run(partial, weights, config, origin)
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


def _check_config(weights: Weights, flags: Sequence[str]) -> Config:
    """Apply the flags to the configuration in a file, and check it like a user's."""
    config = override(weights.checked_config(), list(flags), sections=("dataset", "autoencoder"))
    if config.autoencoder.name is None and config.autoencoder.path is not None:
        right = "these weights were trained on pixels, so there is nothing to decode; leave it out"
        raise option_error("autoencoder.path", config.autoencoder.path, right)
    return config.replace({"ema.enable": weights.kind == "ema"})  # tells the scripts which weights a run has


def _write_run(run: Path, weights: Weights, config: Config, origin: Mapping[str, Any]) -> None:
    assert weights.step is not None and weights.images_seen is not None
    source = f"{weights.path.name} (to start a new run from it, use --checkpoint.initial_load_path)"
    identity = {**trajectory(config), "imported_from": source}  # train.py never creates this key
    _write_checkpoint(run / config.checkpoint.folder, weights, config, identity)
    imported = {"file": weights.path.name, "step": weights.step, "weights": weights.kind}
    content = {
        "run_id": uuid4().hex[:8],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": to_dict(config),
        "trajectory": identity,
        "versions": provenance.versions("torch", "torchditan"),
        "git_commit": weights.git_commit,
        "imported": {**imported, **origin},
        "command": sys.argv,
        "class_names": weights.class_names,
    }
    write_file(run / "config.json", to_json(content, indent=2))


def _write_checkpoint(folder: Path, weights: Weights, config: Config, identity: dict[str, Any]) -> None:
    """Write a checkpoint with weights only, in their dtype."""
    assert weights.step is not None and weights.images_seen is not None
    target = folder / f"step-{weights.step:08d}"
    partial = target.with_suffix(".partial")
    partial.mkdir(parents=True)
    with warnings.catch_warnings():
        # Saving in a single process is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        tensors = {name: weights.tensor(name) for name in weights.shapes}  # of a file: memory-mapped until written
        save_tensors({"ema" if weights.kind == "ema" else "model": tensors}, partial, no_dist=True)
    numbers = Progress(step=weights.step, images_seen=weights.images_seen).state_dict()
    publish_checkpoint(partial, target, numbers=numbers, config=to_dict(config), trajectory=identity)
