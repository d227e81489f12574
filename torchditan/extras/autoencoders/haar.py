# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A Haar wavelet packet: an exactly invertible autoencoder without weights, for tests and for work without downloads.

Notable:
- each level halves height and width and splits every channel into four: mean, two edges, diagonal;
- the transform is orthonormal, so norms and white noise are preserved. It is its own inverse;
- it uses sums and halves only, no matrix product. TF32 does not affect it, and 8-bit pixels are restored exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.config import options
from torchditan.errors import option_error
from torchditan.extras.autoencoders.autoencoder import Autoencoder

DOWNSAMPLINGS = (2, 4, 8)


class HaarAutoencoder(Autoencoder):
    """Pixels (B, C, H, W) <-> bands (B, C x downsampling^2, H / downsampling, W / downsampling).

    Channel c of the image is split into channels 4c to 4c + 3 (LL, HL, LH, HH), and each of these again at the next
    level. No normalisation is published: it is computed from the encoded images.
    """

    def __init__(self, *, downsampling: int, image_channels: int, device: torch.device) -> None:
        assert downsampling in DOWNSAMPLINGS
        self.name = "haar"
        self.path = None
        self.fingerprint = f"haar-{downsampling}-{image_channels}"
        self.image_channels = image_channels
        self.latent_channels = image_channels * downsampling**2
        self.downsampling = downsampling
        self.dtype = torch.float32
        self.device = device
        self.has_posterior = False
        self._num_levels = downsampling.bit_length() - 1

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        for _ in range(self._num_levels):
            images = _haar(F.pixel_unshuffle(images, 2))  # (B, 4C, H / 2, W / 2)
        return images, None

    def _decode(self, latents: Tensor) -> Tensor:
        for _ in range(self._num_levels):
            latents = F.pixel_shuffle(_haar(latents), 2)  # (B, C / 4, 2h, 2w)
        return latents


def open_haar(config: options.Autoencoder, *, device: torch.device, image_channels: int | None) -> HaarAutoencoder:
    """Open the packet with `autoencoder.downsampling` (default 4), for `image_channels` (default 3) channels."""
    downsampling = 4 if config.downsampling is None else config.downsampling
    if downsampling not in DOWNSAMPLINGS:
        right = f"must be one of {', '.join(map(str, DOWNSAMPLINGS))} for haar"
        raise option_error("autoencoder.downsampling", downsampling, right)
    if config.path is not None:
        raise option_error("autoencoder.path", config.path, "haar has no weights; leave it out")
    if config.dtype not in (None, "float32"):
        raise option_error("autoencoder.dtype", config.dtype, "haar is exact in float32 only; leave it out")
    return HaarAutoencoder(downsampling=downsampling, image_channels=image_channels or 3, device=device)


def _haar(x: Tensor) -> Tensor:
    """Four pixels a b / c d -> LL, HL, LH, HH, or back (Haar 1910): half of a symmetric 4 x 4 Hadamard matrix.

    Args:
        x: (B, 4C, h, w), the four values of a channel are adjacent.
    """
    a, b, c, d = x.unflatten(1, (-1, 4)).unbind(2)  # (B, C, h, w) each
    bands = [a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]
    return torch.stack(bands, dim=2).flatten(1, 2) / 2
