# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Feature extractors of metrics: 8-bit pictures -> float32 features on the CPU; their weights, and a cache of features.

Notable:
- an `Extractor` is a name, the hash of its weights and a network; quality.py computes every figure over any of them;
- weights are read only if their SHA-256 is the published one, and networks run in full float32;
- pictures go through the network in groups of `GROUP`, so batches of the same pictures give the same bits;
- grayscale is repeated to three channels;
- features of real images are kept, one file per batch, in `<folder>/<extractor>-<hash>/` (extras/tensor_cache.py). The
  hash covers the weights, `FEATURES_VERSION` and the type of device; the key of a batch its bytes and shape. Other
  images, weights or code never meet old features. 50,000 images take 0.76 GiB with Inception-2015, 0.24 GiB with
  EfficientNet-Lite0.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchditan.distributed.float32_products import ieee_float32
from torchditan.errors import ConfigError
from torchditan.extras.tensor_cache import TensorCache, hash_of
from torchditan.run.atomic_files import sha256_of

GROUP = 32
"""Pictures in one forward pass: less than 1 GiB of activations of Inception-2015."""
FEATURES_VERSION = 2
"""Part of the key of cached features. Raise it if the same weights and pictures give other features."""


class Features(NamedTuple):
    """float32; row i belongs to picture i."""

    pool: Tensor
    """(N, D), for the Fréchet distance, KID, neighbours and copies."""
    spatial: Tensor | None = None
    """(N, S), for the spatial Fréchet distance (sFID); None if the extractor has none."""
    logits: Tensor | None = None
    """(N, classes), for the Inception Score; None if the extractor has none."""


@dataclass(frozen=True)
class Extractor:
    """A network with fixed weights that describes pictures by features."""

    name: str
    """Part of the names of its figures, as in `FD-EffNetLite0`."""
    sha256: str
    """Of the file of its weights, hexadecimal."""
    num_features: int
    """D of `Features.pool`."""
    network: Callable[[Tensor], Features]
    """(B, 3, H, W) uint8 on the device -> features, in full float32."""
    device: torch.device

    def __call__(self, images: Tensor) -> Features:
        """Features on the CPU of images (N, 1 or 3, H, W) uint8, N at least 1."""
        groups = [self.network(group.to(self.device).expand(-1, 3, -1, -1)) for group in images.split(GROUP)]
        return join_features(groups)


def join_features(parts: Sequence[Features]) -> Features:
    """Features of consecutive pictures as one, on the CPU; parts of one extractor."""
    joined: Any = (None if of[0] is None else torch.cat(of).cpu() for of in zip(*parts, strict=True))
    return Features(*joined)


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


class CachedFeatures:
    """The `pool` and `spatial` features of an extractor; logits are left out.

    Args:
        folder: of the cache; None keeps nothing.

    Raises:
        ConfigError: a file of the cache is damaged.
    """

    def __init__(self, extractor: Extractor, folder: Path | None) -> None:
        self.extractor = extractor
        self._cache = None
        if folder is not None:
            identity = hash_of(extractor.sha256, str(FEATURES_VERSION), extractor.device.type)
            self._cache = TensorCache(folder, f"{extractor.name}-{identity[:16]}")
            self._cache.refresh()

    def __call__(self, images: Tensor) -> Features:
        """Features on the CPU of images (N, 1 or 3, H, W) uint8."""
        if self._cache is None:
            return self._extract(images)
        content = hashlib.sha256(images.contiguous().numpy().data).hexdigest()
        key = hash_of(content, str(tuple(images.shape)))
        if key in self._cache:
            return Features(**self._cache[key])
        features = self._extract(images)
        try:
            self._cache.write({key: {name: part for name, part in features._asdict().items() if part is not None}})
        except OSError as error:  # a full disk must not end an evaluation, nor a training
            print(f"warning: features are not cached in {self._cache.folder}: {error.strerror}", file=sys.stderr)
            self._cache = None
        return features

    def _extract(self, images: Tensor) -> Features:
        return self.extractor(images)._replace(logits=None)
