# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files of pictures without their metadata: what Pillow may read, and how the metadata turns the picture.

Notable:
- Pillow parses EXIF, profiles and texts when it opens a file. Damage in them, or a long text, then makes the whole
  picture unreadable. Pillow gets only the parts of a JPEG, PNG or TIFF that it decodes, and the pixels are not copied.
- The orientation is EXIF tag 0x0112 of the first directory, read without the other tags. Without that tag, XMP has it,
  as in Pillow. Values other than 1 to 8 mean upright.
- AVIF and HEIC files turn their pictures themselves (`irot` and `imir`). Their EXIF and XMP only repeat it: ignored.
  Pillow gives the turn of an AVIF as an EXIF of its own (`Format.orientation_in`).
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Collection
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from torchditan.datasets.byte_ranges import ByteRanges, reading

_ORIENTATION = 0x0112
_TIFF_TAGS = frozenset(
    [
        *range(256, 260),  # size, bits, compression
        *(262, 266, 273, 274, 277, 278, 279, 284),  # colours, order of bits, strips, orientation, planes
        *(280, 281, 292, 293, 317, 320, *range(322, 326)),  # range, options of fax, predictor, palette, tiles
        *(338, 339, 340, 341, 347, *range(512, 522), *range(529, 533)),  # alpha, numbers, range, JPEG, YCbCr
        *(332, 700, 37439, 50674),  # inks, XMP, parameters of LogLuv and LERC
    ]
)
"""Tags of a TIFF that decoding needs, or that may have the orientation."""
_MOST_METADATA = 1 << 20
"""Bytes of a text or an EXIF block in a PNG that are searched for the orientation."""
_XMP_IN_JPEG = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


class Stripped(NamedTuple):
    """A file without its metadata, and the metadata that may have the orientation."""

    file: ByteRanges | BinaryIO
    exif: bytes = b""
    xmp: bytes = b""


def strip(file: BinaryIO) -> Stripped:
    """The parts of a picture's file that Pillow may read."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(12)
    if start.startswith(b"\xff\xd8\xff"):
        return _strip_jpeg(file, size)
    if start.startswith(b"\x89PNG\r\n\x1a\n"):
        return _strip_png(file, size)
    if start[4:8] == b"ftyp":
        return _strip_boxes(file)
    if start[:4] in (b"II*\0", b"MM\0*"):
        return Stripped(ByteRanges(reading(file), _strip_tiff(file, size)))
    return Stripped(ByteRanges(reading(file), [(0, size)]))


def orientation_of(image: Image.Image, stripped: Stripped, sources: Collection[str]) -> int:
    """1 to 8, from those metadata of an opened picture that count ("exif", "xmp"); 1 is upright."""
    value: Any = None
    if image.format == "TIFF":
        value = image.tag_v2.get(_ORIENTATION)  # type: ignore[attr-defined]
    elif "exif" in sources:
        value = _tag_in(stripped.exif or image.info.get("exif", b""))
    xmp = stripped.xmp or image.info.get("xmp")
    if value is None and isinstance(xmp, bytes) and "xmp" in sources:
        match = _XMP_ORIENTATION.search(xmp)
        value = None if match is None else int(match[1])
    return int(value) if value in range(1, 9) else 1


def _tag_in(exif: bytes) -> int | None:
    """The value of the orientation's tag; None if the EXIF has none, or is damaged before it."""
    while exif.startswith(b"Exif\0\0"):  # some files repeat it
        exif = exif[6:]
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (first,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, first)
        for entry in range(first + 2, first + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, entry)
            if tag == _ORIENTATION:
                value = {1: "B", 3: "H", 4: "I"}.get(kind)  # byte, short, long; others are not an orientation
                return 0 if value is None else int(struct.unpack_from(order + value, exif, entry + 8)[0])
    except struct.error:
        pass
    return None


def _strip_jpeg(file: BinaryIO, size: int) -> Stripped:
    """Without application segments, except those that determine the colours (JFIF and Adobe), and comments."""
    parts: list[tuple[int, int] | bytes] = [(0, 2)]
    place = 2
    exif = xmp = b""
    while True:
        file.seek(place)
        head = file.read(4)
        if head[:2] == b"\xff\xff":  # padding
            place += 1
            continue
        end = place + 2 + int.from_bytes(head[2:], "big")
        if len(head) < 4 or head[0] != 0xFF or head[1] in (0x00, 0x01, *range(0xD0, 0xDB)):
            break  # the pixels, or damage
        if not place + 4 <= end <= size:
            break
        if head[1] == 0xE1:
            content = file.read(end - place - 4)
            if content.startswith(b"Exif\0\0"):
                exif = exif or content
            elif content.startswith(_XMP_IN_JPEG):
                xmp = xmp or content
        if head[1] in (0xE0, 0xEE) or not (0xE0 <= head[1] <= 0xEF or head[1] == 0xFE):
            parts.append((place, end))
        place = end
    return Stripped(ByteRanges(reading(file), [*parts, (place, size)]), exif, xmp)


def _strip_png(file: BinaryIO, size: int) -> Stripped:
    """Without ancillary chunks, except transparency."""
    parts: list[tuple[int, int] | bytes] = [(0, 8)]
    place = 8
    exif = profile = xmp = b""
    while place + 8 <= size:
        file.seek(place)
        head = file.read(8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"eXIf":
            exif = exif or file.read(min(length, _MOST_METADATA))
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            key, text = _read_text(kind, file.read(min(length, _MOST_METADATA)))
            if key == b"XML:com.adobe.xmp":
                xmp = xmp or text
            elif key == b"Raw profile type exif":
                profile = profile or _from_hex(text)
        end = min(place + 12 + length, size)
        if kind == b"tRNS" or not kind.isalpha() or not kind[0] & 0x20:
            parts.append((place, end))
        place = end
        if kind == b"IEND":
            break
    return Stripped(ByteRanges(reading(file), parts), exif or profile, xmp)


def _read_text(kind: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Keyword and text of a chunk. The text is empty if it is damaged."""
    key, _, text = chunk.partition(b"\0")
    if key not in (b"XML:com.adobe.xmp", b"Raw profile type exif"):
        return key, b""
    is_compressed = kind == b"zTXt" or (kind == b"iTXt" and text[:1] == b"\1")
    if kind == b"iTXt":  # flag, method, language, translated keyword
        text = text[2:].split(b"\0", 2)[-1]
    elif kind == b"zTXt":  # method
        text = text[1:]
    try:
        return key, zlib.decompressobj().decompress(text, _MOST_METADATA) if is_compressed else text
    except zlib.error:
        return key, b""


def _from_hex(profile: bytes) -> bytes:
    """The EXIF in ImageMagick's form: a line of its name, one of its length, and lines of hexadecimal digits."""
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""


def _strip_tiff(file: BinaryIO, size: int) -> list[tuple[int, int] | bytes]:
    """With only the tags in `_TIFF_TAGS`, and only the first of its pictures."""
    file.seek(0)
    order = "<" if file.read(2) == b"II" else ">"
    file.seek(4)
    (first,) = struct.unpack(f"{order}I", file.read(4))
    file.seek(first)
    head = file.read(2)
    tags = file.read(12 * struct.unpack(f"{order}H", head)[0]) if len(head) == 2 else b""
    entries = [tags[place : place + 12] for place in range(0, len(tags), 12)]
    kept = [entry for entry in entries if len(entry) == 12 and struct.unpack(f"{order}H", entry[:2])[0] in _TIFF_TAGS]
    if not kept or first < 8:
        return [(0, size)]  # damage
    directory = struct.pack(f"{order}H", len(kept)) + b"".join(kept) + bytes(4)
    return [(0, first), directory, (first + len(directory), size)]


def _strip_boxes(file: BinaryIO) -> Stripped:
    """An AVIF or HEIC whose item of EXIF has another type, so that its reader does not parse it.

    Raises:
        OSError: the end is missing.
    """
    file.seek(0)
    data = bytearray(file.read())
    place = 0
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if length == 1 and place + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, place + 8)
        end = len(data) if length == 0 else place + length
        if end > len(data) and kind in (b"meta", b"mdat"):
            raise OSError("image file is truncated")
        if length not in (0, *range(8, len(data) - place + 1)):
            break
        if kind == b"meta":
            data[place:end] = data[place:end].replace(b"Exif", b"skip")
        place = end
    return Stripped(io.BytesIO(data))


def transpose(image: Image.Image, orientation: int) -> Image.Image:
    """An image as displayed, from the image as stored."""
    turn: dict[int, Any] = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    return image if orientation == 1 else image.transpose(turn[orientation])
