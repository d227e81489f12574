# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Decoding, orientation, conversion, resizing and cropping, exact to the pixel."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, features
from PIL.PngImagePlugin import PngInfo

from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets import images
from torchditan.datasets.images import HOW_TO_READ, IMAGE_SUFFIXES, UnreadableError, load_sample, open_picture

RAMP = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3


def read(data: bytes | np.ndarray, *shape: int) -> np.ndarray:
    """Load a file, or pixels, and undo the scaling: uint8 (H, W, C)."""
    data = data if isinstance(data, bytes) else encoded("PNG", Image.fromarray(data))
    sample = load_sample(data, sample_shape=shape, where="a")
    assert sample.dtype == np.float32
    assert sample.shape == shape
    return ((sample + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)


def test_pixels_are_scaled_to_minus_one_and_one() -> None:
    data = encoded("PNG", Image.fromarray(np.array([[[0, 255, 51]]], dtype=np.uint8)))
    sample = load_sample(data, sample_shape=(3, 1, 1), where="a")
    np.testing.assert_allclose(sample[:, 0, 0], [-1.0, 1.0, -0.6], atol=1e-6)


TURNED = {
    1: RAMP,
    2: RAMP[:, ::-1],
    3: RAMP[::-1, ::-1],
    4: RAMP[::-1],
    5: RAMP.transpose(1, 0, 2),
    6: np.rot90(RAMP, -1),
    7: RAMP[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(RAMP),
}
"""Orientation -> what is displayed of RAMP."""


def exif_of(*entries: tuple[int, int, int, int], order: str = "<") -> bytes:
    """EXIF of these tags: (tag, type, count, value or offset)."""
    packed = b"".join(
        struct.pack(f"{order}HHIHH", *entry, 0) if entry[1:3] == (3, 1) else struct.pack(f"{order}HHII", *entry)
        for entry in entries
    )
    start = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(entries))
    return b"Exif\0\0" + start + packed + bytes(4) + bytes(range(200))


def encoded(kind: str, image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_exif(kind: str, exif: bytes) -> bytes:
    """RAMP in a file with this EXIF, whatever it is."""
    image = Image.fromarray(RAMP)
    if kind == "TIFF":  # has the tags of the EXIF, from the second one on, among its own
        data, tags = encoded("TIFF", image), exif[16:-204]
        place = int.from_bytes(data[4:8], "little")
        count = int.from_bytes(data[place : place + 2], "little")
        directory = (count + len(tags) // 12).to_bytes(2, "little") + data[place + 2 : place + 2 + 12 * count] + tags
        return data[:4] + len(data).to_bytes(4, "little") + data[8:] + directory + bytes(204)
    if kind == "WEBP":
        return encoded(kind, image, lossless=True, exif=exif)
    data = encoded(
        "JPEG" if kind == "JPEG" else "PNG", image, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {})
    )
    if kind == "JPEG":
        return data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + data[2:]
    place = 33 if kind == "PNG" else len(data) - 12  # after the header, or before the end
    return data[:place] + chunk(b"eXIf", exif[6:]) + data[place:]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def is_shown(data: bytes, expected: np.ndarray, *, tolerance: int = 0) -> None:
    """Its pixels, and the size that a bucket is chosen by."""
    with open_picture(data) as picture:
        assert picture.size == expected.shape[:2]
    found = read(data, 3, *expected.shape[:2]).astype(int)
    assert np.abs(found - expected).max() <= tolerance


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "PNG, at its end", "WEBP"])
def test_the_orientation_is_applied(kind: str, orientation: int) -> None:
    for order in "<>":
        is_shown(with_exif(kind, exif_of((0x112, 3, 1, orientation), order=order)), TURNED[orientation], tolerance=9)


@pytest.mark.parametrize("orientation", TURNED)
def test_the_orientation_is_applied_once_whoever_applies_it(orientation: int) -> None:
    """TIFFs are turned by Pillow, HEICs by libheif, AVIFs say it in boxes of their own."""
    image, turned = Image.fromarray(RAMP), TURNED[orientation]
    tags = Image.Exif()
    tags[0x112], tags[0x10E] = orientation, "a description"  # something that is left if the orientation is taken out
    exif = tags.tobytes()
    for compression in ("raw", "tiff_lzw"):
        is_shown(encoded("TIFF", image, tiffinfo={0x112: orientation}, compression=compression), turned)
    is_shown(encoded("MPO", image, exif=exif, quality=100, subsampling=0), turned, tolerance=9)
    pillow_heif.register_heif_opener()
    large = np.kron(turned, np.ones((16, 16, 1), dtype=np.uint8))
    image = Image.fromarray(np.kron(RAMP, np.ones((16, 16, 1), dtype=np.uint8)))
    for kind in ["HEIF", *(["AVIF"] if ".avif" in IMAGE_SUFFIXES else [])]:
        data = encoded(kind, image, exif=exif, quality=95)
        assert orientation == 1 or b"irot" in data or b"imir" in data
        is_shown(data, large, tolerance=40)
        assert data.count(b"MM\0*\0") == 1
        is_shown(data.replace(b"MM\0*\0", b"??\0*\0"), large, tolerance=40)  # libavif refuses such an EXIF


def test_the_orientation_of_xmp_counts_where_exif_has_none() -> None:
    image, xmp = Image.fromarray(RAMP), b'<rdf:Description tiff:Orientation="6"/>'
    is_shown(encoded("WEBP", image, lossless=True, xmp=xmp), TURNED[6])
    is_shown(encoded("JPEG", image, xmp=xmp, quality=100, subsampling=0), TURNED[6], tolerance=9)
    is_shown(encoded("TIFF", image, tiffinfo={700: xmp}), TURNED[6])
    exif = exif_of((0x112, 3, 1, 8))
    for is_compressed in (False, True):
        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", xmp.decode(), zip=is_compressed)
        is_shown(encoded("PNG", image, pnginfo=info), TURNED[6])
        info.add_text("Raw profile type exif", f"\nexif\n{len(exif)}\n{exif.hex()}\n", zip=is_compressed)  # ImageMagick
        is_shown(encoded("PNG", image, pnginfo=info), TURNED[8])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_no_other_tag_and_no_other_value_matters(kind: str) -> None:
    for tag in (0x100, 0x2BC) if kind == "TIFF" else (0x11A, 0x8769):
        for number_type in range(14):
            for count, value in ((0, 0), (1, 200), (2, 6), (2**31, 8), (2**32 - 1, 2**32 - 1)):
                first, second = sorted([(0x112, 3, 1, 6), (tag, number_type, count, value)])
                exif = exif_of(first, second, (0x128, 3, 1, 3))
                is_shown(with_exif(kind, exif), TURNED[6], tolerance=9)
    upright = [exif_of((0x112, 3, 1, value)) for value in (0, 9, 65535)] + [exif_of((0x112, 2, 2, 6))]
    for exif in [*upright, b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0no exif"]:
        is_shown(with_exif(kind, exif), RAMP, tolerance=9)


def test_damage_in_other_metadata_does_not_matter() -> None:
    data = with_exif("JPEG", exif_of((0x112, 3, 1, 6)))
    contents = {b"MPF\0II*\0" + bytes(30): 0xE2, b"Photoshop 3.0\x008BIM": 0xED, b"ICC_PROFILE\0": 0xE2}
    for content, marker in contents.items():
        segment = bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content
        is_shown(data[:2] + segment + data[2:], TURNED[6], tolerance=9)
    data = encoded("PNG", Image.fromarray(RAMP))
    for kind in (b"iCCP", b"zTXt", b"pHYs", b"cHRM", b"gAMA", b"acTL", b"fcTL"):
        is_shown(data[:33] + chunk(kind, b"?\0\1damage") + data[33:], RAMP)


def test_texts_in_a_png_may_have_any_size() -> None:
    info = PngInfo()
    for number in range(2):
        info.add_text(f"workflow {number}", "x" * 34_000_000, zip=True)  # Pillow takes 1 MiB, and 64 MiB together
    info.add_text("prompt", "x" * 3_000_000)
    profile = zlib.compress(bytes(3_000_000))
    data = encoded("PNG", Image.fromarray(RAMP), pnginfo=info)
    is_shown(data[:33] + chunk(b"iCCP", b"big\0\0" + profile) + data[33:], RAMP)


def tiff(
    values: np.ndarray, *, order: str = "<", photometric: int = 1, declared: tuple[float, float] | None = None
) -> bytes:
    """A TIFF of grey values (H, W), without compression."""
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    height, width = values.shape
    tags: list[tuple[int, int, float]] = [(256, 4, width), (257, 4, height), (258, 3, 8 * values.itemsize), (259, 3, 1)]
    tags += [(262, 3, photometric), (273, 4, 0), (277, 3, 1), (278, 4, height), (279, 4, len(data)), (339, 3, kind)]
    tags += [] if declared is None else [(340, 11, declared[0]), (341, 11, declared[1])]
    place = 8 + 2 + 12 * len(tags) + 4
    packed = b""
    for tag, form, value in tags:
        field = {3: "H2x", 4: "I", 11: "f"}[form]
        packed += struct.pack(f"{order}HHI{field}", tag, form, 1, place if tag == 273 else value)
    start = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(tags))
    return start + packed + bytes(4) + data


GREY = np.linspace(0, 1, 11)[None].repeat(4, axis=0)
LEVELS = (GREY * 255).round()[0]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("top", "kind"),
    [(1, "f4"), (255, "f4"), (65535, "f4"), (65535, "u2"), (32767, "i2"), (255, "i4"), (2**31 - 1, "i4"), (127, "i1")],
)
def test_grey_numbers_have_the_smallest_usual_range_that_holds_them(top: int, kind: str, order: str) -> None:
    found = read(tiff((GREY * top).astype(kind), order=order), 1, 4, 11)[0, :, 0]
    assert np.abs(found - LEVELS).max() <= 1 + 255 / min(top, 65535) * (top > 1)
    if kind == "f4" or (kind, order) == ("u2", "<"):  # Pillow opens no others
        found = read(tiff((GREY * top).astype(kind), order=order, photometric=0), 1, 4, 11)[0, :, 0]
        assert np.abs(255.0 - found - LEVELS).max() <= 1 + 255 / min(top, 65535) * (top > 1), "white is zero"


def test_grey_floats_are_not_stretched_and_a_declared_range_counts() -> None:
    dark = read(tiff((GREY / 5).astype("f4")), 1, 4, 11)[0, :, 0]
    assert np.abs(dark - LEVELS / 5).max() <= 1, "0 to 0.2 is a dark picture in 0 to 1"
    resampled = read(tiff((GREY * 1.1 - 0.05).astype("f4")), 1, 4, 11)[0, :, 0]
    assert np.abs(resampled - (LEVELS * 1.1 - 12.75).clip(0, 255)).max() <= 1, "overshoot is clipped"
    declared = read(tiff((GREY * 1000 - 500).astype("f4"), declared=(-500, 500)), 1, 4, 11)[0, :, 0]
    assert np.abs(declared - LEVELS).max() <= 1


@pytest.mark.parametrize(
    "values",
    [
        *[GREY * 2 - 1, GREY * 12, GREY * 1e6, GREY + np.nan, GREY + np.inf],
        *[(GREY * 1000).astype("i4"), (GREY * 200 - 100).astype("i2")],
    ],
)
def test_grey_numbers_of_an_unknown_range_are_refused(values: np.ndarray) -> None:
    values = values.astype("f4") if values.dtype == np.float64 else values
    with pytest.raises(CorruptImageError, match=r"a\.tif: .*(usual range|finite)"):
        load_sample(tiff(values), sample_shape=(1, 4, 11), where="a.tif")


def test_twelve_bits_and_unsigned_32_bits_have_all_levels() -> None:
    assert np.abs(read(tiff((GREY * (2**32 - 1)).astype("u4")), 1, 4, 11)[0, :, 0] - LEVELS).max() <= 1
    twelve = (GREY[:, :10] * 4095).astype(int)
    packed = bytes(
        byte for one, two in twelve.reshape(-1, 2) for byte in (one >> 4, (one & 15) << 4 | two >> 8, two & 255)
    )
    data = tiff(np.frombuffer(packed, dtype=np.uint8).reshape(4, 15))
    data = data.replace(struct.pack("<HHI", 256, 4, 1) + b"\x0f", struct.pack("<HHI", 256, 4, 1) + b"\x0a")
    data = data.replace(struct.pack("<HHIH", 258, 3, 1, 8), struct.pack("<HHIH", 258, 3, 1, 12))
    assert np.abs(read(data, 1, 4, 10)[0, :, 0] - LEVELS[:10]).max() <= 1


def png(bits: int, color: int, row: bytes, width: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(b"\0" + row)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PALETTE = chunk(b"PLTE", bytes([200, 0, 0, 0, 100, 0, 0, 0, 50]))
COLOURS_16 = struct.pack(">6H", 0, 25700, 65535, 65535, 1, 2)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (png(1, 0, b"\xa0", 3), [[255] * 3, [0] * 3, [255] * 3]),
        (png(1, 0, b"\xa0", 3, chunk(b"tRNS", b"\0\0")), [[255] * 3] * 3),
        (png(2, 0, b"\x1b", 4), [[0] * 3, [85] * 3, [170] * 3, [255] * 3]),
        (png(2, 0, b"\x1b", 4, chunk(b"tRNS", b"\0\1")), [[0] * 3, [255] * 3, [170] * 3, [255] * 3]),
        (png(4, 0, b"\x12", 2, chunk(b"tRNS", b"\0\1")), [[255] * 3, [34] * 3]),
        (png(8, 0, b"\1\2", 2, chunk(b"tRNS", b"\0\1")), [[255] * 3, [2] * 3]),
        (png(16, 0, COLOURS_16[:6], 3), [[0] * 3, [100] * 3, [255] * 3]),
        (png(16, 0, COLOURS_16[:6], 3, chunk(b"tRNS", b"\0\0")), [[255] * 3, [100] * 3, [255] * 3]),
        (png(16, 2, COLOURS_16, 2), [[0, 100, 255], [255, 0, 0]]),
        (png(16, 2, COLOURS_16, 2, chunk(b"tRNS", COLOURS_16[:6])), [[255] * 3, [255, 0, 0]]),
        (png(16, 4, struct.pack(">4H", 25700, 65535, 0, 0), 2), [[100] * 3, [255] * 3]),
        (png(8, 4, bytes([100, 255, 0, 128]), 2), [[100] * 3, [127] * 3]),
        (png(2, 3, b"\x18", 3, PALETTE, chunk(b"tRNS", b"\xff\0")), [[200, 0, 0], [255] * 3, [0, 0, 50]]),
        (png(8, 3, b"\0\1\2", 3, PALETTE, chunk(b"tRNS", b"\xff\x80")), [[200, 0, 0], [127, 177, 127], [0, 0, 50]]),
        (encoded("TIFF", Image.new("RGB", (1, 1), (204, 102, 51)).convert("P").convert("PA")), [[204, 102, 51]]),
        (encoded("TIFF", Image.new("LA", (1, 1), (0, 128))), [[127] * 3]),
        (encoded("JPEG", Image.new("CMYK", (8, 1), (255, 255, 0, 0)), quality=100), [[0, 0, 255]] * 8),
        (b"P5 2 1 1023\n" + struct.pack(">2H", 0, 1023), [[0] * 3, [255] * 3]),
    ],
)
def test_other_kinds_of_pixels_keep_their_colours(data: bytes, pixels: list[list[int]]) -> None:
    found = read(data, 3, 1, len(pixels))[0].astype(int)
    assert np.abs(found - pixels).max() <= 1


def test_suffixes_are_those_that_can_be_read_here() -> None:
    assert {".heic", ".jfif", ".jpe", ".mpo", ".png"} <= IMAGE_SUFFIXES
    assert (".avif" in IMAGE_SUFFIXES) == features.check("avif") != (".avif" in HOW_TO_READ)
    assert ".heic" not in HOW_TO_READ and ".eps" not in IMAGE_SUFFIXES


def test_a_picture_names_the_library_that_reads_it_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg, heic = (kind for kind in images.FORMATS if kind.name in ("JPEG", "HEIF"))
    monkeypatch.setattr(images, "FORMATS", (jpeg, replace(heic, is_available=False, install="pip install x")))
    monkeypatch.setattr(images, "_known_to_pillow", images._known_to_pillow.__wrapped__)
    with pytest.raises(UnreadableError, match="pip install x"), open_picture(b"\0\0\0\x18ftypheic" + bytes(30)):
        pass


class Refusing(io.BytesIO):
    """A file that raises what a library might."""

    def __init__(self, error: Exception) -> None:
        super().__init__(encoded("PNG", Image.fromarray(RAMP)))
        self.error, self.reads = error, 0

    def read(self, *size: int) -> bytes:
        self.reads += 1
        if self.reads > 8:
            raise self.error
        return super().read(*size)


@pytest.mark.parametrize("kind", [AssertionError, RecursionError, zlib.error])
def test_whatever_is_raised_for_one_picture_makes_it_unreadable(kind: type[Exception]) -> None:
    with pytest.raises(UnreadableError, match=r"\A.+\Z"), open_picture(Refusing(kind("why\nand more"))) as picture:
        picture.decode(channels=3)
    with pytest.raises(MemoryError), open_picture(Refusing(MemoryError())) as picture:
        picture.decode(channels=3)


def test_channels_sizes_and_crops() -> None:
    assert (read(RAMP, 3, 4, 6) == RAMP).all(), "a fitting image is unchanged"
    assert read(np.array([[0, 90]], dtype=np.uint8), 3, 1, 2)[0].tolist() == [[0] * 3, [90] * 3]
    assert read(np.array([[[255, 0, 0]]], dtype=np.uint8), 1, 1, 1)[0].tolist() == [[76]]  # 0.299 x 255
    assert (read(RAMP, 3, 4, 4) == RAMP[:, 1:5]).all()
    assert (read(np.ascontiguousarray(RAMP.transpose(1, 0, 2)), 3, 4, 4) == RAMP.transpose(1, 0, 2)[1:5]).all()
    halves = np.zeros((40, 100, 3), dtype=np.uint8)
    halves[:, 50:] = 200
    found = read(halves, 3, 10, 20)  # the short side is fitted
    assert found[:, :8].max() == 0 and found[:, 12:].min() == 200
    board = (np.indices((256, 256)).sum(axis=0) % 2 * 255).astype(np.uint8)
    found = read(board, 1, 16, 16)  # reduction averages and does not alias
    assert found.min() >= 126 and found.max() <= 129
    assert (read(np.full((5, 3, 3), [9, 8, 7], dtype=np.uint8), 3, 16, 16) == [9, 8, 7]).all()


def test_a_large_turned_jpeg_fills_a_wide_crop() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((800, 400, 3), dtype=np.uint8)
    pixels[400:] = 250  # turned clockwise, the bright half is on the left
    found = read(encoded("JPEG", Image.fromarray(pixels), exif=exif, quality=95), 3, 16, 32)
    assert found[:, :14].min() > 240
    assert found[:, 18:].max() < 10


@pytest.mark.parametrize("end", [0, 7, 2000])
def test_a_damaged_image_is_named(end: int) -> None:
    whole = encoded("PNG", Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)))
    with pytest.raises(CorruptImageError, match=r"\Abad\.png.+\Z"):
        load_sample(whole[:end], sample_shape=(3, 8, 8), where="bad.png")


def photo(width: int, height: int) -> Image.Image:
    """Smooth, so that resampling matters, and different everywhere."""
    rows, columns = np.mgrid[:height, :width]
    channels = [rows * 3 + columns, rows + columns * 2, 40 * np.sin(rows / 9) * np.cos(columns / 7) + 120]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def cropped(image: Image.Image | bytes, crop: Any, number: int = 0) -> np.ndarray:
    data = image if isinstance(image, bytes) else encoded("PNG", image)
    sample = load_sample(data, sample_shape=(3, 16, 16), where="a", crop=crop, number=number)
    return ((sample + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)


@pytest.mark.parametrize(("width", "height"), [(100, 70), (33, 90), (9, 12), (129, 64)])
def test_adm_crop_is_the_published_one_step_by_step(width: int, height: int) -> None:
    """By hand, for 16 px: halve with boxes while the short side is 32 or more, then bicubic, then the center."""
    image = photo(width, height)
    while min(image.size) >= 32:
        image = image.resize((image.size[0] // 2, image.size[1] // 2), Image.Resampling.BOX)
    factor = 16 / min(image.size)
    image = image.resize((round(image.size[0] * factor), round(image.size[1] * factor)), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    top, left = (pixels.shape[0] - 16) // 2, (pixels.shape[1] - 16) // 2
    assert (cropped(photo(width, height), "adm") == pixels[top : top + 16, left : left + 16]).all()


def test_adm_crop_decodes_a_jpeg_in_full() -> None:
    data = encoded("JPEG", photo(200, 160), quality=60)
    with Image.open(io.BytesIO(data)) as image:
        same = image.convert("RGB")
    assert (cropped(data, "adm") == cropped(same, "adm")).all()
    assert (cropped(data, "center") != cropped(same, "center")).any(), "the quick way differs"


def test_random_crop_is_a_place_keyed_to_the_number() -> None:
    image = Image.fromarray(np.tile(np.arange(48, dtype=np.uint8)[None, :, None], (16, 1, 3)))
    lefts = [int(cropped(image, "random", number)[0, 0, 0]) for number in range(200)]
    assert set(lefts) == set(range(33)), "every place, the borders included"
    assert lefts[:50] == [int(cropped(image, "random", number)[0, 0, 0]) for number in range(50)]
    assert 14 < np.mean(lefts) < 18
    upright = image.transpose(Image.Transpose.TRANSPOSE)
    tops = [int(cropped(upright, "random", number)[0, 0, 0]) for number in range(50)]
    assert min(tops) < 5 and max(tops) > 27
