# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Features of real images, extracted once: a second evaluation reads them from a cache.

Notable:
- one file per batch of images, in `<folder>/<extractor>-<hash>/`; run/tensor_cache.py writes and reads them;
- the hash covers the extractor's weights, `FEATURES_VERSION` and the type of device; the key of a batch its bytes and
  shape. Other images, weights or code never meet old features;
- 50,000 images take 0.76 GiB with Inception-2015, and 0.24 GiB with EfficientNet-Lite0.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from torch import Tensor

from torchditan.evaluation.extractors import FEATURES_VERSION, Extractor, Features
from torchditan.run.tensor_cache import TensorCache, hash_of


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
