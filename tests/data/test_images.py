# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Decoding, orientation, conversion, resizing and cropping, exact to the pixel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets.images import load_sample

RAMP = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3


def read(path: Path | bytes, *shape: int) -> np.ndarray:
    """Load and undo the scaling: uint8 (H, W, C)."""
    sample = load_sample(path, sample_shape=shape, where=str(path)[:40])
    assert sample.dtype == np.float32
    assert sample.shape == shape
    return ((sample + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_pixels_are_scaled_to_minus_one_and_one(tmp_path: Path) -> None:
    pixels = np.array([[[0, 255, 51]]], dtype=np.uint8)
    sample = load_sample(save(Image.fromarray(pixels), tmp_path / "a.png"), sample_shape=(3, 1, 1), where="a")
    np.testing.assert_allclose(sample[:, 0, 0], [-1.0, 1.0, -0.6], atol=1e-6)


def test_a_fitting_image_is_unchanged(tmp_path: Path) -> None:
    assert (read(save(Image.fromarray(RAMP), tmp_path / "a.png"), 3, 4, 6) == RAMP).all()


def test_bytes_are_read_like_a_file() -> None:
    buffer = io.BytesIO()
    Image.fromarray(RAMP).save(buffer, "png")
    assert (read(buffer.getvalue(), 3, 4, 6) == RAMP).all()


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [(2, RAMP[:, ::-1]), (3, RAMP[::-1, ::-1]), (6, np.rot90(RAMP, -1)), (8, np.rot90(RAMP))],
)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int, turned: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(Image.fromarray(RAMP), tmp_path / "a.png", exif=exif)
    assert (read(path, 3, *turned.shape[:2]) == turned).all()


def test_alpha_is_composited_on_white(tmp_path: Path) -> None:
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 128]]], dtype=np.uint8)
    found = read(save(Image.fromarray(pixels), tmp_path / "a.png"), 3, 1, 3)
    assert found[0].tolist() == [[10, 20, 30], [255, 255, 255], [127, 127, 127]]


def test_a_palette_becomes_its_colours_and_its_transparent_entry_white(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8)).convert("P")
    image.putpalette([200, 0, 0, 0, 100, 0, 0, 0, 50])
    assert read(save(image, tmp_path / "a.png"), 3, 1, 3)[0].tolist() == [[200, 0, 0], [0, 100, 0], [0, 0, 50]]
    see_through = save(image, tmp_path / "b.png", transparency=1)
    assert read(see_through, 3, 1, 3)[0].tolist() == [[200, 0, 0], [255, 255, 255], [0, 0, 50]]


def test_grey_becomes_three_equal_channels_and_colour_becomes_luma(tmp_path: Path) -> None:
    grey = save(Image.fromarray(np.array([[0, 90]], dtype=np.uint8)), tmp_path / "a.png")
    assert read(grey, 3, 1, 2)[0].tolist() == [[0, 0, 0], [90, 90, 90]]
    red = save(Image.new("RGB", (1, 1), (255, 0, 0)), tmp_path / "b.png")
    assert read(red, 1, 1, 1)[0].tolist() == [[76]]  # 0.299 x 255


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    pixels = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
    found = read(save(Image.fromarray(pixels), tmp_path / "a.png"), 3, 1, 3)
    assert found[0, :, 0].tolist() == [0, 100, 255]


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    path = save(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), tmp_path / "a.tif")
    assert read(path, 3, 8, 8)[0, 0].tolist() == [0, 255, 255]


def test_the_center_is_cropped_of_wide_and_tall_images(tmp_path: Path) -> None:
    wide = save(Image.fromarray(RAMP), tmp_path / "a.png")
    assert (read(wide, 3, 4, 4) == RAMP[:, 1:5]).all()
    tall = save(Image.fromarray(np.ascontiguousarray(RAMP.transpose(1, 0, 2))), tmp_path / "b.png")
    assert (read(tall, 3, 4, 4) == RAMP.transpose(1, 0, 2)[1:5]).all()


def test_the_short_side_is_fitted_to_a_crop_that_is_not_square(tmp_path: Path) -> None:
    halves = np.zeros((40, 100, 3), dtype=np.uint8)
    halves[:, 50:] = 200
    found = read(save(Image.fromarray(halves), tmp_path / "a.png"), 3, 10, 20)
    assert found[:, :8].max() == 0
    assert found[:, 12:].min() == 200


def test_reduction_averages_and_does_not_alias(tmp_path: Path) -> None:
    board = np.indices((256, 256)).sum(axis=0) % 2 * 255
    path = save(Image.fromarray(board.astype(np.uint8)), tmp_path / "a.png")
    found = read(path, 1, 16, 16).astype(int)
    assert found.min() >= 126
    assert found.max() <= 129


def test_small_images_are_enlarged(tmp_path: Path) -> None:
    path = save(Image.new("RGB", (3, 5), (9, 8, 7)), tmp_path / "a.png")
    assert (read(path, 3, 16, 16) == [9, 8, 7]).all()


def test_a_large_turned_jpeg_fills_a_wide_crop(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((800, 400, 3), dtype=np.uint8)
    pixels[400:] = 250  # turned clockwise, the bright half is on the left
    path = save(Image.fromarray(pixels), tmp_path / "a.jpg", exif=exif, quality=95)
    found = read(path, 3, 16, 32)
    assert found[:, :14].min() > 240
    assert found[:, 18:].max() < 10


@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str) -> None:
    path = save(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), tmp_path / "bad.png")
    content = {"empty": b"", "text": b"not an image", "truncated": path.read_bytes()[:2000]}[damage]
    path.write_bytes(content)
    with pytest.raises(CorruptImageError, match=r"bad\.png") as error:
        load_sample(path, sample_shape=(3, 8, 8), where=str(path))
    assert "\n" not in str(error.value)


def photo(width: int, height: int) -> Image.Image:
    """Smooth, so that resampling matters, and different everywhere."""
    rows, columns = np.mgrid[:height, :width]
    channels = [rows * 3 + columns, rows + columns * 2, 40 * np.sin(rows / 9) * np.cos(columns / 7) + 120]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def cropped(path: Path, crop: Any, number: int = 0, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    sample = load_sample(path, sample_shape=(3, *size), where="a", crop=crop, number=number)
    return ((sample + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)


@pytest.mark.parametrize(("width", "height"), [(100, 70), (33, 90), (31, 31), (16, 20), (9, 12), (129, 64)])
def test_adm_crop_is_the_published_one_step_by_step(tmp_path: Path, width: int, height: int) -> None:
    """By hand, for 16 px: halve with boxes while the short side is 32 or more, then bicubic, then the center."""
    image = photo(width, height)
    while min(image.size) >= 32:
        image = image.resize((image.size[0] // 2, image.size[1] // 2), Image.Resampling.BOX)
    factor = 16 / min(image.size)
    image = image.resize((round(image.size[0] * factor), round(image.size[1] * factor)), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    top, left = (pixels.shape[0] - 16) // 2, (pixels.shape[1] - 16) // 2
    expected = pixels[top : top + 16, left : left + 16]
    path = save(photo(width, height), tmp_path / "a.png")
    assert (cropped(path, "adm") == expected).all()


def test_adm_crop_decodes_a_jpeg_in_full(tmp_path: Path) -> None:
    path = save(photo(200, 160), tmp_path / "a.jpg", quality=60)
    with Image.open(path) as image:
        same = save(image.convert("RGB"), tmp_path / "b.png")
    assert (cropped(path, "adm") == cropped(same, "adm")).all()
    assert (cropped(path, "center") != cropped(same, "center")).any(), "the quick way differs"


def test_random_crop_is_a_place_keyed_to_the_number(tmp_path: Path) -> None:
    image = Image.fromarray(np.tile(np.arange(48, dtype=np.uint8)[None, :, None], (16, 1, 3)))
    path = save(image, tmp_path / "a.png")
    lefts = [int(cropped(path, "random", number)[0, 0, 0]) for number in range(200)]
    assert set(lefts) == set(range(33)), "every place, the borders included"
    assert lefts == [int(cropped(path, "random", number)[0, 0, 0]) for number in range(200)]
    assert 14 < np.mean(lefts) < 18
    upright = save(image.transpose(Image.Transpose.TRANSPOSE), tmp_path / "b.png")
    tops = [int(cropped(upright, "random", number)[0, 0, 0]) for number in range(50)]
    assert min(tops) < 5 and max(tops) > 27


def test_random_crop_of_a_fitting_image_is_the_image(tmp_path: Path) -> None:
    path = save(photo(16, 16), tmp_path / "a.png")
    assert (cropped(path, "random", 3) == np.asarray(photo(16, 16))).all()
