# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Networks of transformers that a user brings for a metric, by folder or hub name, and the images that they read.

Notable:
- the class follows from `model_type`;
- a card and the cache of features know the weights by their SHA-256. That of a single file is the one that the hub
  shows; that of several files is the hash of their hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.errors import ConfigError, option_error
from torchditan.extras.saved_models import open_saved
from torchditan.run.atomic_files import sha256_of
from torchditan.run.hub import fetch

_WEIGHTS = "model.safetensors"
_SHARDS = "model-*-of-*.safetensors"


class SavedNetwork(NamedTuple):
    model: Any
    """In float32 and eval mode, without gradients."""
    sha256: str
    folder: Path


def open_network(
    metric: str, place: str, *, classes: Mapping[str, str], files: Sequence[str] = (), device: torch.device
) -> SavedNetwork:
    """Open what transformers saved in a folder or on the hub.

    Args:
        metric: its name, for messages.
        place: the folder or hub name.
        classes: `model_type` -> class of transformers, of the networks that the metric takes.
        files: names of further files to download.

    Raises:
        ConfigError: it does not exist, is of another kind, or lacks weights.
    """
    patterns = ["config.json", _WEIGHTS, _SHARDS, f"{_WEIGHTS}.index.json", *files]
    folder = fetch(place, patterns=patterns, what="weights", option="metrics")

    def refuse(right: str) -> ConfigError:
        return option_error("metrics", f"{metric} path={place}", right)

    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))["model_type"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise refuse("must be a folder that transformers saved, or a hub name (config.json with model_type)") from None
    if kind not in classes:
        raise refuse(f"is a {kind}; must be a {' or '.join(classes)}")
    weights = [folder / _WEIGHTS] if (folder / _WEIGHTS).is_file() else sorted(folder.glob(_SHARDS))
    if not weights:
        raise refuse(f"has no {_WEIGHTS}")
    hashes = [sha256_of(path) for path in weights]
    model = open_saved(folder, classes[kind], refuse=refuse, dtype=torch.float32)
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return SavedNetwork(model.to(device).eval().requires_grad_(False), sha256, folder)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, 3, H, W) uint8 -> (B, 3, *size) float32 in [0, 1]: bicubic, antialiased, rounded to 8 bits, as by Pillow."""
    pixels = images.float()
    if images.shape[2:] != size:
        pixels = F.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
    return pixels.round().clamp(0, 255) / 255


def normalize(pixels: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Shift and scale the channels of (B, 3, H, W)."""
    shift, scale = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (mean, std))
    return (pixels - shift) / scale
