# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""PSNR and SSIM against independent computations and known cases; the numbers that `torchditan reconstruct` prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused

from torchditan.config.loader import read_toml
from torchditan.evaluation.reconstruction import channel_statistics, normalization_of, psnr, ssim, to_8_bit

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = ("torchditan", "reconstruct")
EARTH = ["--dataset.dataset_name=earth", "--dataset.image_size=64", "--num_images=20"]


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


def test_ssim_agrees_with_filters_of_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    images, others = noisy_pair(1, seed=1)
    x, y = images[0, 0], others[0, 0]

    def blur(values: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(values, 1.5, radius=5)[5:-5, 5:-5]

    mean_x, mean_y = blur(x), blur(y)
    variances = blur(x * x) - mean_x**2 + blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    c1, c2 = 6.5025, 58.5225
    expected = (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))
    assert ssim(as_samples(images), as_samples(others))[0].item() == pytest.approx(expected.mean(), rel=1e-9)


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


def test_each_image_is_judged_for_itself() -> None:
    images, others = (as_samples(pixels) for pixels in noisy_pair())
    for figure in (psnr, ssim):
        alone = torch.cat([figure(images[row : row + 1], others[row : row + 1]) for row in range(3)])
        assert torch.allclose(figure(images, others), alone, rtol=1e-12)
        assert figure(images, others).shape == (3,)


def test_channel_statistics_are_those_of_all_batches_together() -> None:
    generator = np.random.default_rng(0)
    latents = generator.normal([[[[3.0]], [[-100.0]]]], [[[[2.0]], [[0.5]]]], (10, 2, 3, 4))
    mean, std = channel_statistics(torch.from_numpy(latents).float().split([4, 6]))
    assert mean.numpy() == pytest.approx(latents.mean((0, 2, 3)), rel=1e-6)
    assert std.numpy() == pytest.approx(latents.std((0, 2, 3)), rel=1e-4)
    shift, scale = normalization_of(mean, std)
    again = (latents - shift.numpy()[:, None, None]) * scale.numpy()[:, None, None]
    assert again.std((0, 2, 3)) == pytest.approx(np.ones(2), rel=1e-4)


def test_a_channel_that_never_varies_keeps_a_finite_scale() -> None:
    assert normalization_of(*channel_statistics([torch.full((2, 1, 3, 3), 5.0)])) == (5, 1)


def test_one_table_compares_autoencoders(tmp_path: Path, run_script: RunScript) -> None:
    code, output, errors = run_script(*SCRIPT, *EARTH, "--compare", "haar", "patch:earth")
    assert (code, errors) == (0, "")
    first, headings, haar, patch, *_ = output.splitlines()
    assert first.startswith("20 held-out images of earth, 3 x 64 x 64, on ")
    assert " ".join(headings.split()) == "autoencoder latents fewer PSNR dB SSIM mean std encode/s decode/s"
    assert haar.split()[:9] == ["haar", "48", "x", "16", "x", "16", "1", "x", "inf"], "haar is exact"
    assert haar.split()[9:14] == ["1.0000", "+0.00", "+0.00", "1.00", "1.00"], "normalised by these very images"
    assert patch.split()[:8] == ["patch:earth", "8", "x", "16", "x", "16", "6", "x"]
    assert 29 < float(patch.split()[8]) < 50 and 0.8 < float(patch.split()[9]) < 1
    assert len(haar.split()) == len(patch.split()) == 16
    assert "\nhaar publishes no normalisation" in output and "earth publishes no" not in output

    picture = Image.open(tmp_path / "outputs" / "reconstructions_earth.png")
    assert picture.height > 3 * 128 and picture.width > 10 * 128, "three rows of ten"


def test_a_normalisation_that_is_not_published_is_printed_to_paste(tmp_path: Path, run_script: RunScript) -> None:
    haar = ["--num_images=50", "--autoencoder.name=haar", "--autoencoder.downsampling=2"]  # of digits
    code, output, _ = run_script(*SCRIPT, *haar, "--out=a/b.png")
    assert code == 0 and (tmp_path / "a" / "b.png").exists()
    (tmp_path / "job.toml").write_text(output[output.index("[autoencoder]") : output.index("\noriginals")])
    found = read_toml(tmp_path / "job.toml")
    assert (found["autoencoder.name"], found["autoencoder.downsampling"]) == ("haar", 2)
    assert len(found["autoencoder.shift"]) == len(found["autoencoder.scale"]) == 4

    pasted = [f"--autoencoder.{key}={found[f'autoencoder.{key}']}" for key in ("shift", "scale")]
    code, output, _ = run_script(*SCRIPT, *haar, *pasted)
    assert code == 0 and "[autoencoder]" not in output
    assert output.splitlines()[2].split()[-6:-2] == ["+0.00", "+0.00", "1.00", "1.00"]


def test_small_images_have_no_ssim(run_script: RunScript) -> None:
    code, output, _ = run_script(*SCRIPT, "--num_images=5", "--autoencoder.name=haar")
    assert code == 0
    assert output.splitlines()[2].split()[8:10] == ["inf", "-"]


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ([], "autoencoder.name = none", ["--compare"]),
        (
            ["--compare", "haar", "--autoencoder.name=haar"],
            'autoencoder.name = "haar"',
            ["--compare"],
        ),
        (["--compare"], "--compare", ["argument"]),
        (["--autoencoder.online"], "autoencoder.online = true", ["latents"]),
        (["--num_image=3"], "--num_image", ["--num_images?"]),
        (["--num_images=0"], "--num_images", ["0", "1"]),
        (["extra"], "extra", ["--section.key"]),
        (
            ["--compare", "haar", "--dataset.dataset_name=dummy", "--dataset.image_size=16"],
            'dataset.dataset_name = "dummy"',
            ["4", "pictures"],
        ),
        (
            ["--compare", "patch:gone"],
            'autoencoder.path = "gone"',
            ["torchditan autoencoder"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    code, output, errors = run_script(*SCRIPT, *arguments)
    assert (code, output) == (2, "")
    assert_refused(errors, about, mentions)
    assert not list(tmp_path.iterdir())


def test_images_that_do_not_divide_into_latents_are_one_line(tmp_path: Path, run_script: RunScript) -> None:
    for number in range(40):
        Image.new("RGB", (12, 10), (number, 0, 0)).save(tmp_path / f"{number}.png")
    flags = ["--dataset.dataset_name=folder", f"--dataset.root_dir={tmp_path}", "--dataset.image_size", "10", "12"]
    code, output, errors = run_script(*SCRIPT, *flags, "--autoencoder.name=haar")
    assert (code, output) == (2, "")
    assert_refused(errors, "dataset.image_size = [10, 12]", ["multiple of 4", "haar"])
