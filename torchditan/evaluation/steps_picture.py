# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Samples over the steps of a run: cells read back from its grids, as a strip and as an animation."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.evaluation.grid_picture import CELL_GAP, LAYOUT_KEY, PAPER, GridLayout, draw
from torchditan.run.atomic_files import write_file


def read_cells(path: Path) -> tuple[Tensor, list[str]] | None:
    """The generated images of a grid in their drawn, enlarged form, and their labels.

    Returns:
        (rows, k, H, W, 3) uint8 and a label per row; None if the file does not store its layout.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        with Image.open(path) as picture:
            stored = picture.info.get(LAYOUT_KEY)
            if stored is None:
                return None
            pixels = torch.from_numpy(np.array(picture.convert("RGB")))  # (H, W, 3)
        layout = GridLayout(**json.loads(stored))
    except (OSError, SyntaxError, TypeError, ValueError) as error:  # as PIL, JSON and the layout report damage
        raise ConfigError(f"{path} is not a readable grid ({error}); delete it") from None
    rows = []
    for row in range(len(layout.labels)):
        top = layout.top + row * layout.row_pitch
        lefts = [layout.left + column * layout.column_pitch for column in range(layout.num_columns)]
        rows.append([pixels[top : top + layout.height, left : left + layout.width] for left in lefts])
    return torch.stack([torch.stack(row) for row in rows]), layout.labels


def save_strip(path: Path, columns: dict[int, Tensor], labels: list[str], *, title: str) -> None:
    """Write a picture with a column for each step.

    Args:
        path: PNG to write.
        columns: step -> (rows, H, W, 3) uint8.
        labels: of the rows.
        title: of the picture.
    """
    blocks = [(f"step {step}", column[:, None]) for step, column in columns.items()]
    picture, _ = draw(blocks, labels, title, 1, gap=CELL_GAP)
    encoded = io.BytesIO()
    picture.save(encoded, format="PNG")
    write_file(path, encoded.getvalue())


def save_animation(path: Path, frames: dict[int, Tensor], labels: list[str], *, title: str, seconds: float) -> None:
    """Write an animated GIF with a frame for each step; the last frame is shown four times as long.

    Args:
        path: GIF to write.
        frames: step -> (rows, k, H, W, 3) uint8.
        labels: of the rows.
        title: of the picture.
        seconds: how long each frame is shown.
    """
    digits = len(str(max(frames)))
    drawn = [draw([(f"step {step:{digits}d}", cells)], labels, title, 1)[0] for step, cells in frames.items()]
    size = (max(picture.width for picture in drawn), max(picture.height for picture in drawn))
    pictures = [Image.new("RGB", size, PAPER) for _ in drawn]
    for picture, frame in zip(pictures, drawn, strict=True):
        picture.paste(frame, (0, 0))
    durations = [round(1000 * seconds)] * (len(pictures) - 1) + [round(4000 * seconds)]
    encoded = io.BytesIO()
    pictures[0].save(
        encoded, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, disposal=1
    )
    write_file(path, encoded.getvalue())
