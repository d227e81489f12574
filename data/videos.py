# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Frames of a video file, through the optional package PyAV. Nothing is written to disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image

from torchditan.config.optional_libraries import import_optional
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets.encoded import Encoded
from torchditan.errors import ConfigError, first_line

VIDEO_SUFFIXES = frozenset([".gif", ".mov", ".mp4", ".webm"])


def corrupt_video(where: str, reason: str) -> CorruptImageError:
    """The error for one video; `where` names it."""
    return CorruptImageError(
        f"{where}: not a usable video ({reason}); repair or remove it", named=f"{where} ({reason})"
    )


def open_video(content: Encoded, *, where: str) -> Iterator[Image.Image]:
    """Frames at the video's own rate, in display order, upright.

    Args:
        content: the file, which is closed together with the iterator.
        where: name of the video in an error.

    Raises:
        CorruptImageError: the video cannot be decoded up to the requested frame.
    """
    av = import_optional("av", extra="finetune")
    try:
        with content.open() as file, av.open(file) as container:
            if not container.streams.video:
                raise corrupt_video(where, "it has no video stream")
            for frame in container.decode(container.streams.video[0]):
                pixels = frame.to_ndarray(format="rgb24")  # (H, W, 3), without rotation
                yield Image.fromarray(np.rot90(pixels, round(frame.rotation / 90)))
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # PyAV raises anything for a damaged file, as Pillow does
        raise corrupt_video(where, first_line(error)) from error
