# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The section of a report that shows the samples of runs over time: with a slider, as a strip and as a GIF.

The pictures share a budget of bytes: large ones become smaller, and of many steps some are shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from torchditan.config.errors import ConfigError
from torchditan.report.labels import evenly
from torchditan.report.page import Block, Picture, Pictures, Section, Slider
from torchditan.report.runs import Run

_MOST_PICTURES = 40
_GRID_BYTES, _STRIP_BYTES, _ANIMATION_BYTES = 4_000_000, 1_000_000, 1_000_000  # of all; as base64 they take 8 MB
_MOST_COLUMNS = 8
_SIDES = (1200, 800, 500, 300)
"""Longest sides of an embedded picture in pixels: the first, and smaller ones for a picture that has too many bytes."""


def samples_over_time(runs: Sequence[Run]) -> Section:
    steps = _chosen_steps(runs)
    drawn = [(run, [step for step in steps if step in run.pictures]) for run in runs]
    num_pictures = sum(len(found) for _, found in drawn)
    if not num_pictures:
        return Section("Samples over time", [])
    share = _GRID_BYTES // num_pictures
    uris = {run.label: {step: _uri_of_file(run.pictures[step], share) for step in found} for run, found in drawn}
    all_steps = len(set(chain.from_iterable(run.pictures for run in runs)))
    shown = [run.pictures[step] for run, found in drawn for step in found]
    notes = [
        "Move the slider, or use the arrow keys on it." if len(steps) > 1 else "",
        f"The page has {len(steps)} of {all_steps:,} steps, samples/ of the runs all."
        if len(steps) < all_steps
        else "",
        "Large pictures are scaled down." if any(_num_bytes(path) > share for path in shown) else "",
    ]
    cut = [picture for run, found in drawn for picture in _strip_and_animation(run, found, len(runs))]
    blocks: list[Block] = [Slider(uris), *([Pictures("As a strip and as a GIF", cut)] if cut else [])]
    return Section("Samples over time", blocks, " ".join(filter(None, notes)))


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


def _strip_and_animation(run: Run, steps: Sequence[int], num_runs: int) -> list[Picture]:
    """The same samples cut out of the grids of the steps: the first of each row side by side, and all as a GIF.

    Grids of other rows or another size than the last one are left out, as are those that cannot be read.
    """
    if len(steps) < 2:
        return []
    from torchditan.evaluation.grid_picture import animation, read_cells, strip

    grids = {}
    for step in steps:
        with suppress(ConfigError):
            grids[step] = read_cells(run.pictures[step])
    if not grids:
        return []
    last, labels = grids[max(grids)]
    frames = {step: cells for step, (cells, names) in grids.items() if cells.shape == last.shape and names == labels}
    if len(frames) < 2:
        return []
    shown = {step: frames[step][:, 0] for step in evenly(list(frames), _MOST_COLUMNS)}
    row = _uri_of_picture(strip(shown, labels, title=run.label), _STRIP_BYTES // num_runs)
    moving = animation(frames, labels, title=run.label, most_bytes=_ANIMATION_BYTES // num_runs)
    return [
        Picture(run.label, f"{len(shown)} steps", row),
        Picture(run.label, f"{len(frames)} steps, as a GIF", _uri(moving, "gif")),
    ]


def _num_bytes(path: Path) -> int:
    """Size of a file; 0 if it cannot be read, such as a link that leads nowhere."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _uri_of_file(path: Path, most_bytes: int) -> str | None:
    try:
        return _uri_of_picture(path.read_bytes(), most_bytes)
    except OSError:
        return None


def _uri_of_picture(data: bytes, most_bytes: int) -> str | None:
    """A picture as a data URI; None if it is not a complete image.

    One that has more than `most_bytes` becomes JPEG, smaller until it fits.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:  # of a file, Pillow reserves as many bytes as a damaged one names
            picture.load()
            kind = (picture.format or "").lower()
            for side in _SIDES:
                if len(data) <= most_bytes:
                    break
                picture.thumbnail((side, side))
                file, kind = io.BytesIO(), "jpeg"
                picture.convert("RGB").save(file, format=kind, optimize=True)
                data = file.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # errors of Pillow
        return None
    return _uri(data, kind)


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
