# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Inception-2015, the network behind FID, sFID and the Inception Score, with the features of torch-fidelity 0.4.

Notable:
- the architecture is Inception v3 (Szegedy et al. 2015, arXiv:1512.00567) as the frozen TensorFlow graph
  `classify_image_graph_def.pb` of 2015-12-05 has it: average pooling does not count its padding, the last block
  pools by maximum, and there are 1,008 classes;
- images are resized as TensorFlow 1 did: bilinear, align_corners=False, without half-pixel centres or antialiasing;
- module names are those of `weights-inception-2015-12-05-6726825d.pth`, which torch-fidelity
  (github.com/toshas/torch-fidelity, Apache-2.0) and pytorch-fid publish;
- weights are checked by SHA-256: without this file, nothing is called FID.
"""

from __future__ import annotations

import urllib.error
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.errors import ConfigError
from torchditan.extras.evaluation.extractors import Extractor, Features, full_float32, read_weights
from torchditan.extras.evaluation.metric import Evaluation

FILE_NAME = "weights-inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{FILE_NAME}"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
IMAGE_SIZE = 299
NUM_POOL_FEATURES = 2048
NUM_SPATIAL_FEATURES = 7 * 17 * 17
NUM_CLASSES = 1008


class ConvNormReLU(nn.Module):
    """Convolution without bias, batch norm with epsilon 0.001, ReLU."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(channels_out, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def pointwise(channels_in: int, channels_out: int) -> ConvNormReLU:
    return ConvNormReLU(channels_in, channels_out, 1)


def same(channels_in: int, channels_out: int, height: int, width: int) -> ConvNormReLU:
    """Kernel (height, width), padded so that the size of the image stays."""
    return ConvNormReLU(channels_in, channels_out, (height, width), padding=(height // 2, width // 2))


def halve(channels_in: int, channels_out: int) -> ConvNormReLU:
    return ConvNormReLU(channels_in, channels_out, 3, stride=2)


def average(x: Tensor) -> Tensor:
    """3 x 3 average that keeps the size and does not count the padding."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class Mixed35(nn.Module):
    """35 x 35 positions: kernels 1 x 1, 5 x 5, and twice 3 x 3. Gives 224 + `pool_channels`."""

    def __init__(self, channels: int, pool_channels: int) -> None:
        super().__init__()
        self.branch1x1 = pointwise(channels, 64)
        self.branch5x5_1 = pointwise(channels, 48)
        self.branch5x5_2 = same(48, 64, 5, 5)
        self.branch3x3dbl_1 = pointwise(channels, 64)
        self.branch3x3dbl_2 = same(64, 96, 3, 3)
        self.branch3x3dbl_3 = same(96, 96, 3, 3)
        self.branch_pool = pointwise(channels, pool_channels)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch1x1(x)
        wide = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([single, wide, double, self.branch_pool(average(x))], 1)


class Reduce35To17(nn.Module):
    """(B, 288, 35, 35) -> (B, 768, 17, 17)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3 = halve(channels, 384)
        self.branch3x3dbl_1 = pointwise(channels, 64)
        self.branch3x3dbl_2 = same(64, 96, 3, 3)
        self.branch3x3dbl_3 = halve(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class Mixed17(nn.Module):
    """17 x 17 positions, 768 channels: 7 x 7 kernels as products of 1 x 7 and 7 x 1, `width` channels inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch1x1 = pointwise(768, 192)
        self.branch7x7_1 = pointwise(768, width)
        self.branch7x7_2 = same(width, width, 1, 7)
        self.branch7x7_3 = same(width, 192, 7, 1)
        self.branch7x7dbl_1 = pointwise(768, width)
        self.branch7x7dbl_2 = same(width, width, 7, 1)
        self.branch7x7dbl_3 = same(width, width, 1, 7)
        self.branch7x7dbl_4 = same(width, width, 7, 1)
        self.branch7x7dbl_5 = same(width, 192, 1, 7)
        self.branch_pool = pointwise(768, 192)

    def forward(self, x: Tensor) -> Tensor:
        once = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), once, twice, self.branch_pool(average(x))], 1)


class Reduce17To8(nn.Module):
    """(B, 768, 17, 17) -> (B, 1280, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = pointwise(768, 192)
        self.branch3x3_2 = halve(192, 320)
        self.branch7x7x3_1 = pointwise(768, 192)
        self.branch7x7x3_2 = same(192, 192, 1, 7)
        self.branch7x7x3_3 = same(192, 192, 7, 1)
        self.branch7x7x3_4 = halve(192, 192)

    def forward(self, x: Tensor) -> Tensor:
        small = self.branch3x3_2(self.branch3x3_1(x))
        large = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([small, large, F.max_pool2d(x, 3, stride=2)], 1)


class Mixed8(nn.Module):
    """8 x 8 positions, 2,048 channels: 1 x 3 and 3 x 1 kernels next to each other."""

    def __init__(self, channels: int, *, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.branch1x1 = pointwise(channels, 320)
        self.branch3x3_1 = pointwise(channels, 384)
        self.branch3x3_2a = same(384, 384, 1, 3)
        self.branch3x3_2b = same(384, 384, 3, 1)
        self.branch3x3dbl_1 = pointwise(channels, 448)
        self.branch3x3dbl_2 = same(448, 384, 3, 3)
        self.branch3x3dbl_3a = same(384, 384, 1, 3)
        self.branch3x3dbl_3b = same(384, 384, 3, 1)
        self.branch_pool = pointwise(channels, 192)

    def forward(self, x: Tensor) -> Tensor:
        once = self.branch3x3_1(x)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        # The published graph pools by maximum in its last block only, unlike the paper; FID is defined by the graph.
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.is_last else average(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(once), self.branch3x3_2b(once)]
        parts += [self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice), self.branch_pool(pooled)]
        return torch.cat(parts, 1)


class Inception2015(nn.Module):
    """uint8 images of any size -> `Features`, in eval mode, without gradients.

    - `pool` (B, 2048): average over positions of the last block, `pool_3`;
    - `spatial` (B, 2023): the first 7 channels of `mixed_6/conv` after ReLU, in ADM's order (17, 17, 7);
    - `logits` (B, 1008): the last layer without its bias (`logits_unbiased`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = halve(3, 32)
        self.Conv2d_2a_3x3 = ConvNormReLU(32, 32, 3)
        self.Conv2d_2b_3x3 = same(32, 64, 3, 3)
        self.Conv2d_3b_1x1 = pointwise(64, 80)
        self.Conv2d_4a_3x3 = ConvNormReLU(80, 192, 3)
        self.Mixed_5b = Mixed35(192, pool_channels=32)
        self.Mixed_5c = Mixed35(256, pool_channels=64)
        self.Mixed_5d = Mixed35(288, pool_channels=64)
        self.Mixed_6a = Reduce35To17(288)
        self.Mixed_6b = Mixed17(128)
        self.Mixed_6c = Mixed17(160)
        self.Mixed_6d = Mixed17(160)
        self.Mixed_6e = Mixed17(192)
        self.Mixed_7a = Reduce17To8()
        self.Mixed_7b = Mixed8(1280, is_last=False)
        self.Mixed_7c = Mixed8(2048, is_last=True)
        self.fc = nn.Linear(NUM_POOL_FEATURES, NUM_CLASSES)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Features:
        """
        Args:
            images: (B, 3, H, W) uint8, RGB.
        """
        assert images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] == 3, (images.dtype, images.shape)
        with full_float32(images.device):
            return self._features(images)

    def _features(self, images: Tensor) -> Features:
        x = (resize_tensorflow_1(images.float(), IMAGE_SIZE) - 128) / 128  # (B, 3, 299, 299) in [-1, 1)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # (B, 64, 147, 147)
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))  # (B, 192, 71, 71)
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))  # (B, 288, 35, 35)
        x = self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x))))  # (B, 768, 17, 17)
        # The graph's mixed_6 is Mixed_6d, and mixed_6/conv the first of the branches that it joins.
        spatial = x[:, :7].permute(0, 2, 3, 1).flatten(1)  # (B, 2023)
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))  # (B, 2048, 8, 8)
        pool = x.mean((2, 3))
        return Features(pool=pool, spatial=spatial, logits=pool @ self.fc.weight.T)


def resize_tensorflow_1(images: Tensor, size: int) -> Tensor:
    """TensorFlow 1's `resize_bilinear(align_corners=False)`: output pixel i reads position i * input / output.

    Args:
        images: (B, C, H, W) float32.

    Returns:
        (B, C, size, size), interpolated along the width first, as TensorFlow rounds.
    """
    top, bottom, down = _neighbours(images.shape[2], size, images.device)
    left, right, across = _neighbours(images.shape[3], size, images.device)
    start, end = images[..., left], images[..., right]
    wide = start + (end - start) * across  # (B, C, H, size); torch.lerp rounds otherwise
    start, end = wide[:, :, top], wide[:, :, bottom]
    return start + (end - start) * down[:, None]


def _neighbours(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For `size` output pixels: the pixel before, the pixel after, and the weight of the one after."""
    position = torch.arange(size, dtype=torch.float32, device=device) * (length / size)
    before = position.long()
    return before, (before + 1).clamp_max(length - 1), position - before


def load_inception(weights: Path | None = None) -> Inception2015:
    """Inception-2015 with the published weights, on the CPU.

    Args:
        weights: the file; None takes it from torch.hub's cache (where torch-fidelity keeps it too), and downloads
            it there once.

    Raises:
        ConfigError: there is no such file, it cannot be downloaded, or its SHA-256 is another.
    """
    path = weights or _cached_or_downloaded()
    model = Inception2015()
    model.load_state_dict(read_weights(path, sha256=SHA256, name=FILE_NAME))
    return model


def _cached_or_downloaded() -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / FILE_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # to a temporary name first, then renamed
            torch.hub.download_url_to_file(URL, str(path), hash_prefix=SHA256, progress=False)
        except (OSError, urllib.error.URLError, RuntimeError) as error:
            raise ConfigError(f"{FILE_NAME}: download failed ({error}); get the file and pass its path") from error
    return path


def open_inception(evaluation: Evaluation) -> Extractor:
    """Inception-2015 of `evaluation.inception_weights`.

    Raises:
        ConfigError: the file is missing, cannot be downloaded, or has another SHA-256.
    """
    device = torch.device(evaluation.device)
    model = load_inception(evaluation.inception_weights).to(device)
    return Extractor(
        name="Inception-2015",
        sha256=SHA256,
        num_features=NUM_POOL_FEATURES,
        network=model,
        device=device,
    )
