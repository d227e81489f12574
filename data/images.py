# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From an encoded image to a sample: decode, orient, resize, crop, scale. Pillow and NumPy only.

Notable:
- Every kind of file ends as 8-bit RGB or grey: EXIF orientation is applied, palettes and CMYK are
  converted, 16 bits are scaled to 8, transparency is composited on white.
- The short side is fitted to the crop and the center is cut out. Large reductions first average whole
  boxes of pixels, then resample bicubically with antialiasing: fast, and without moire.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from torchditan.stream import CorruptImageError

IMAGE_SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"])
# What Pillow raises on damaged files.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def load_sample(source: Path | bytes, *, sample_shape: tuple[int, ...], where: str) -> np.ndarray:
    """Decode a file or its bytes to float32 (C, H, W) in [-1, 1]; `where` names it in an error."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.format == "JPEG":  # decodes at 1/2, 1/4 or 1/8 where that is still twice the crop
                side = 2 * max(sample_shape[1:])  # of either side: EXIF may turn the image
                image.draft(None, (side, side))
            return fit(image, sample_shape=sample_shape)
    except UnidentifiedImageError as error:
        raise corrupt_image(where, "of no known format") from error
    except DECODE_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise corrupt_image(where, reason) from error


def corrupt_image(where: str, reason: str) -> CorruptImageError:
    """The refusal of one image; `where` names it."""
    skip = "--dataset.corrupt_images skip"
    return CorruptImageError(f"{where}: not a readable image ({reason}); repair or remove it, or skip such with {skip}")


def fit(image: Image.Image, *, sample_shape: tuple[int, ...]) -> np.ndarray:
    """Orient, convert, resize and center-crop one image to float32 (C, H, W) in [-1, 1]."""
    channels, height, width = sample_shape
    image = convert(ImageOps.exif_transpose(image), channels=channels)
    return to_sample(np.asarray(resize_and_crop(image, height=height, width=width)))


def convert(image: Image.Image, *, channels: int) -> Image.Image:
    """Any mode to RGB (3 channels) or grey (1); transparency becomes white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16-bit greyscale; Pillow alone would clip it to white.
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257 + 0.5).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if image.mode == "P" else image.mode).convert("L" if channels == 1 else "RGB")


def resize_and_crop(image: Image.Image, *, height: int, width: int) -> Image.Image:
    """Scale until the image just covers (height, width), then cut out the center."""
    while image.width >= 2 * 2 * width and image.height >= 2 * 2 * height:
        image = image.reduce(2)
    scale = max(width / image.width, height / image.height)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    if covering != image.size:
        image = image.resize(covering, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_sample(pixels: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) or (H, W) in 0..255 to float32 (C, H, W) in [-1, 1]."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / 127.5 - 1.0
