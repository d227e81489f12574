# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of a sampling sweep."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cards import card, figure
from PIL import Image

from torchditan.evaluation.sweep import Point, Result
from torchditan.report.plots import PALETTE
from torchditan.report.sweep_plots import save_plots

FIGURE = "FD-EffNetLite0"
POINT = Point("digits", "euler", 10, 2.0, (0.0, 1.0), "ema", 20)


def result(value: float, *, error: float | None = None, **settings: Any) -> Result:
    """A finished point with this value of the figure."""
    point = replace(POINT, **settings)
    figures = {FIGURE: figure(value, error), f"held-out {FIGURE}": figure(4.4)}
    return Result(point, card(figures=figures, model_evaluations=2 * point.num_steps))


def colors_of(path: Path) -> set[str]:
    """The colours of the palette that a picture has, without black and grey."""
    pixels = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB")).reshape(-1, 3)
    found = {f"#{red:02X}{green:02X}{blue:02X}" for red, green, blue in np.unique(pixels, axis=0)}
    return found & set(PALETTE[:6])  # text is black, and grey at its edges


def test_plots_have_a_colour_for_each_guidance_and_each_number_of_steps(tmp_path: Path) -> None:
    results = [
        result(12 - steps / 10 + scale, error=0.5, num_steps=steps, guidance_scale=scale)
        for steps in (10, 25, 50)
        for scale in (1.0, 4.0)
    ]
    failed = Result(replace(POINT, guidance_scale=8.0), failure="out of memory")
    names = save_plots(tmp_path, [*results, failed], FIGURE, title="digits, step 4")
    over_evaluations, over_guidance = (colors_of(tmp_path / name) for name in names)
    assert over_evaluations == set(PALETTE[:2])
    assert over_guidance == set(PALETTE[:3])
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def test_one_point_or_points_without_intervals_can_be_drawn_and_none_draws_nothing(tmp_path: Path) -> None:
    assert len(save_plots(tmp_path, [result(12.0)], FIGURE, title="one")) == 2
    assert len(save_plots(tmp_path, [result(-0.1), result(0.2, run="other", error=0.5)], FIGURE, title="two")) == 2
    assert save_plots(tmp_path / "none", [Result(POINT)], FIGURE, title="none") == []
    assert not (tmp_path / "none").exists()
