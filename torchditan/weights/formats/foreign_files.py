# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads weights that other projects saved: files of torch.save, safetensors files, and folders of diffusers.

A pickle is read with `weights_only`, which executes no code. The only further type it may contain is the
argparse.Namespace of the DiT training scripts. Tensors are memory-mapped, so the optimizer's state is never read,
except in files of the format before torch 1.6.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import tarfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchditan.config.errors import ConfigError, option_error
from torchditan.weights.safetensors_files import is_pickle, open_file, other_kind

Kind = Literal["ema", "raw"]

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of DistributedDataParallel and torch.compile."""
_TRAINING_KEYS: dict[Kind, str] = {"ema": "ema", "raw": "model"}
"""Entries of a training file, which also holds the optimizer's state and the arguments."""


@dataclass(frozen=True)
class ForeignWeights:
    """One set of weights as another project stored it."""

    path: Path
    """The file, or the folder."""
    tensors: dict[str, Tensor]
    kind: Kind
    content: Mapping[str, Any] = field(default_factory=dict)
    """config.json of a folder of diffusers, and the given path as `folder`; {} for a file."""


def read_foreign_weights(path: Path, *, weights: Kind | None = None) -> ForeignWeights:
    """Read a file of weights, a training file, or a folder that diffusers saved.

    Args:
        path: a .pt, .pth, .bin or .safetensors file; the folder of a model or of a pipeline.
        weights: which set of a training file to read; None takes the averaged one. A file with one set counts as
            averaged, because the projects publish averages.

    Raises:
        ConfigError: it does not exist, is damaged or contains code, or lacks these weights.
    """
    if path.is_dir():
        return _read_folder(path, weights)
    if not path.exists():
        raise ConfigError(f"{path} does not exist; must be a .pt, .pth, .bin or .safetensors file, or a folder")
    found = _read_file(path)
    stored = {kind: found[key] for kind, key in _TRAINING_KEYS.items() if isinstance(found.get(key), dict)}
    if not stored:
        if isinstance(found.get("state_dict"), dict):
            found = found["state_dict"]
        if weights == "raw":
            raise option_error("--weights", weights, f"{path} holds one set of weights; leave it out")
        return ForeignWeights(path, _tensors_of(path, found), "ema")
    kind = weights or "ema"
    if kind not in stored:
        other, lacks = next(iter(stored)), f"{path} has no {'EMA' if kind == 'ema' else 'raw weights'}"
        if weights is None:
            raise ConfigError(f"{lacks}; add --weights {other}")
        raise option_error("--weights", kind, f"{lacks}; must be {other}")
    return ForeignWeights(path, _tensors_of(path, stored[kind]), kind)


def _read_file(path: Path) -> dict[str, Any]:
    """The stored dictionary."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        if path.suffix == ".safetensors" or start[8:] == b"{":
            return _read_safetensors(path)
        if not is_pickle(path) and (kind := other_kind(path)) is not None:
            raise ConfigError(f"{path} {kind}")
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_zip = start.startswith(b"PK")  # older files cannot be memory-mapped
            if not is_zip and tarfile.is_tarfile(path):
                raise ValueError("torch would unpack it into a temporary folder")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # a damaged archive or pickle fails in many ways
        name = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if name is not None:
            right = "which may execute code, so the file is not read; save its state dict alone"
            raise ConfigError(f"{path} contains {name[1]}, {right}") from None
        raise ConfigError(f"{path} is not a file of torch.save, or is truncated; download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; must be a dictionary of weights")
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def _tensors_of(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The entries without the prefixes of wrappers; all must be ordinary floating-point tensors.

    Raises:
        ConfigError: one is not.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in entries.items():
        name = str(key)
        while (prefix := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None)) is not None:
            name = name.removeprefix(prefix)
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{path} has {name} as {type(tensor).__name__}; must be a dictionary of tensors")
        if not (tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device.type == "cpu"):
            raise ConfigError(f"{path} has {name} as {tensor.dtype}; weights must be floating-point numbers")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ConfigError(f"{path} has {name} of shape {list(tensor.shape)}, and fewer values")
        if name in found:
            raise ConfigError(f"{path} has {name} twice, with different prefixes")
        found[name] = tensor.detach()
    if not found:
        raise ConfigError(f"{path} holds no weights")
    return found


def _read_folder(path: Path, weights: Kind | None) -> ForeignWeights:
    """Weights and config.json of a diffusers model; of a pipeline, those of its transformer."""
    folder = path / "transformer" if (path / "model_index.json").is_file() else path
    if weights == "raw":
        raise option_error("--weights", weights, f"{path} holds one set of weights; leave it out")
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / 'config.json'} is not a configuration of diffusers; download it again")
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        tensors |= _tensors_of(file, _read_file(file))
    return ForeignWeights(path, tensors, "ema", {**content, "folder": str(path)})


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a model that diffusers saved: one, or those that its index lists; safetensors first."""
    for name in ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{index} cannot be read; download it again") from None
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise ConfigError(f"{index} names files outside its folder")
            return [folder / name for name in names]
    raise ConfigError(f"{folder} has no diffusion_pytorch_model.safetensors; must be a folder that diffusers saved")
