# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The section of a report that shows the samples of runs over time: with a slider, as a strip and as a GIF.

The pictures share a budget of bytes: large ones become smaller, and of many steps some are shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from PIL import Image

from torchditan.errors import ConfigError
from torchditan.extras.report.labels import evenly
from torchditan.extras.report.page import Pictures, Section, Slider
from torchditan.extras.report.runs import Run
from torchditan.extras.report.stored_grids import animation, read_cells, strip

_MOST_PICTURES = 40
_GRID_BYTES, _STRIP_BYTES, _ANIMATION_BYTES = 4_000_000, 1_000_000, 1_000_000  # of all; as base64 they take 8 MB
_MOST_COLUMNS = 8
_SIDES = (1200, 800, 500, 300)
"""Longest sides of an embedded picture in pixels: the first, and smaller ones for a picture that has too many bytes."""


def samples_over_time(runs: Sequence[Run]) -> Section | None:
    steps = _chosen_steps(runs)
    drawn = {run.label: {step: run.pictures[step] for step in steps if step in run.pictures} for run in runs}
    num_pictures = sum(map(len, drawn.values()))
    if not num_pictures:
        return None
    share = _GRID_BYTES // num_pictures
    pictures = [
        Pictures(
            name,
            {step: _uri_of_picture(path, share) for step, path in found.items()},
            *_strip_and_animation(name, found, len(runs)),
        )
        for name, found in drawn.items()
        if found
    ]
    num_steps = len(set(chain.from_iterable(run.pictures for run in runs)))
    notes = [
        "Move the slider, or use the arrow keys on it." if len(steps) > 1 else "",
        f"The page has {len(steps)} of {num_steps:,} steps, samples/ of the runs all."
        if len(steps) < num_steps
        else "",
    ]
    return Section("Samples over time", [Slider(pictures)], " ".join(filter(None, notes)))


def _chosen_steps(runs: Sequence[Run]) -> list[int]:
    """The steps that the slider offers: all; or, if these are too many pictures, some of those that all runs share."""
    drawn = [set(run.pictures) for run in runs if run.pictures]
    if not drawn:
        return []
    every, shared = set.union(*drawn), set.intersection(*drawn)
    if sum(map(len, drawn)) <= _MOST_PICTURES:
        return sorted(every)
    later = {step for step in every if step > max(shared, default=0)}  # of the longest runs, or all
    return evenly(sorted(shared | later), max(1, _MOST_PICTURES // len(drawn)))


def _strip_and_animation(name: str, pictures: Mapping[int, Path], num_runs: int) -> tuple[str | None, str | None]:
    """The same samples cut out of the grids of the steps: the first of each row side by side, and all as a GIF.

    Grids of other rows or another size than the last one are left out, as are those that cannot be read.
    """
    grids = {}
    for step, path in pictures.items():
        with suppress(ConfigError):
            grids[step] = read_cells(path)
    if not grids:
        return None, None
    last, labels = grids[max(grids)]
    frames = {step: cells for step, (cells, names) in grids.items() if cells.shape == last.shape and names == labels}
    if len(frames) < 2:
        return None, None
    shown = {step: frames[step][:, 0] for step in evenly(list(frames), _MOST_COLUMNS)}
    row = _uri_of_picture(io.BytesIO(strip(shown, labels, title=name)), _STRIP_BYTES // num_runs)
    return row, _uri(animation(frames, labels, title=name, most_bytes=_ANIMATION_BYTES // num_runs), "gif")


def _uri_of_picture(file: Path | io.BytesIO, most_bytes: int) -> str | None:
    """A picture as a data URI; None if it cannot be read. One with more bytes becomes JPEG, smaller until it fits."""
    try:
        data = file.read_bytes() if isinstance(file, Path) else file.getvalue()
        with Image.open(io.BytesIO(data)) as picture:  # of a file, Pillow reserves as many bytes as a damaged one names
            picture.load()
            kind = (picture.format or "").lower()
            for side in _SIDES:
                if len(data) <= most_bytes:
                    break
                picture.thumbnail((side, side))
                smaller, kind = io.BytesIO(), "jpeg"
                picture.convert("RGB").save(smaller, format=kind, optimize=True)
                data = smaller.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # errors of Pillow
        return None
    return _uri(data, kind)


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
