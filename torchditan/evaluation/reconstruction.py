# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reconstruction quality of an autoencoder: PSNR and SSIM, latent statistics, and speed.

Notable:
- metrics use the 8-bit pictures that would be saved, with one value per image; a mean is over images;
- SSIM follows the paper, with windows fully inside the image, and averages the colour channels;
- normalised latents should have means near 0 and standard deviations near 1 in every channel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.autoencoders.autoencoder import Autoencoder
from torchditan.config.errors import option_error
from torchditan.data_stream.datasets import ImageDataset, SequentialDataset, read_image

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


def picture_batches(
    dataset: ImageDataset, *, num_images: int, batch_size: int, corrupt_images: Literal["error", "skip"]
) -> Iterator[Tensor]:
    """Pictures spread evenly over a dataset; all of them if it has no more than `num_images`.

    Yields:
        (batch_size or fewer, 1 or 3, H, W) float32 in [-1, 1].

    Raises:
        ConfigError: a picture cannot be read.
    """
    count = min(num_images, len(dataset))
    for start in range(0, count, batch_size):
        indices = [i * len(dataset) // count for i in range(start, min(start + batch_size, count))]
        items = [read_image(dataset, index, num_classes=0, corrupt_images=corrupt_images) for index in indices]
        yield torch.stack([item["sample"] for item in items])


def check_pictures(dataset: ImageDataset) -> None:
    """Raise ConfigError for a dataset that is read only in order, or does not consist of pictures."""
    if isinstance(dataset, SequentialDataset):
        right = "pictures are read in random order here; must be false"
        raise option_error("dataset.streaming", True, right)
    if dataset.sample_shape[0] not in (1, 3):
        right = f"its samples have {dataset.sample_shape[0]} channels; must be a dataset of pictures"
        raise option_error("dataset.dataset_name", dataset.name, right)


def channel_statistics(latents: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel over batches (B, C, h, w): (C,) float64 each, on the CPU."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for batch in latents:
        values = batch.double()
        count += values.numel() // values.shape[1]
        total = total + values.sum((0, 2, 3)).cpu()
        squares = squares + values.square().sum((0, 2, 3)).cpu()
    mean = total / count
    return mean, (squares / count - mean**2).clamp_min(0).sqrt()


def normalization_of(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """(shift, scale) that give each channel mean 0 and standard deviation 1; a constant channel is only shifted."""
    return mean, torch.where(std > 1e-6, 1 / std, torch.ones_like(std))


@dataclass(frozen=True)
class Reconstruction:
    """Reconstructed images and metrics of an autoencoder, over n images."""

    images: Tensor
    """(n, C, H, W) float32 on the CPU, about [-1, 1]."""
    psnr: Tensor
    """(n,) dB."""
    ssim: Tensor | None
    """(n,), or None for images smaller than its window."""
    latent_shape: tuple[int, ...]
    latent_mean: Tensor
    """(C,) of the normalised latents."""
    latent_std: Tensor
    encoded_per_second: float
    """Images."""
    decoded_per_second: float


def reconstruct(autoencoder: Autoencoder, images: Tensor, *, batch_size: int) -> Reconstruction:
    """Encode and decode images (n, C, H, W) in [-1, 1], and measure the time. The normalisation must be set."""
    batches = images.split(batch_size)
    autoencoder.decode(autoencoder.encode(batches[0]))  # the first pass also loads kernels
    start = _now(autoencoder.device)
    latents = [autoencoder.encode(batch) for batch in batches]
    encoded = _now(autoencoder.device)
    decoded = [autoencoder.decode(batch) for batch in latents]
    end = _now(autoencoder.device)
    pairs = [(ours.cpu(), batch) for ours, batch in zip(decoded, batches, strict=True)]
    has_ssim = min(images.shape[2:]) >= SSIM_WINDOW
    mean, std = channel_statistics(latents)
    return Reconstruction(
        images=torch.cat([ours for ours, _ in pairs]),
        psnr=torch.cat([psnr(*pair) for pair in pairs]),
        ssim=torch.cat([ssim(*pair) for pair in pairs]) if has_ssim else None,
        latent_shape=tuple(latents[0].shape[1:]),
        latent_mean=mean,
        latent_std=std,
        encoded_per_second=len(images) / (encoded - start),
        decoded_per_second=len(images) / (end - encoded),
    )


def raw_latents(autoencoder: Autoencoder, images: Iterable[Tensor]) -> Iterator[Tensor]:
    """Latents before normalisation, of batches of images (B, C, H, W)."""
    for batch in images:
        yield autoencoder.moments(batch)[0]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
