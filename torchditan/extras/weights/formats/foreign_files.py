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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchditan.checkpoint.safetensors_files import is_pickle, open_file, other_kind
from torchditan.checkpoint.weights import Kind, Weights
from torchditan.errors import ConfigError, option_error

_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
"""Prefixes of DistributedDataParallel and torch.compile."""
_TRAINING_KEYS: dict[Kind, str] = {"ema": "ema", "raw": "model"}
"""Entries of a training file, which also holds the optimizer's state and the arguments."""
_WEIGHTS_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")


def read_foreign_weights(path: Path, *, kind: Kind | None = None) -> Weights:
    """Read a file of weights, a training file, or a folder that diffusers saved.

    Args:
        path: a .pt, .pth, .bin or .safetensors file; the folder of a model or of a pipeline.
        kind: which set of a training file to read; None takes the averaged one. A file with one set counts as
            averaged, because the projects publish averages.

    Raises:
        ConfigError: it does not exist, is damaged or contains code, or lacks these weights.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; must be a .pt, .pth, .bin or .safetensors file, or a folder")
    content: dict[str, Any] = {}
    if path.is_dir():  # of a model, or of a pipeline with a transformer
        folder = path / "transformer" if (path / "model_index.json").is_file() else path
        try:
            content = json.loads((folder / "config.json").read_bytes())
        except OSError as error:
            raise ConfigError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None
        found = {name: tensor for file in _weight_files(folder) for name, tensor in _read_file(file).items()}
    else:
        found = _read_file(path)
    stored = {each: found[key] for each, key in _TRAINING_KEYS.items() if isinstance(found.get(key), dict)}
    if not stored:
        stored = {"ema": found["state_dict"] if isinstance(found.get("state_dict"), dict) else found}
    if (kind or "ema") not in stored:
        right = f"{path} has only the other weights; must be {next(iter(stored))}"
        raise option_error("--weights", kind, right)
    tensors = _tensors_of(path, stored[kind or "ema"])
    return Weights.of(path, tensors, content=content, kind=kind or "ema", step=0, images_seen=0)


def _read_file(path: Path) -> dict[str, Any]:
    """The stored dictionary."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if path.suffix == ".safetensors" or start[8:] == b"{":
            with open_file(path) as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  not a mapping
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


def _tensors_of(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The entries without the prefixes of wrappers.

    Raises:
        ConfigError: one is not an ordinary floating-point tensor.
    """
    found: dict[str, Tensor] = {}
    for key, tensor in entries.items():
        name = _WRAPPERS.sub("", str(key))
        is_ordinary = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not (is_ordinary and tensor.is_floating_point()):
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{path} has {name} as {what}; must be a tensor of floating-point numbers")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ConfigError(f"{path} has {name} of shape {list(tensor.shape)}, and fewer values")
        found[name] = tensor.detach()
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a model that diffusers saved: one, or those that its index lists; safetensors first."""
    for name in _WEIGHTS_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            names = {str(file) for file in json.loads(index.read_bytes())["weight_map"].values()}
            if any(Path(file).name != file for file in names):
                raise ConfigError(f"{index} names files outside its folder")
            return [folder / file for file in sorted(names)]
    raise ConfigError(f"{folder} has no {_WEIGHTS_FILES[0]}; must be a folder that diffusers saved")
