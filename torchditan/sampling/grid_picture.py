# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Labelled grids: generated images next to real ones of the same class, and samples over the steps of a run.

Notable:
- The picture is drawn with Pillow alone. Every text is measured, so none is cut off.
- grid_font.ttf, a part of DejaVu Sans, has the Latin characters of Europe (U+0020 to U+017F). The font of Pillow has
  only those of English. A label with others becomes the number of its row, and a text file next to the picture has all
  labels.
- Small images are enlarged by an integer factor with nearest neighbour: each pixel stays a square, without smoothing.
- Samples with more than three channels are latents. The first three channels are shown as colours, scaled to the range
  of the real ones, so that generated latents of another scale look different.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from torchditan.errors import as_unicode, shorten
from torchditan.run.atomic_files import write_file

_MARGIN = 16
CELL_GAP = 6
_BLOCK_GAP = 40  # between generated and real; the line in it separates them
_INK, _PALE, PAPER = (0, 0, 0), (170, 170, 170), (255, 255, 255)

LAYOUT_KEY = "torchditan_layout"
_LONGEST_TEXT = 200
"""Characters of a label or the title. The width of the picture follows from them."""


@dataclass(frozen=True)
class GridLayout:
    """Positions of the generated images in a grid, in pixels; stored as a text chunk of its PNG."""

    left: int
    top: int
    width: int
    height: int
    column_pitch: int
    row_pitch: int
    num_columns: int
    labels: list[str]


def save_grid(
    path: Path,
    generated: Tensor,
    real: Tensor | None,
    labels: list[str],
    *,
    title: str,
    scale: int | None = None,
    heading: str = "generated",
    real_heading: str = "real",
) -> None:
    """Write the grid to `path` atomically.

    Args:
        path: PNG to write.
        generated: (rows, k, C, H, W) float; pixels in [-1, 1] if C is 1 or 3, otherwise latents.
        real: real images in the same layout, where k may differ; NaN leaves the place empty. None without real images.
        labels: the class of each row.
        title: of the picture.
        scale: integer enlargement; by default, images under 48 px are enlarged to 48 to 96 px.
        heading: text above the generated images.
        real_heading: text above the real images.
    """
    assert generated.dim() == 5 and len(labels) == generated.shape[0], (generated.shape, labels)
    assert real is None or (real.shape[0], *real.shape[2:]) == (generated.shape[0], *generated.shape[2:])
    scale = scale or _enlargement(generated.shape[-2:])
    reference = generated if real is None else real
    suffix = " (latent channels 0-2)" if generated.shape[2] > 3 else ""
    blocks = [(f"{heading}{suffix}", _to_uint8(generated, reference))]
    if real is not None:
        blocks.append((f"{real_heading}{suffix}", _to_uint8(real, reference, nan=PAPER)))
    picture, layout = draw(blocks, labels, title, scale)
    _write_labels(path, labels)
    about = PngInfo()
    about.add_text(LAYOUT_KEY, json.dumps(asdict(layout)))
    _save(path, picture, format="PNG", pnginfo=about)


def add_to_steps(folder: Path, samples: Tensor, labels: list[str], *, step: int, title: str) -> None:
    """Add a column to `over_steps.png` in a folder: each row as sampled at this training step.

    Earlier columns are read from `over_steps/`, so a resumed run keeps them. Columns with other labels stay in the
    folder but are not shown.

    Args:
        folder: of the run's grids.
        samples: (rows, C, H, W), the first sample of each row.
        labels: of the rows.
        step: the column; an existing one is replaced.
        title: of the picture.
    """
    column = _to_uint8(samples[:, None], samples[:, None])[:, 0]  # (rows, H, W, 3)
    rows = hashlib.sha256(json.dumps(labels).encode()).hexdigest()[:8]
    strip = Image.fromarray(column.flatten(0, 1).numpy())
    _save(folder / "over_steps" / f"step_{step:08d}_{rows}.png", strip, format="PNG")
    blocks = []
    for path in sorted((folder / "over_steps").glob(f"step_*_{rows}.png")):
        with Image.open(path) as stored:
            pixels = torch.from_numpy(np.array(stored.convert("RGB")))
        if pixels.shape == (column.shape[0] * column.shape[1], *column.shape[2:]):  # skip other sizes
            blocks.append((f"step {int(path.stem.split('_')[1])}", pixels.view(column.shape)[:, None]))
    picture, _ = draw(blocks, labels, title, _enlargement(column.shape[1:3]), gap=CELL_GAP)
    _write_labels(folder / "over_steps.png", labels)
    _save(folder / "over_steps.png", picture, format="PNG")


def stills(samples: Tensor, *, most: int = 4) -> Tensor:
    """Evenly spaced frames of videos (rows, k, C, F, H, W), side by side: (rows, k f, C, H, W). Images are kept."""
    if samples.dim() == 5:
        return samples
    frames = torch.linspace(0, samples.shape[3] - 1, min(most, samples.shape[3])).long()
    return samples[:, :, :, frames].permute(0, 1, 3, 2, 4, 5).flatten(1, 2)


def _enlargement(size: torch.Size) -> int:
    side = max(size)
    return 1 if side >= 48 else max(math.ceil(48 / side), round(64 / side))


def _to_uint8(images: Tensor, reference: Tensor, *, nan: tuple[int, int, int] = _INK) -> Tensor:
    """(rows, k, C, H, W) in [-1, 1], or latents -> (rows, k, H, W, 3) uint8; NaN becomes the color `nan`."""
    images = images.detach().float().cpu()
    is_nan = images.isnan().any(dim=2)  # (rows, k, H, W)
    channels = images.shape[2]
    assert channels != 2, "an image has 1 or 3 channels, a latent 4 or more"
    if channels > 3:
        images = images[:, :, :3]
        reference = reference.detach().float().cpu()[:, :, :3]
        low = reference.nan_to_num(torch.inf).amin(dim=(0, 1, 3, 4), keepdim=True)  # (1, 1, 3, 1, 1)
        high = reference.nan_to_num(-torch.inf).amax(dim=(0, 1, 3, 4), keepdim=True)
        images = 2 * (images - low) / (high - low).clamp_min(1e-12) - 1
    images = images.nan_to_num(nan=-1.0).clamp(-1, 1).expand(-1, -1, 3, -1, -1)
    pixels = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 1, 3, 4, 2)
    return torch.where(is_nan[..., None], torch.tensor(nan, dtype=torch.uint8), pixels)


def draw(
    blocks: list[tuple[str, Tensor]], labels: list[str], title: str, scale: int, *, gap: int = _BLOCK_GAP
) -> tuple[Image.Image, GridLayout]:
    """Draw blocks of images, (rows, k, H, W, 3) uint8, each with a heading; returns the layout of the first one."""
    small, large = _font(14), _font(18)
    title = "".join(character if _can_draw(character) else "?" for character in _as_text(title))
    title = shorten(title, most=_LONGEST_TEXT)
    shown = _drawable(labels)
    height, width = (side * scale for side in blocks[0][1].shape[2:4])
    label_width = max(_width(label, small) for label in shown)
    pitch = width + CELL_GAP
    block_widths = [max(images.shape[1] * pitch, _width(heading, small)) for heading, images in blocks]
    starts = [_MARGIN + label_width + _MARGIN]
    for block_width in block_widths[:-1]:
        starts.append(starts[-1] + block_width + gap)
    heading_top = _MARGIN + _height(large) + _MARGIN // 2
    top = heading_top + _height(small) + _MARGIN // 2
    row_height = max(height, _height(small)) + CELL_GAP
    right = max(starts[-1] + block_widths[-1], _MARGIN + _width(title, large))
    bottom = top + len(labels) * row_height

    canvas = Image.new("RGB", (right + _MARGIN, bottom + _MARGIN), PAPER)
    draw = ImageDraw.Draw(canvas)
    draw.text((_MARGIN, _MARGIN), title, fill=_INK, font=large)
    for row, label in enumerate(shown):
        middle = top + row * row_height + row_height // 2
        draw.text((_MARGIN + label_width, middle), label, fill=_INK, font=small, anchor="rm")
    for (heading, images), start in zip(blocks, starts, strict=True):
        draw.text((start, heading_top), heading, fill=_INK, font=small)
        for row in range(images.shape[0]):
            for column in range(images.shape[1]):
                cell = Image.fromarray(images[row, column].numpy())
                cell = cell.resize((width, height), Image.Resampling.NEAREST)
                canvas.paste(cell, (start + column * pitch, top + row * row_height))
    for start in starts[1:] if gap == _BLOCK_GAP else []:
        x = start - gap // 2
        draw.line((x, heading_top, x, bottom), fill=_PALE, width=1)
    num_columns = blocks[0][1].shape[1]
    return canvas, GridLayout(starts[0], top, width, height, pitch, row_height, num_columns, labels)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(__file__).with_name("grid_font.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


@functools.cache
def _can_draw(character: str) -> bool:
    """Whether the font has this character. It draws all others as the same box."""
    font = _font(14)
    return character.isspace() or bytes(font.getmask(character)) != bytes(font.getmask("\uffff"))


def _drawable(labels: list[str]) -> list[str]:
    """The labels, with `row 3` in place of one with characters that the font lacks. Long ones are cut, and bytes that
    are not UTF-8 are drawn as escapes."""
    return [
        shorten(label, most=_LONGEST_TEXT) if all(map(_can_draw, label)) else f"row {row}"
        for row, label in enumerate(map(_as_text, labels), start=1)
    ]


def _as_text(label: str) -> str:
    """Composed characters: macOS stores an umlaut as two, and the font has only the composed ones."""
    return unicodedata.normalize("NFC", as_unicode(label))


def _write_labels(path: Path, labels: list[str]) -> None:
    """Write all labels next to a picture that cannot show some of them: `step_00000100.labels.txt`."""
    if _drawable(labels) != labels:
        lines = [f"row {row}: {_as_text(label)}\n" for row, label in enumerate(labels, start=1)]
        write_file(path.with_suffix(".labels.txt"), "".join(lines).encode())


def _width(text: str, font: ImageFont.FreeTypeFont) -> int:
    return math.ceil(font.getbbox(text)[2])


def _height(font: ImageFont.FreeTypeFont) -> int:
    """Height of a line with ascenders and descenders, so that all lines have the same height."""
    return math.ceil(font.getbbox("Agjpq|")[3])


def _save(path: Path, picture: Image.Image, **options: Any) -> None:
    """Write a picture atomically."""
    write_file(path, encoded(picture, **options))


def encoded(picture: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, **options)
    return file.getvalue()
