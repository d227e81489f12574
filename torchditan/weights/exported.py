# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Exported weights: a safetensors file written from a checkpoint, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchditan.checkpoint.files import (
    CheckpointReader,
    DamagedCheckpointError,
    list_checkpoints,
    step_of,
)
from torchditan.checkpoint.loading import load_safely, read_progress, read_state
from torchditan.checkpoint.trained_weights import cannot_be_read, find_checkpoint
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import from_dict, override, to_dict
from torchditan.config.options import Config
from torchditan.models.saved_weights import TRAINING_ONLY, checkpoint_keys
from torchditan.registry import FORMATS
from torchditan.run.directory import check_folders, to_json
from torchditan.run.reading import read_config
from torchditan.run.training_progress import Progress
from torchditan.weights.safetensors_files import TensorToWrite, is_of_diffusers, is_pickle, open_file, write_weights
from torchditan.weights.shared import is_shared, open_shared

FORMAT = "torchditan"


VERSION = "1"
"""Version of the metadata; raised when an older reader would misunderstand it."""


_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


Kind = Literal["ema", "raw"]


@dataclass(frozen=True)
class StoredWeights:
    """Description of the weights in a file or a checkpoint."""

    path: Path
    """The file, or the folder of the checkpoint."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes by the model's parameter names."""
    config: dict[str, dict[str, Any]] | None = None
    """The resolved configuration of the run. This and all fields below are None for files of other projects."""
    step: int | None = None
    images_seen: int | None = None
    weights: Kind | None = None
    git_commit: str | None = None
    class_names: list[str] = field(default_factory=list)
    """By label; empty if they are not known."""


def export_weights(
    source: Path, out: Path, *, step: int | None = None, weights: Kind | None = None, dtype: torch.dtype = torch.float32
) -> StoredWeights:
    """Write the weights of a run, or of one of its checkpoints with any sharding, to one file.

    Args:
        source: run directory, or the folder of a checkpoint.
        out: the file; an existing one is replaced.
        step: of a run's checkpoint; None takes the newest.
        weights: averaged or raw; None takes the averaged ones if the run kept them.
        dtype: float32 as in the checkpoint, or bfloat16.

    Raises:
        ConfigError: these weights do not exist or are damaged, or the file cannot be written.
    """
    stored, read = open_weights(source, step=step, weights=weights)
    write_stored(out, stored, read, dtype=dtype)
    return stored


def write_stored(out: Path, stored: StoredWeights, read: Callable[[str], Tensor], *, dtype: torch.dtype) -> None:
    """Write the weights that `read` returns by name, with their description, to one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    entries = [TensorToWrite(name, shape, dtype, partial(read, name)) for name, shape in stored.shapes.items()]
    try:
        write_weights(out, entries, _to_metadata(stored))
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
            content = _run_content(path, config)
            commit, class_names = content.get("git_commit"), names_in(content.get("class_names"))
            stored = StoredWeights(path, shapes, config, progress.step, progress.images_seen, kind, commit, class_names)
            entries = [TensorToWrite(name, shape, torch.float32, partial(read, name)) for name, shape in shapes.items()]
            write_weights(path, entries, _to_metadata(stored))
    finally:
        for name in list(left):  # all ranks gather every weight, also if rank 0 could not write it
            read(name)


def open_weights(
    source: Path, *, step: int | None = None, weights: Kind | None = None
) -> tuple[StoredWeights, Callable[[str], Tensor]]:
    """Describe the weights of a full training run without reading them, and return a function that reads one by name.

    Args:
        source: run directory, or the folder of a checkpoint.
        step: of a run's checkpoint; None takes the newest.
        weights: averaged or raw; None takes the averaged ones if the run kept them.

    Raises:
        ConfigError: these weights do not exist, are damaged, or belong to a LoRA.
    """
    path = find_weights(source, step=step)
    stored = describe_weights(path, weights=weights)
    if step not in (None, stored.step):  # a file has one step
        raise option_error("--step", step, f"{source} has step {stored.step}; leave it out")
    assert stored.config is not None
    if stored.config.get("lora", {}).get("rank"):
        right = "trained a LoRA; export it with torchditan export_lora RUN OUT.safetensors"
        raise option_error("RUN", str(source), right)
    if path.is_file():
        return stored, partial(read_from_file, path)
    reader = CheckpointReader(path)
    keys = checkpoint_keys(reader.read_metadata().state_dict_metadata, ema=stored.weights == "ema")

    def read(name: str) -> Tensor:
        try:
            return read_tensor(reader, keys[name])
        except DamagedCheckpointError as error:
            raise cannot_be_read(path, error) from None

    return stored, read


def read_from_file(path: Path, name: str) -> Tensor:
    # Reopened for each tensor: pages of a memory map that were read count as memory of the process.
    with open_file(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def read_weights(stored: StoredWeights) -> dict[str, Tensor]:
    """All weights by name, on the CPU: those of a LoRA, which are small.

    Raises:
        ConfigError: they are damaged.
    """
    if stored.path.is_file():
        return {name: read_from_file(stored.path, name) for name in stored.shapes}
    prefix = f"{key_of(stored.weights)}."
    try:
        state = read_state(stored.path, prefix)
    except DamagedCheckpointError as error:
        raise cannot_be_read(stored.path, error) from None
    return {name.removeprefix(prefix): value for name, value in state.items()}


def read_tensor(reader: CheckpointReader, key: str) -> Tensor:
    """A whole tensor of a checkpoint, on the CPU.

    Raises:
        DamagedCheckpointError: the entry is not a tensor, or is incomplete.
    """
    entry = reader.read_metadata().state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), key
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_safely({key: tensor}, reader, no_dist=True)
    return tensor


def read_weights_metadata(path: Path) -> StoredWeights:
    """Read the metadata of an exported file, and no tensor.

    Raises:
        ConfigError: it cannot be read, is not a safetensors file, is truncated, or `export_weights` did not write it.
    """
    formats = f"add --format {', '.join(FORMATS)} (docs/checkpoints.md)"
    if path.is_file() and is_pickle(path):
        raise ConfigError(f"{path} is a PyTorch file of another project; {formats}")
    if is_of_diffusers(path):
        raise ConfigError(f"{path} is a folder of diffusers; add --format diffusers")
    stored = describe_file(path)
    if stored.config is None:
        raise ConfigError(
            f"{path} has weights without a configuration; must be a file that torchditan export wrote. "
            f"For those of another project, {formats}. A new run can start from other weights with "
            "checkpoint.initial_load_path"
        )
    return stored


def checked_config(stored: StoredWeights) -> Config:
    """The configuration in an exported file, which may be untrusted, after the checks of a user's configuration.

    Raises:
        ConfigError: it is not valid here, is incomplete, or belongs to a LoRA.
    """
    assert stored.config is not None
    try:
        config = override(from_dict(stored.config), [], sections=())
        check_folders(to_dict(config))
    except ConfigError as error:
        raise ConfigError(f"{stored.path} has a configuration that is not valid here: {error}") from None
    sizes = (config.dataset.image_size, config.model.sample_size)
    if None in (*sizes, config.dataset.num_classes, config.model.input_channels):
        raise ConfigError(f"{stored.path} has a configuration that does not set image size, classes or channels")
    if config.lora.rank:
        raise ConfigError(f"{stored.path} has the configuration of a LoRA, which cannot be opened")
    return config


def describe_file(path: Path) -> StoredWeights:
    with open_file(path) as file:
        metadata, slices = file.metadata() or {}, {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        others = [(name, part.get_dtype()) for name, part in slices.items() if part.get_dtype() not in _READABLE_DTYPES]
    if others:
        raise ConfigError(f"{path} has {others[0][0]} as {others[0][1]}; weights must be floating-point numbers")
    if metadata.get("format") != FORMAT:
        return StoredWeights(path, shapes)
    if metadata.get("version") != VERSION:
        right = f"has version {metadata.get('version')}, possibly of a newer TorchDiTan; this one reads version"
        raise ConfigError(f"{path} {right} {VERSION}")
    config, weights = _parse_config(metadata.get("config")), metadata.get("weights")
    step, images_seen = (_parse_count(metadata.get(key)) for key in ("step", "images_seen"))
    if config is None or weights not in ("ema", "raw") or step is None or step >= 10**8 or images_seen is None:
        raise ConfigError(f"{path} has invalid metadata; export it again")
    class_names = names_in(_parse_json(metadata.get("class_names")))
    commit = metadata.get("git_commit")
    return StoredWeights(path, shapes, config, step, images_seen, cast(Kind, weights), commit, class_names)


def describe_weights(path: Path, *, weights: Kind | None) -> StoredWeights:
    """Describe the weights of a verified checkpoint, or the final ones of a run, as `find_weights` found them.

    Args:
        path: folder of the checkpoint, or the file of final weights.
        weights: averaged or raw; None takes the averaged ones if the run kept them.

    Raises:
        ConfigError: these weights do not exist, or cannot be read.
    """
    if path.is_dir():
        return _describe_checkpoint(path, weights=weights)
    stored = read_weights_metadata(path)
    if weights not in (None, stored.weights):
        raise _not_kept(weights)
    return stored


def _not_kept(weights: Kind | None) -> ConfigError:
    other = "average; must be raw" if weights == "ema" else "raw weights; must be ema"
    return option_error("--weights", weights, f"this run kept no {other}")


def _describe_checkpoint(checkpoint: Path, *, weights: Kind | None) -> StoredWeights:
    try:
        reader = CheckpointReader(checkpoint)
        entries, progress = reader.read_metadata().state_dict_metadata, read_progress(checkpoint)
        config = _parse_config((checkpoint / "config.json").read_bytes())
    except (DamagedCheckpointError, OSError) as error:
        raise ConfigError(f"{checkpoint} cannot be read: {error}") from None
    if config is None:
        raise ConfigError(f"{checkpoint / 'config.json'} is not a configuration of a run")
    tensors = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    shapes: dict[Kind, dict[str, tuple[int, ...]]] = {
        kind: {name: tensors[key] for name, key in checkpoint_keys(tensors, ema=kind == "ema").items()}
        for kind in ("ema", "raw")
    }
    if weights is not None and not shapes[weights]:
        raise _not_kept(weights)
    weights = weights or ("ema" if shapes["ema"] else "raw")
    content = _run_content(checkpoint, config)
    return StoredWeights(
        checkpoint,
        shapes[weights],
        config,
        progress.step,
        progress.images_seen,
        weights,
        content.get("git_commit"),
        names_in(content.get("class_names")),
    )


def _run_content(checkpoint: Path, config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The run's config.json, if the checkpoint or file of final weights is still in its run directory."""
    run = run_of_weights(checkpoint, config)
    return {} if run is None else read_config(run)


def run_of_weights(checkpoint: Path, config: dict[str, dict[str, Any]]) -> Path | None:
    """The run directory that still contains this checkpoint or file of final weights; None if there is none."""
    depth = len(Path(config["checkpoint"]["folder"]).parts)
    try:
        run = checkpoint.resolve().parents[depth]
        read_config(run)
    except (ConfigError, IndexError):
        return None
    return run


def find_weights(path: Path, *, step: int | None = None) -> Path:
    """The checkpoint of a run directory, the file of a shared model, or `path` itself if it is a checkpoint folder.

    It is complete. A run without checkpoints has a file of its final weights instead.

    Raises:
        ConfigError: the path is neither, or has no usable checkpoint.
    """
    if is_shared(path):
        return open_shared(path).weights
    if path.resolve() in list_checkpoints(path.resolve().parent):
        if step is not None and step != step_of(path.resolve()):
            raise option_error("--step", step, f"{path} is a single checkpoint; leave it out, or give the run")
        try:
            CheckpointReader(path.resolve()).read_metadata()
        except DamagedCheckpointError as error:
            raise ConfigError(f"{path} is damaged: {error}") from None
        return path.resolve()
    content = read_config(path)
    try:
        folder = Path(content["config"]["checkpoint"]["folder"])
    except (KeyError, TypeError):
        raise ConfigError(f"{path / 'config.json'} does not belong to a run") from None
    return find_checkpoint(path / folder, step)


def key_of(weights: Kind | None) -> str:
    """Prefix of the weights in a checkpoint."""
    return "ema" if weights == "ema" else "model"


def _to_metadata(stored: StoredWeights) -> dict[str, str]:
    texts = {
        "format": FORMAT,
        "version": VERSION,
        "config": json.dumps(stored.config),
        "step": str(stored.step),
        "images_seen": str(stored.images_seen),
        "weights": str(stored.weights),
    }
    further = {
        "git_commit": stored.git_commit,
        "class_names": to_json(stored.class_names).decode() if stored.class_names else None,
    }
    return texts | {name: str(value) for name, value in further.items() if value is not None}


def _parse_config(text: str | bytes | None) -> dict[str, dict[str, Any]] | None:
    config = _parse_json(text)
    is_config = isinstance(config, dict) and all(isinstance(section, dict) for section in config.values())
    return config if is_config else None


def _parse_json(text: str | bytes | None) -> Any:
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError):
        return None


def names_in(value: Any) -> list[str]:
    """The class names that a file contains; [] if it contains none."""
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else []


def _parse_count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None
