# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Weights of feature extractors: read only if their SHA-256 is the published one; run in full float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.distributed.float32_products import ieee_float32
from torchditan.run.atomic_files import sha256_of


def read_weights(path: Path, *, sha256: str, name: str) -> dict[str, Tensor]:
    """The state dict in `path`, on the CPU.

    Args:
        path: a file that `torch.save` wrote.
        sha256: what the file must be, hexadecimal.
        name: the file's published name, for the error.

    Raises:
        ConfigError: the file is missing, unreadable, or has another SHA-256.
    """
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); must be {name}") from error
    if found != sha256:
        raise ConfigError(f"{path}: not {name}: its SHA-256 is {found}, must be {sha256}")
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Inference in IEEE float32: no autocast, no TF32 or bfloat16 in convolutions and matrix products."""
    with ieee_float32(convolutions=True), torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield
