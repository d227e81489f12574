# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`open_weights`: weights at any address. `load`, `generate`, `evaluate`, `export`, `share`, `import` and
`checkpoint.initial_load_path` call it.

Notable:
- an address is a run directory, a checkpoint in one or alone, a .safetensors file, a shared folder, `hub:owner/name`,
  the name of a shipped model, or the folder of a LoRA. formats/ reads files of other projects;
- opening reads the description only. `Weights.tensor` reads one tensor, so no more than one is in memory;
- opening writes nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchditan.checkpoint.files import list_checkpoints
from torchditan.checkpoint.loading import (
    CheckpointReader,
    DamagedCheckpointError,
    cannot_be_read,
    find_checkpoint,
    load_safely,
    read_progress,
)
from torchditan.checkpoint.safetensors_files import is_of_diffusers
from torchditan.checkpoint.weights import Kind, Weights, is_config, open_weights_file
from torchditan.config.loader import from_dict
from torchditan.errors import ConfigError, option_error
from torchditan.extras.weights.shared import check_address, find_shared, is_shared
from torchditan.models.saved_weights import checkpoint_keys
from torchditan.run.reading import read_config


def open_weights(place: str | os.PathLike[str], *, step: int | None = None, kind: Kind | None = None) -> Weights:
    """Open weights at any address, see the top of this file.

    Args:
        place: the address. A path that exists wins over the name of a shipped model.
        step: of a run's checkpoint; None takes the newest complete one.
        kind: averaged or raw; None takes the averaged ones if there are any.

    Raises:
        ConfigError: nothing is there, it is damaged, or it has no such step or kind.
    """
    path = Path(place).expanduser()
    check_address(path)
    if kind not in (None, "ema", "raw"):
        raise option_error("--weights", kind, "must be ema or raw")
    if is_shared(path):
        shared = find_shared(path)
        weights = replace(open_weights_file(shared.weights), name=shared.name, digest=shared.digest)
    elif path.is_file():
        weights = open_weights_file(path)
    elif is_of_diffusers(path):
        right = "give it as --model.path, with its --model.name; import a DiT with torchditan import"
        raise ConfigError(f"{path} is a folder that diffusers saved; {right} {path} RUN --format diffusers")
    elif path.resolve() in list_checkpoints(path.resolve().parent):
        weights = _open_checkpoint(path, kind=kind)
    elif not (path / "config.json").exists() and len(files := list(path.glob("*.safetensors"))) == 1:
        weights = open_weights_file(files[0])  # the folder of a LoRA, as diffusers and peft save it
    else:
        weights = _open_run(path, step=step, kind=kind)
    if weights.step is not None and step not in (None, weights.step):
        raise option_error("--step", step, f"{place} has step {weights.step}; leave it out")
    if weights.kind is not None and kind not in (None, weights.kind):
        raise option_error("--weights", kind, f"{place} has only the other weights; must be {weights.kind}")
    return weights


def open_model(place: str | os.PathLike[str], *, step: int | None = None, kind: Kind | None = None) -> Weights:
    """`open_weights` for those of a whole model with its configuration, which can be written elsewhere.

    Raises:
        ConfigError: they are those of a LoRA, or have no configuration; or as `open_weights`.
    """
    weights = open_weights(place, step=step, kind=kind)
    if weights.checked_config().lora.rank:
        right = "trained a LoRA; export it with torchditan export_lora RUN OUT.safetensors"
        raise option_error("RUN", str(place), right)
    return weights


def _open_run(run: Path, *, step: int | None, kind: Kind | None) -> Weights:
    """A checkpoint of a run, or the file of its final weights if it saved no checkpoints."""
    content = read_config(run)
    found = find_checkpoint(run / from_dict(content["config"]).checkpoint.folder, step)
    weights = _open_checkpoint(found, kind=kind) if found.is_dir() else open_weights_file(found)
    return weights.of_run(run, content)


def _open_checkpoint(path: Path, *, kind: Kind | None) -> Weights:
    try:
        reader = CheckpointReader(path.resolve())
        entries, progress = reader.read_metadata().state_dict_metadata, read_progress(path.resolve())
    except DamagedCheckpointError as error:
        raise cannot_be_read(path, error) from None
    tensors = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    if kind is None or not checkpoint_keys(tensors, ema=kind == "ema"):
        kind = "ema" if checkpoint_keys(tensors, ema=True) else "raw"
    keys = checkpoint_keys(tensors, ema=kind == "ema")
    weights = Weights(
        path,
        {name: tensors[key] for name, key in keys.items()},
        partial(_read_from_checkpoint, path, reader, keys),
        step=progress.step,
        images_seen=progress.images_seen,
        kind=kind,
        name=path.name,
    )
    weights = weights.of_its_run()
    if weights.run is not None:
        return weights
    try:  # copied without its run
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not is_config(config):
        raise ConfigError(f"{path / 'config.json'} is not a configuration of a run")
    return replace(weights, config=config)


def _read_from_checkpoint(path: Path, reader: CheckpointReader, keys: dict[str, str], name: str) -> Tensor:
    entry = reader.read_metadata().state_dict_metadata[keys[name]]
    assert isinstance(entry, TensorStorageMetadata), name
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        load_safely({keys[name]: tensor}, reader, no_dist=True)
    except DamagedCheckpointError as error:
        raise cannot_be_read(path, error) from None
    return tensor
