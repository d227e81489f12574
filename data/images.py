# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded image -> sample: decode, orient, resize, crop, scale. Uses only Pillow and NumPy.

Notable:
- All files become 8-bit RGB or grey: the orientation is applied, palettes and CMYK are converted, grey of more than 8
  bits is scaled, transparency is composited on white. Metadata cannot make a picture unreadable (containers.py).
- Grey numbers without a range of their own (float and 32-bit TIFFs) have the range that their file declares, else the
  smallest usual one that holds them. Others are refused.
- The short side is scaled to the crop, and the center is cut out. With `dataset.crop` "random" the image's number
  determines the part. Large reductions first average boxes of pixels, then resample bicubically with antialiasing,
  which is fast and avoids moire.
- `dataset.crop` "adm" resamples exactly as ADM prepared ImageNet (Dhariwal and Nichol 2021), like most work since then.
  Use it to compare with the latents and reference statistics of others. The orientation is applied first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets.containers import Stripped, orientation_of, strip, transpose
from torchditan.errors import ConfigError
from torchditan.randomness import generator

Crop = Literal["center", "adm", "random"]


@dataclass(frozen=True)
class Format:
    """A format of pictures that Pillow reads, by itself or with a plug-in."""

    name: str
    """As Pillow calls it."""
    suffixes: tuple[str, ...]
    """Packed pictures get the first one."""
    is_available: bool = True
    """On this machine."""
    install: str = ""
    """Command that makes it available."""
    magic: bytes = b""
    """Pattern of the first 12 bytes: names what to install for a picture of any name, as `IMG_0001.JPG` of a phone."""
    plugin: str = ""
    """Module whose import registers the format with Pillow."""
    orientation_in: Collection[str] = ("exif", "xmp")
    """Metadata by which the picture is still to be turned. Empty: the plug-in has turned it."""


FORMATS = (
    Format("BMP", (".bmp",)),
    Format("GIF", (".gif",)),
    Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")),
    Format("PNG", (".png",)),
    Format("PPM", (".ppm",)),
    Format("TIFF", (".tiff", ".tif")),
    Format("WEBP", (".webp",)),
    Format(
        "AVIF",
        (".avif",),
        is_available="avif" in features.modules and bool(features.check("avif")),
        install="pip install 'pillow>=11.3'",
        magic=rb"....ftyp(avif|avis)",
        orientation_in=("exif",),
    ),
    Format(
        "HEIF",
        (".heic", ".heif", ".hif"),
        is_available=find_spec("pillow_heif") is not None,
        install="pip install 'torchditan[heic]'",
        magic=rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)",
        plugin="pillow_heif.HeifImagePlugin",
        orientation_in=(),
    ),
)
"""Pillow tries only these, by content: it would pass an EPS to Ghostscript, which runs it."""
IMAGE_SUFFIXES = frozenset(suffix for kind in FORMATS if kind.is_available for suffix in kind.suffixes)
"""Of the images that can be read on this machine."""
HOW_TO_READ = {suffix: kind.install for kind in FORMATS if not kind.is_available for suffix in kind.suffixes}
"""Suffix -> the command that makes its images readable on this machine."""
_OVERSHOOT = 0.1
"""Share of the range that resampled float values may lie outside of it; they are clipped."""


def describe_files(counts: Mapping[str, int]) -> str:
    """`6 .heic (pip install 'torchditan[heic]'), 3 .txt` of numbers of files by suffix."""
    hints = {**HOW_TO_READ, **{suffix: "decompress to .tar" for suffix in counts if re.match(r"\.tar\.|\.tgz", suffix)}}
    found = [(count, suffix) for suffix, count in sorted(counts.items()) if count]
    shown = {suffix: f" ({hints[suffix]})" for _, suffix in found if suffix in hints}
    return ", ".join(f"{count:,} {suffix or 'without suffix'}{shown.get(suffix, '')}" for count, suffix in found)


class UnreadableError(Exception):
    """A picture cannot be read; the message is the reason, in one line."""


class Picture:
    """An opened picture, not yet decoded."""

    def __init__(self, image: Image.Image, stripped: Stripped) -> None:
        self.image = image
        name = "JPEG" if image.format == "MPO" else image.format  # an MPO is JPEGs; the first one is read
        self.format = next(kind for kind in FORMATS if kind.name == name)
        self.orientation = orientation_of(image, stripped, self.format.orientation_in)
        width, height = image.size
        if image.format == "TIFF":
            tags = cast(Any, image).tag_v2
            width, height = tags[_WIDTH], tags[_HEIGHT]  # as stored: versions of Pillow differ in `size`
            cast(Any, image).getexif = Image.Exif  # Pillow would turn it while decoding, and read all tags for that
        if image.format == "PNG" and "transparency" in image.info:
            raw_mode = cast(Any, image).tile[0][3]  # Pillow scales pixels to 8 bits, but not their transparent value
            image.info["transparency"] *= {"L;2": 85, "L;4": 17}.get(raw_mode, 1)
        self.size = (height, width) if self.orientation < 5 else (width, height)
        """Height and width as displayed."""

    def decode(self, *, channels: int) -> Image.Image:
        """The picture as displayed, in RGB (3 channels) or grey (1). Transparency becomes white."""
        return transpose(convert(self.image, channels=channels), self.orientation)


@contextlib.contextmanager
def open_picture(source: str | bytes | BinaryIO) -> Iterator[Picture]:
    """A picture of a format in `IMAGE_SUFFIXES`: a path, its bytes, or an open file, which stays open.

    Raises:
        UnreadableError: it cannot be opened, or not be decoded in the body. Libraries raise anything for a damaged one.
    """
    try:
        with contextlib.ExitStack() as opened:
            file: BinaryIO
            if isinstance(source, bytes):
                file = io.BytesIO(source)
            elif isinstance(source, str):
                file = opened.enter_context(open(source, "rb"))
            else:
                file = source
            _check_webp(file)
            stripped = strip(file)
            try:
                image = opened.enter_context(Image.open(cast(Any, stripped.file), formats=_known_to_pillow()))
            except UnidentifiedImageError as error:
                raise UnreadableError(_why_unidentified(file)) from error
            yield Picture(image, stripped)
    except (ConfigError, UnreadableError, MemoryError):
        raise
    except Exception as error:
        text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
        raise UnreadableError((text.strip() or type(error).__name__).splitlines()[0]) from error


def _why_unidentified(file: BinaryIO) -> str:
    file.seek(0)
    header = file.read(12)
    for kind in FORMATS:
        if not kind.is_available and kind.magic and re.match(kind.magic, header, re.DOTALL):
            return f"{kind.suffixes[0]}: {kind.install}"
    return "unknown format"


@functools.cache
def _known_to_pillow() -> list[str]:
    """Names of the formats that can be read on this machine, with their plug-ins registered."""
    available = [kind for kind in FORMATS if kind.is_available]
    for kind in available:
        if kind.plugin:
            importlib.import_module(kind.plugin)
    return [kind.name for kind in available]


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
    data: bytes,
    *,
    sample_shape: tuple[int, ...],
    where: str,
    crop: Crop = "center",
    number: int = 0,
) -> np.ndarray:
    """Decode an image to float32 (C, H, W) in [-1, 1].

    Args:
        data: the encoded image.
        sample_shape: (C, H, W).
        where: name of the image in an error.
        crop: `dataset.crop`.
        number: the image's number in its dataset, which determines a random crop.

    Raises:
        CorruptImageError: it cannot be decoded.
    """
    try:
        with open_picture(data) as picture:
            if picture.image.format == "JPEG" and crop != "adm":  # decodes at 1/2, 1/4 or 1/8 if that is twice the crop
                side = 2 * max(sample_shape[1:])  # for both sides: the orientation may turn the image
                picture.image.draft(None, (side, side))
            return fit(picture.decode(channels=sample_shape[0]), sample_shape=sample_shape, crop=crop, number=number)
    except UnreadableError as error:
        raise corrupt_image(where, str(error)) from error


def corrupt_image(where: str, reason: str) -> CorruptImageError:
    """The error for one image; `where` names it."""
    right = "repair or remove it, or skip unreadable images with --dataset.corrupt_images skip"
    message = f"{where}: not a readable image ({reason}); {right}"
    return CorruptImageError(message, named=f"{where} ({reason})")


def fit(image: Image.Image, *, sample_shape: tuple[int, ...], crop: Crop, number: int) -> np.ndarray:
    """Resize and crop one upright image, converted by `convert`, to float32 (C, H, W) in [-1, 1]."""
    _, height, width = sample_shape
    resize = resize_as_adm if crop == "adm" else resize_to_cover
    image = resize(image, height=height, width=width)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if crop == "random":
        draws = generator(0, "crop", number)
        left, top = int(draws.integers(image.width - width + 1)), int(draws.integers(image.height - height + 1))
    return to_sample(np.asarray(image.crop((left, top, left + width, top + height))))


def convert(image: Image.Image, *, channels: int) -> Image.Image:
    """Convert any mode to RGB (3 channels) or grey (1). Transparency becomes white."""
    if image.mode[0] in "FI" or (image.format == "TIFF" and _tag(image, _SAMPLE_FORMAT, 1) == _SIGNED):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode == "P":
        image = image.convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


# Tags of a TIFF.
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SAMPLE_FORMAT, _LOWEST, _HIGHEST = 256, 257, 258, 262, 339, 340, 341
_WHITE_IS_ZERO, _SIGNED = 0, 2


def _tag(image: Image.Image, tag: int, default: Any) -> Any:
    """The first value of a tag of a TIFF; `default` if it has none, or the image is not a TIFF."""
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return value[0] if isinstance(value, tuple) and value else value


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey floats, or integers of other than 8 unsigned bits -> 8 bits.

    Raises:
        ValueError: the range of the values is not known.
    """
    values = np.asarray(image)
    if image.mode == "I" and _tag(image, _SAMPLE_FORMAT, _SIGNED) != _SIGNED:  # Pillow has only signed ones
        values = values.view(np.uint32)
    elif image.mode == "L":
        values = values.view(np.int8)
    if not np.isfinite(values).all():
        raise ValueError("it has values that are not finite numbers")
    low, high = _range_of(values, image)
    if image.mode != "L" and _tag(image, _PHOTOMETRIC, 1) == _WHITE_IS_ZERO:
        low, high = high, low
    grey = ((values.astype(np.float64) - low) / (high - low) * 255 + 0.5).clip(0, 255)
    if isinstance(transparent := image.info.get("transparency"), int):
        grey[values == transparent] = 255
    return Image.fromarray(grey.astype(np.uint8))


def _range_of(values: np.ndarray, image: Image.Image) -> tuple[float, float]:
    """The values of black and white: those of the file's format, those that it declares, or the smallest usual ones.

    Raises:
        ValueError: no such range fits these values.
    """
    bits = _tag(image, _BITS, 16)
    is_float = image.mode == "F"
    if not is_float and (image.format != "TIFF" or image.mode.startswith("I;16")):
        return 0, 2**bits - 1
    lowest, highest = float(values.min()), float(values.max())
    declared = _tag(image, _LOWEST, None), _tag(image, _HIGHEST, None)
    if None not in declared and declared[0] <= lowest <= highest <= declared[1] and declared[0] < declared[1]:
        return float(declared[0]), float(declared[1])
    limit = 2 ** (bits - (values.dtype.kind == "i")) - 1
    usual = [1, 255, 65535] if is_float else [*(top for top in (255, 65535) if top < limit), limit]
    overshoot = _OVERSHOOT if is_float else 0.0
    for top in usual:
        if -overshoot * top <= lowest and highest <= (1 + overshoot) * top:
            if top == 1 or highest == 0 or highest >= top / 8:
                return 0, top
            break
    ranges = ", ".join(f"0 to {top}" for top in usual)
    raise ValueError(
        f"grey values from {lowest:g} to {highest:g} are in no usual range ({ranges}); save it with 8 bits"
    )


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
