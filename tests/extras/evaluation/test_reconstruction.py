# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""PSNR and SSIM against independent computations and known cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchditan.sampling.reconstruction import psnr, ssim, to_8_bit


def noisy_pair(channels: int = 3, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two 8-bit images (3, channels, 24, 33) alike but for noise."""
    generator = np.random.default_rng(seed)
    rows = np.linspace(0, 255, 24)[:, None] * np.cos(np.arange(33) / 5)
    images = (rows + generator.normal(0, 20, (3, channels, 24, 33))).clip(0, 255).round()
    others = (images * 0.9 + generator.normal(5, 12, images.shape)).clip(0, 255).round()
    return images, others


def as_samples(pixels: np.ndarray) -> torch.Tensor:
    """0..255 to float32 in [-1, 1]."""
    return torch.from_numpy(pixels / 127.5 - 1).float()


def ssim_by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """One channel (H, W): every window's weighted moments about its own means, with loops."""
    offsets = np.arange(11) - 5
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
            values.append(luminance * (2 * covariance + c2) / (var_a + var_b + c2))
    return float(np.mean(values))


@pytest.mark.parametrize("channels", [1, 3])
def test_psnr_is_that_of_the_8_bit_images(channels: int) -> None:
    images, others = noisy_pair(channels)
    expected = [10 * math.log10(255**2 / np.mean((a - b) ** 2)) for a, b in zip(images, others, strict=True)]
    assert psnr(as_samples(images), as_samples(others)).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_is_that_of_the_paper(channels: int) -> None:
    images, others = noisy_pair(channels)
    found = ssim(as_samples(images), as_samples(others)).tolist()
    for row in range(len(images)):
        expected = np.mean([ssim_by_definition(a, b) for a, b in zip(images[row], others[row], strict=True)])
        assert found[row] == pytest.approx(expected, rel=1e-9)
        assert 0.05 < expected < 0.95, "a case that tells right from wrong"


def test_equal_images_have_infinite_psnr_and_ssim_1() -> None:
    images = as_samples(noisy_pair()[0])
    nearly = images + 0.003 * torch.sign(torch.sin(torch.arange(33.0)))  # less than half a level of 2 / 255
    assert psnr(images, nearly).tolist() == [math.inf] * 3
    assert ssim(images, nearly).tolist() == pytest.approx([1.0] * 3, abs=1e-12)


def test_known_differences_have_known_psnr() -> None:
    grey = torch.zeros(1, 3, 12, 12)
    assert psnr(grey + 20 / 127.5, grey).item() == pytest.approx(20 * math.log10(255 / 20))
    black, white = torch.full_like(grey, -1), torch.full_like(grey, 1)
    assert psnr(black, white).item() == pytest.approx(0)
    assert psnr(white + 7, black).item() == pytest.approx(0), "what no picture can show is clamped"


def test_8_bit_images_survive_the_way_through_floats() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    as_floats = levels.float() / 127.5 - 1
    assert torch.equal(to_8_bit(as_floats).byte(), levels)
    assert torch.equal(to_8_bit((as_floats.double() * 1.001).float())[[0, 255]], torch.tensor([0.0, 255.0]).double())
    between = (levels[:-1].float() + 0.75) / 127.5 - 1
    assert torch.equal(to_8_bit(between).byte(), levels[1:])
    assert torch.equal(to_8_bit(between, "down").byte(), levels[:-1])


def test_rounding_is_that_of_published_scripts() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    dit = torch.clamp(127.5 * x + 128.0, 0, 255).to(torch.uint8)  # sample_ddp.py
    adm = ((x + 1) * 127.5).clamp(0, 255).to(torch.uint8)  # image_sample.py
    assert torch.equal(to_8_bit(x).byte(), dit)
    assert torch.equal(to_8_bit(x, "down").byte(), adm)
    assert not torch.equal(dit, adm)
