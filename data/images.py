# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded image -> sample: decode, orient, resize, crop, scale. Uses only Pillow and NumPy.

Notable:
- All files become 8-bit RGB or grey: EXIF orientation is applied, palettes and CMYK are converted, 16 bits are scaled
  to 8, transparency is composited on white.
- The short side is scaled to the crop, and the center is cut out. With `dataset.crop` "random" the image's number
  determines the part. Large reductions first average boxes of pixels, then resample bicubically with antialiasing,
  which is fast and avoids moire.
- `dataset.crop` "adm" resamples exactly as ADM prepared ImageNet (Dhariwal and Nichol 2021), like most work since then.
  Use it to compare with the latents and reference statistics of others. EXIF orientation is applied first.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from torchditan.data_stream.datasets import CorruptImageError
from torchditan.randomness import generator

Crop = Literal["center", "adm", "random"]
IMAGE_SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"])
# Pillow detects formats by content, not by suffix, and would pass an EPS to Ghostscript, which runs it.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Errors that Pillow raises for damaged files.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class Encoded(Protocol):
    """An encoded image or video."""

    def open(self) -> BinaryIO: ...


class _Bounded:
    """A file that asks for no more bytes than are left. Python reserves what a damaged PNG asks for, up to 4 GiB."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read
        self._size = file.seek(0, io.SEEK_END)
        file.seek(0)

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self.tell())
        return self._read(left if count < 0 else min(count, left))


@contextlib.contextmanager
def open_picture(source: str | Path | bytes | BinaryIO) -> Iterator[Image.Image]:
    """A picture of a format in `IMAGE_SUFFIXES`, not yet decoded: a path, its bytes, or an open file, which stays open.

    Raises:
        UnidentifiedImageError: of another format.
        Exception: one of `DECODE_ERRORS`, here or when it is decoded.
    """
    with contextlib.ExitStack() as opened:
        file: BinaryIO
        if isinstance(source, bytes):
            file = io.BytesIO(source)
        elif isinstance(source, (str, Path)):
            file = opened.enter_context(Path(source).open("rb"))
        else:
            file = source
        _check_webp(file)
        yield opened.enter_context(Image.open(cast(Any, _Bounded(file)), formats=_FORMATS))


def _check_webp(file: BinaryIO) -> None:
    """Refuse a WebP that is too large for Pillow, which allocates its canvas before it checks the size."""
    file.seek(0)
    header = file.read(30)
    if header[:4] != b"RIFF" or header[8:12] != b"WEBP" or len(header) < 30:
        return

    def number(start: int, end: int) -> int:
        return int.from_bytes(header[start:end], "little")

    sizes = {  # RFC 9649; the first two are stored less one
        b"VP8X": (number(24, 27), number(27, 30)),
        b"VP8L": (number(21, 25) & 0x3FFF, number(21, 25) >> 14 & 0x3FFF),
        b"VP8 ": (number(26, 28) & 0x3FFF, number(28, 30) & 0x3FFF),
    }
    width, height = sizes.get(header[12:16], (0, 0))
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and (width + 1) * (height + 1) > 2 * limit:
        raise Image.DecompressionBombError(f"{width:,} x {height:,} pixels; the limit is {2 * limit:,}")


def load_sample(
    source: Path | bytes,
    *,
    sample_shape: tuple[int, ...],
    where: str,
    crop: Crop = "center",
    number: int = 0,
    can_skip: bool = True,
) -> np.ndarray:
    """Decode a file or its bytes to float32 (C, H, W) in [-1, 1].

    Args:
        source: the encoded image.
        sample_shape: (C, H, W).
        where: name of the image in an error.
        crop: `dataset.crop`.
        number: the image's number in its dataset, which determines a random crop.
        can_skip: whether the error suggests `dataset.corrupt_images skip`.

    Raises:
        CorruptImageError: it cannot be decoded.
    """
    try:
        with open_picture(source) as image:
            if image.format == "JPEG" and crop != "adm":  # decodes at 1/2, 1/4 or 1/8 if that is twice the crop
                side = 2 * max(sample_shape[1:])  # for both sides: EXIF may rotate the image
                image.draft(None, (side, side))
            return fit(image, sample_shape=sample_shape, crop=crop, number=number)
    except UnidentifiedImageError as error:
        raise corrupt_image(where, "unknown format", can_skip=can_skip) from error
    except DECODE_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise corrupt_image(where, reason, can_skip=can_skip) from error


def corrupt_image(where: str, reason: str, *, can_skip: bool = True) -> CorruptImageError:
    """The error for one image; `where` names it."""
    skip = ", or skip unreadable images with --dataset.corrupt_images skip" if can_skip else ""
    return CorruptImageError(f"{where}: not a readable image ({reason}); repair or remove it{skip}")


def fit(image: Image.Image, *, sample_shape: tuple[int, ...], crop: Crop, number: int) -> np.ndarray:
    """Orient, convert, resize and crop one image to float32 (C, H, W) in [-1, 1]."""
    channels, height, width = sample_shape
    image = convert(ImageOps.exif_transpose(image), channels=channels)
    resize = resize_as_adm if crop == "adm" else resize_to_cover
    image = resize(image, height=height, width=width)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if crop == "random":
        draws = generator(0, "crop", number)
        left, top = int(draws.integers(image.width - width + 1)), int(draws.integers(image.height - height + 1))
    return to_sample(np.asarray(image.crop((left, top, left + width, top + height))))


def convert(image: Image.Image, *, channels: int) -> Image.Image:
    """Convert any mode to RGB (3 channels) or grey (1). Transparency becomes white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16-bit greyscale, which Pillow would clip to white.
        image = Image.fromarray((np.asarray(image).astype(np.float64) / 257 + 0.5).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if image.mode == "P" else image.mode).convert("L" if channels == 1 else "RGB")


def resize_to_cover(image: Image.Image, *, height: int, width: int) -> Image.Image:
    """Scale until the image just covers (height, width)."""
    while image.width >= 2 * 2 * width and image.height >= 2 * 2 * height:
        image = image.reduce(2)
    scale = max(width / image.width, height / image.height)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return image if covering == image.size else image.resize(covering, Image.Resampling.BICUBIC)


def resize_as_adm(image: Image.Image, *, height: int, width: int) -> Image.Image:
    """Scale until the image just covers (height, width), as in ADM: halve while twice as large, then bicubic."""
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def to_sample(pixels: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) or (H, W) in 0..255 to float32 (C, H, W) in [-1, 1]."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / 127.5 - 1.0
