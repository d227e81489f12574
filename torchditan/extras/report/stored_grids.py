# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads the images of stored grids (sampling/grid_picture.py), and draws them over the steps of a run."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from torchditan.errors import ConfigError
from torchditan.sampling.grid_picture import CELL_GAP, LAYOUT_KEY, PAPER, GridLayout, draw, encoded

_DAMAGE = (
    *(LookupError, OSError, SyntaxError, TypeError, ValueError, OverflowError, RuntimeError),
    Image.DecompressionBombError,
)
"""What Pillow, JSON and torch raise for a damaged grid, and what a picture without a layout raises."""


def read_cells(path: Path) -> tuple[Tensor, list[str]]:
    """The generated images of a grid in their drawn, enlarged form, and their labels.

    Returns:
        (rows, k, H, W, 3) uint8 and a label per row.

    Raises:
        ConfigError: the file is damaged, or not a grid.
    """
    try:
        with Image.open(io.BytesIO(path.read_bytes())) as picture:
            layout = GridLayout(**json.loads(picture.info[LAYOUT_KEY]))
            pixels = torch.from_numpy(np.array(picture.convert("RGB")))[layout.top :, layout.left :]  # (H, W, 3)
        cells = pixels.unfold(0, layout.height, layout.row_pitch).unfold(1, layout.width, layout.column_pitch)
        cells = cells[: len(layout.labels), : layout.num_columns].permute(0, 1, 3, 4, 2)  # (rows, k, H, W, 3)
        if cells.shape[:2] != (len(layout.labels), layout.num_columns) or not cells.numel():
            raise ValueError("its layout does not fit the picture")
        return cells.contiguous(), list(map(_text, layout.labels))
    except _DAMAGE as error:
        raise ConfigError(f"{path} is not a readable grid ({error}); delete it") from None


def _text(label: Any) -> str:
    if not isinstance(label, str):
        raise TypeError("its labels are not texts")
    return label


def strip(columns: dict[int, Tensor], labels: list[str], *, title: str) -> bytes:
    """A PNG with a column for each step.

    Args:
        columns: step -> (rows, H, W, 3) uint8.
        labels: of the rows.
        title: of the picture.
    """
    blocks = [(f"step {step}", column[:, None]) for step, column in columns.items()]
    return encoded(draw(blocks, labels, title, 1, gap=CELL_GAP)[0], format="PNG")


def animation(frames: dict[int, Tensor], labels: list[str], *, title: str, most_bytes: int) -> bytes:
    """An animated GIF with a frame for each step; the last frame is shown four times as long.

    Args:
        frames: step -> (rows, k, H, W, 3) uint8.
        labels: of the rows.
        title: of the picture.
        most_bytes: about the largest size of the file. Frames become smaller to fit; no side exceeds 480 pixels.
    """
    digits = len(str(max(frames)))
    drawn = [draw([(f"step {step:{digits}d}", cells)], labels, title, 1)[0] for step, cells in frames.items()]
    width, height = (max(sides) for sides in zip(*(picture.size for picture in drawn), strict=True))
    pictures = [ImageOps.pad(picture, (width, height), color=PAPER, centering=(0, 0)) for picture in drawn]
    data = _animated(pictures, min(1.0, 480 / max(width, height)))
    if len(data) > most_bytes:
        data = _animated(pictures, min(1.0, 480 / max(width, height)) * 0.9 * math.sqrt(most_bytes / len(data)))
    return data


def _animated(pictures: list[Image.Image], scale: float) -> bytes:
    size = [max(1, round(side * scale)) for side in pictures[0].size]
    smaller = (picture.resize(size) for picture in pictures)
    first, *others = [picture.quantize(method=Image.Quantize.FASTOCTREE) for picture in smaller]  # 256 colours
    durations = [500] * len(others) + [2000]
    return encoded(first, format="GIF", save_all=True, append_images=others, duration=durations, loop=0, disposal=1)
