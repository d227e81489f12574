# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of a sampling sweep: quality against model evaluations, and quality against guidance.

Notable:
- Marker and dashes show the sampler, the filling of the marker the weights, and each run has a panel.
- Error bars are the intervals of the cards. The grey line is the same figure of about as many held-out images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchditan.config.optional_libraries import import_optional
from torchditan.evaluation.sweep import (
    WHOLE_INTERVAL,
    Point,
    Result,
    held_out_floor,
    higher_is_better,
    kinds_of_interval,
)
from torchditan.report.plots import (
    DASHES,
    DOTTED,
    GREY,
    MARKERS,
    PALETTE,
    draw,
    is_wide,
    legend_entry,
    new_figure,
    scale_axis,
    styled,
)
from torchditan.run.atomic_files import write_file

EVALUATIONS_NAME, GUIDANCE_NAME = "quality_over_evaluations", "quality_over_guidance"

_FILLINGS = ("full", "none", "left", "bottom")
_TICK_GAP = 0.05  # of the length of the axis


def save_plots(folder: Path, results: Sequence[Result], figure: str, *, title: str) -> list[str]:
    """Write both plots into a folder, as PNG and SVG. Points without the figure are left out.

    Returns:
        The names of the PNG files; empty if no point has the figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    known = [result for result in results if result.value(figure) is not None]
    if not known:
        return []
    over_evaluations = _Quality(
        figure, title, "model evaluations per image", lambda result: result.model_evaluations, _guidance
    )
    over_guidance = _Quality(figure, title, "guidance scale", lambda result: result.point.guidance_scale, _steps)
    figures = {
        EVALUATIONS_NAME: quality_figure(over_evaluations, known),
        GUIDANCE_NAME: quality_figure(over_guidance, _in_every_interval(known)),
    }
    for name, drawn in figures.items():
        for file, content in draw(drawn, name, title).draw_files().items():
            write_file(folder / file, content)
    return [f"{name}.png" for name in figures]


def _guidance(point: Point) -> str:
    return f"guidance {point.guidance}"


def _steps(point: Point) -> str:
    low, high = point.guidance_interval
    return f"{point.num_steps} steps" + ("" if (low, high) == WHOLE_INTERVAL else f", t {low:g} to {high:g}")


def _in_every_interval(results: Sequence[Result]) -> list[Result]:
    """The results, those of guidance 1 once for each interval, so that the line of every interval starts there."""
    guided = list(dict.fromkeys(r.point.guidance_interval for r in results if r.point.guidance_scale != 1))
    repeated = []
    for result in results:
        point = result.point
        intervals = guided if guided and point.guidance_scale == 1 else [point.guidance_interval]
        repeated += [replace(result, point=replace(point, guidance_interval=interval)) for interval in intervals]
    return repeated


@dataclass(frozen=True)
class _Quality:
    """What a plot shows: a figure over `x_of`, with a colour for each value of `color_of`."""

    figure: str
    title: str
    x_title: str
    x_of: Callable[[Result], float]
    color_of: Callable[[Point], str]


@styled
def quality_figure(shown: _Quality, results: Sequence[Result]) -> Any:
    """A panel per run, with a line for each colour, sampler and kind of weights."""
    runs, samplers, weights = (
        _distinct(getattr(result.point, name) for result in results) for name in ("run", "sampler", "weights")
    )
    colors = _colors(_distinct(shown.color_of(result.point) for result in results))
    width = 4.6 * min(len(runs), 3) + 2.4
    figure, panels = new_figure(len(runs), height=4.5, width=width, sharex=True, sharey=True)
    floor = held_out_floor(results, shown.figure)
    values = [result.value(shown.figure) or 0.0 for result in results] + ([floor.value] if floor is not None else [])
    for panel, run in zip(panels, runs, strict=True):
        lines: dict[tuple[str, str, str], list[Result]] = {}
        for result in sorted(results, key=shown.x_of):
            if result.point.run == run:
                key = (shown.color_of(result.point), result.point.sampler, result.point.weights)
                lines.setdefault(key, []).append(result)
        for (color, sampler, weight), line in lines.items():
            look = _look(samplers.index(sampler), weights.index(weight))
            _line(panel, shown, line, color=colors[color], **look)
        if floor is not None:
            panel.axhline(floor.value, color=GREY, linewidth=1, linestyle=DOTTED)
        scale_axis(panel.yaxis, values)
        _mark_places(panel, sorted({shown.x_of(result) for result in results}))
        panel.set_xlabel(shown.x_title)
        panel.tick_params(labelbottom=True)
        panel.set_title(run if len(runs) > 1 else "")
    panels[0].set_ylabel(f"{shown.figure} ({'higher' if higher_is_better(shown.figure) else 'lower'} is better)")
    figure.suptitle(_heading(shown, results), fontsize=10, x=0.02, horizontalalignment="left")
    entries = [legend_entry(name, color=paint, linewidth=2.5) for name, paint in colors.items()]
    if len(samplers) > 1:
        entries += [legend_entry(name, color=GREY, **_look(index, 0)) for index, name in enumerate(samplers)]
    if len(weights) > 1:
        looks = {name: {**_look(0, index), "linestyle": "none"} for index, name in enumerate(weights)}
        entries += [legend_entry(f"{name} weights", color=GREY, **look) for name, look in looks.items()]
    if floor is not None:
        entries.append(legend_entry(f"{floor.num_images:,} held-out images", color=GREY, linestyle=DOTTED))
    figure.legend(handles=entries, loc="outside right center", fontsize=9, handlelength=2.6)
    return figure


def _look(sampler: int, weights: int) -> dict[str, str]:
    return {
        "marker": MARKERS[sampler % len(MARKERS)],
        "linestyle": DASHES[sampler % len(DASHES)],
        "fillstyle": _FILLINGS[weights % len(_FILLINGS)],
    }


def _line(panel: Any, shown: _Quality, line: Sequence[Result], **look: Any) -> None:
    values = [result.value(shown.figure) or 0.0 for result in line]
    intervals = [result.interval(shown.figure) or (y, y) for result, y in zip(line, values, strict=True)]
    below = [max(0.0, y - low) for y, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - y) for y, (_, high) in zip(values, intervals, strict=True)]
    places = [shown.x_of(result) for result in line]
    bars = {"yerr": [below, above], "capsize": 2.5, "elinewidth": 1}
    panel.errorbar(places, values, linewidth=1.4, markersize=5.5, **bars, **look)


def _mark_places(panel: Any, places: Sequence[float]) -> None:
    """Labels at the places of the points, unless they would touch. The last one always has its label."""
    is_log = is_wide(places)
    position = math.log if is_log else float
    gap = _TICK_GAP * (position(places[-1]) - position(places[0]))
    kept = [places[-1]]
    for place in reversed(places[:-1]):
        if position(kept[-1]) - position(place) >= gap:
            kept.append(place)
    panel.set_xscale("log" if is_log else "linear")
    panel.set_xticks(kept, [f"{place:g}" for place in kept])
    panel.set_xticks([], minor=True)


def _heading(shown: _Quality, results: Sequence[Result]) -> str:
    """What the picture shows: the run, the number of images, and the meaning of the error bars."""
    numbers = {result.figures[shown.figure].num_images for result in results}
    images = f"{numbers.pop():,} images per point" if len(numbers) == 1 else ""
    intervals = kinds_of_interval(results, shown.figure)
    bars = f"error bars: {'; '.join(intervals)}" if intervals else "no intervals"
    return f"{shown.title}\n{', '.join(part for part in (images, bars) if part)}"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """A colour for each name. More names than colours in the palette get shades from dark to light."""
    if len(names) <= len(PALETTE):
        return dict(zip(names, PALETTE, strict=False))
    shades = import_optional("matplotlib", extra="evaluation").colormaps["viridis"]
    return {name: shades(number / len(names)) for number, name in enumerate(names)}
