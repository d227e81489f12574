# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Features of real images, extracted once: a second evaluation reads them from a cache.

Notable:
- one file per batch of images, in `<folder>/<extractor>-<hash>/`; run/tensor_cache.py writes and reads them;
- the hash covers the extractor's weights, `FEATURES_VERSION`, `_FORMAT` and the type of device; the key of a batch its
  bytes and shape. Other images, weights or code never meet old features;
- an entry has the SHA-256 of its tensors. A wrong byte costs a line on stderr and another extraction;
- 50,000 images take 0.76 GiB with Inception-2015, and 0.24 GiB with EfficientNet-Lite0.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchditan.evaluation.extractors import FEATURES_VERSION, Extractor, Features
from torchditan.run.tensor_cache import TensorCache, hash_of

_FORMAT = 2
"""Of an entry; 1 had no checksum."""
_CHECKSUM = "sha256"


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
            identity = hash_of(extractor.sha256, str(FEATURES_VERSION), extractor.device.type, str(_FORMAT))
            self._cache = TensorCache(folder, f"{extractor.name}-{identity[:16]}")
            self._cache.refresh()

    def __call__(self, images: Tensor) -> Features:
        """Features on the CPU of images (N, 1 or 3, H, W) uint8."""
        if self._cache is None:
            return self._extract(images)
        content = hashlib.sha256(images.contiguous().numpy().data).hexdigest()
        key = hash_of(content, str(tuple(images.shape)))
        if key in self._cache:
            stored = self._cache[key]
            checksum = stored.pop(_CHECKSUM, None)
            if checksum is not None and torch.equal(checksum, _checksum_of(stored)):
                return Features(**stored)
            print(f"warning: damaged features in {self._cache.folder} are computed again", file=sys.stderr)
        features = self._extract(images)
        entry = {name: part for name, part in features._asdict().items() if part is not None}
        try:
            self._cache.write({key: {**entry, _CHECKSUM: _checksum_of(entry)}})
        except OSError as error:  # a full disk must not end an evaluation, nor a training
            print(f"warning: features are not cached in {self._cache.folder}: {error.strerror}", file=sys.stderr)
            self._cache = None
        return features

    def _extract(self, images: Tensor) -> Features:
        return self.extractor(images)._replace(logits=None)


def _checksum_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """SHA-256 of names, types, shapes and values: (32,) uint8."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
