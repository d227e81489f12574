# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A metric like `effnet` whose extractor costs nothing: random projections of the pixels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.extras.evaluation.extractors import Extractor, Features
from torchditan.extras.evaluation.metric import Evaluation
from torchditan.extras.evaluation.quality import Quality

NUM_FEATURES = 12


@dataclass
class PixelNetwork:
    """Features of pixels in no time: random projections, through a tanh."""

    calls: list[int] = field(default_factory=list)
    """Pictures of each call."""
    num_features: int = NUM_FEATURES

    def __call__(self, images: Tensor) -> Features:
        self.calls.append(len(images))
        generator = torch.Generator().manual_seed(0)
        x = images.float().flatten(1) / 128 - 1
        weights = torch.randn(x.shape[1], self.num_features + 8 + 5, generator=generator) / x.shape[1] ** 0.5
        weights = weights.to(x.device)
        # Row by row: a product of all rows may round otherwise for another number of rows.
        values = torch.stack([(row[:, None] * weights).sum(0) for row in x]).tanh()
        return Features(values[:, : self.num_features], values[:, self.num_features : -5], values[:, -5:] * 4)


class PixelQuality(Quality):
    network: PixelNetwork

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        self.network = PixelNetwork()
        return Extractor("Pixels", "0" * 64, NUM_FEATURES, self.network, torch.device(evaluation.device))


class WidePixelQuality(PixelQuality):
    """As many features as EfficientNet-Lite0."""

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        self.network = PixelNetwork(num_features=1280)
        return Extractor("Pixels", "1" * 64, 1280, self.network, torch.device(evaluation.device))


def random_images(count: int, *, seed: int, size: int = 8, channels: int = 3) -> Tensor:
    """Smooth images, each with a brightness of its own."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, (size, size), mode="bilinear")
    return (smooth * 255).round().to(torch.uint8)
