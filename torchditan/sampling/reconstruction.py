# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""PSNR and SSIM of images against references.

Notable:
- both use the 8-bit pictures that would be saved, with one value per image; a mean is over images;
- SSIM follows the paper, with windows fully inside the image, and averages the colour channels.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

SSIM_WINDOW = 11
"""Side of the window in pixels; smaller images have no SSIM."""

Rounding = Literal["nearest", "down"]
"""How floats become 8-bit values. It moves FID: "down" makes images darker by half a level on average."""


def to_8_bit(images: Tensor, rounding: Rounding = "nearest") -> Tensor:
    """[-1, 1] -> 0, 1, ... 255 as float64; values outside are clamped.

    Args:
        images: any shape.
        rounding: "nearest" is round((x + 1) / 2 * 255), which restores 8-bit images exactly, as in DiT's sample_ddp.py
            (127.5 x + 128, truncated); "down" truncates (x + 1) * 127.5 in float32, as in ADM's image_sample.py.
    """
    if rounding == "down":
        return ((images.float() + 1) * 127.5).clamp(0, 255).floor().double()
    return ((images.double().clamp(-1, 1) + 1) * 127.5).round()


def psnr(images: Tensor, references: Tensor) -> Tensor:
    """Peak signal-to-noise ratio, 10 log10(255^2 / MSE) of the 8-bit images (2^2 / MSE on the scale [-1, 1]).

    Args:
        images, references: (B, C, H, W) in [-1, 1].

    Returns:
        (B,) float64, in dB; infinite if the 8-bit images are equal.
    """
    difference = to_8_bit(images) - to_8_bit(references)
    return 10 * torch.log10(255**2 / difference.square().mean((1, 2, 3)))


def ssim(images: Tensor, references: Tensor) -> Tensor:
    """Structural similarity of the 8-bit images (Wang et al. 2004, eq. 13), mean over windows and colour channels.

    Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03; windows lie fully inside the image.

    Args:
        images, references: (B, C, H, W) in [-1, 1], height and width at least 11.

    Returns:
        (B,) float64; 1 if the 8-bit images are equal.
    """
    assert min(images.shape[2:]) >= SSIM_WINDOW, images.shape
    x, y = to_8_bit(images), to_8_bit(references)
    mean_x, mean_y = _windowed(x), _windowed(y)
    variance_x = _windowed(x * x) - mean_x**2
    variance_y = _windowed(y * y) - mean_y**2
    covariance = _windowed(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    contrast_and_structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return (luminance * contrast_and_structure).mean((1, 2, 3))


def similarity(generated: Tensor, references: Tensor) -> dict[str, float]:
    """Mean `psnr` (dB) and `ssim` of sample i against reference i of its row. Undefined values are left out.

    Args:
        generated, references: (rows, k, C, H, W) in [-1, 1]; only the first k that both have are compared.
    """
    count = min(generated.shape[1], references.shape[1])
    images, real = (part[:, :count].flatten(0, 1).float() for part in (generated, references))
    if images.shape != real.shape or images.dim() != 4 or images.shape[1] not in (1, 3):
        return {}
    found = {"psnr": psnr(images, real)}
    if min(images.shape[2:]) >= SSIM_WINDOW:
        found["ssim"] = ssim(images, real)
    means = {name: values.mean().item() for name, values in found.items()}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _windowed(values: Tensor) -> Tensor:
    """Gaussian-weighted means over all windows: (B, C, H, W) -> (B, C, H - 10, W - 10)."""
    offsets = torch.arange(SSIM_WINDOW, dtype=values.dtype, device=values.device) - SSIM_WINDOW // 2
    kernel = torch.exp(-offsets.square() / (2 * 1.5**2))
    kernel = kernel / kernel.sum()
    rows = values.flatten(0, 1)[:, None]  # (B * C, 1, H, W)
    rows = F.conv2d(rows, kernel.view(1, 1, -1, 1))
    return F.conv2d(rows, kernel.view(1, 1, 1, -1)).view(*values.shape[:2], *rows.shape[2:-1], -1)
