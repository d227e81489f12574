# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of a sampling sweep as PNG files: quality against model evaluations, and quality against guidance.

Notable:
- colours are those of the report (plots.py), which colour-blind readers can distinguish. Marker and dashes show the
  sampler, the filling of the marker the weights, and each run has a panel;
- error bars are the intervals of the cards. The grey line is the same figure of about as many held-out images.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchditan.config.optional_libraries import import_optional
from torchditan.evaluation.sweep import (
    WHOLE_INTERVAL,
    Floor,
    Point,
    Result,
    held_out_floor,
    higher_is_better,
    kinds_of_interval,
)
from torchditan.report.plots import PALETTE
from torchditan.run.atomic_files import write_file

EVALUATIONS_NAME, GUIDANCE_NAME = "quality_over_evaluations.png", "quality_over_guidance.png"

_MARKERS, _DASHES = ("o", "s", "D", "^"), ("-", "--", "-.", ":")
_FILLINGS = ("full", "none", "left", "bottom")
_WIDE_RANGE = 4.0  # above this ratio of the largest to the smallest value, an axis is logarithmic
_TICK_GAP = 0.05  # of the length of the axis
_GREY, _DOTTED = "#555555", (0, (1, 2))


def save_plots(folder: Path, results: Sequence[Result], figure: str, *, title: str) -> list[str]:
    """Write both plots into a folder. Points without the figure are left out.

    Returns:
        The names of the files; empty if no point has the figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    known = [result for result in results if result.value(figure) is not None]
    if not known:
        return []
    over_evaluations = _Plot(
        figure, title, "model evaluations per image", lambda result: result.model_evaluations, _guidance
    )
    over_guidance = _Plot(figure, title, "guidance scale", lambda result: result.point.guidance_scale, _steps)
    write_file(folder / EVALUATIONS_NAME, over_evaluations.draw(known))
    write_file(folder / GUIDANCE_NAME, over_guidance.draw(_in_every_interval(known)))
    return [EVALUATIONS_NAME, GUIDANCE_NAME]


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
class _Plot:
    """Lines of one figure: a colour for each value of `color_of`, a line for each sampler and kind of weights."""

    figure: str
    title: str
    x_title: str
    x_of: Callable[[Result], float]
    color_of: Callable[[Point], str]

    def draw(self, results: Sequence[Result]) -> bytes:
        """The PNG."""
        plotting = import_optional("matplotlib.figure", extra="evaluation")
        runs = _distinct(result.point.run for result in results)
        num_columns = min(len(runs), 3)
        num_rows = math.ceil(len(runs) / num_columns)
        size = (4.6 * num_columns + 2.4, 4.2 * num_rows + 0.5)
        canvas = plotting.Figure(figsize=size, dpi=150, layout="constrained")
        canvas.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        grid = canvas.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
        panels = list(grid.flat)
        colors = _colors(_distinct(self.color_of(result.point) for result in results))
        samplers = _distinct(result.point.sampler for result in results)
        weights = _distinct(result.point.weights for result in results)
        styles = {
            (sampler, name): {
                "marker": _MARKERS[row % len(_MARKERS)],
                "linestyle": _DASHES[row % len(_DASHES)],
                "fillstyle": _FILLINGS[column % len(_FILLINGS)],
            }
            for row, sampler in enumerate(samplers)
            for column, name in enumerate(weights)
        }
        for panel, run in zip(panels, runs, strict=False):
            self._panel(panel, [result for result in results if result.point.run == run], colors, styles)
            panel.set_title(run if len(runs) > 1 else "", fontsize=10)
        for panel in panels[len(runs) :]:
            panel.set_visible(False)
        self._axes(panels[: len(runs)], results)
        canvas.suptitle(self._heading(results), fontsize=10, x=0.02, horizontalalignment="left")
        entries = self._legend(colors, styles, held_out_floor(results, self.figure))
        canvas.legend(handles=entries, loc="outside right center", frameon=False, fontsize=9, handlelength=2.6)
        encoded = io.BytesIO()
        canvas.savefig(encoded, format="png")
        return encoded.getvalue()

    def _panel(
        self, panel: Any, results: Sequence[Result], colors: dict[str, Any], styles: dict[tuple[str, str], Any]
    ) -> None:
        for color, paint in colors.items():
            for (sampler, weights), style in styles.items():
                line = [
                    result
                    for result in results
                    if (self.color_of(result.point), result.point.sampler, result.point.weights)
                    == (color, sampler, weights)
                ]
                line.sort(key=self.x_of)
                values = [result.value(self.figure) or 0.0 for result in line]
                intervals = [result.interval(self.figure) or (y, y) for result, y in zip(line, values, strict=True)]
                below = [max(0.0, y - low) for y, (low, _) in zip(values, intervals, strict=True)]
                above = [max(0.0, high - y) for y, (_, high) in zip(values, intervals, strict=True)]
                panel.errorbar(
                    [self.x_of(result) for result in line], values, yerr=[below, above], color=paint,
                    capsize=2.5, elinewidth=1, linewidth=1.4, markersize=5.5, **style,
                )  # fmt: skip

    def _axes(self, panels: Sequence[Any], results: Sequence[Result]) -> None:
        ticker = import_optional("matplotlib.ticker", extra="evaluation")
        floor = held_out_floor(results, self.figure)
        values = [value for result in results if (value := result.value(self.figure)) is not None]
        values += [floor.value] if floor is not None else []
        places = sorted({self.x_of(result) for result in results})
        better = "higher" if higher_is_better(self.figure) else "lower"
        for panel in panels:
            if floor is not None:
                panel.axhline(floor.value, color=_GREY, linewidth=1, linestyle=_DOTTED)
            if _is_wide(values):
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(ticker.LogLocator(subs=_steps_of_decade(values)))
                panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
                panel.yaxis.set_minor_locator(ticker.NullLocator())
            is_log = _is_wide(places)
            if is_log:
                panel.set_xscale("log")
            panel.set_xticks(_apart(places, is_log=is_log), minor=False)
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            panel.xaxis.set_minor_locator(ticker.NullLocator())
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(self.x_title)
            panel.grid(color="#E3E3E3", linewidth=0.8)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
            if panel.get_subplotspec().is_first_col():
                panel.set_ylabel(f"{self.figure} ({better} is better)")

    def _heading(self, results: Sequence[Result]) -> str:
        """What the picture shows: the run, the number of images, and the meaning of the error bars."""
        numbers = {result.figures[self.figure].num_images for result in results}
        images = f"{numbers.pop():,} images per point" if len(numbers) == 1 else ""
        intervals = kinds_of_interval(results, self.figure)
        bars = f"error bars: {'; '.join(intervals)}" if intervals else "no intervals"
        return f"{self.title}\n{', '.join(part for part in (images, bars) if part)}"

    def _legend(self, colors: dict[str, Any], styles: dict[tuple[str, str], Any], floor: Floor | None) -> list[Any]:
        """Entries for the colours, for samplers and weights if there are several, and for the grey line."""
        line = import_optional("matplotlib.lines", extra="evaluation").Line2D
        entries = [line([], [], color=paint, linewidth=2.5, label=name) for name, paint in colors.items()]
        samplers, weights = (_distinct(key[place] for key in styles) for place in (0, 1))
        if len(samplers) > 1:
            shown = {sampler: {**styles[sampler, weights[0]], "fillstyle": "full"} for sampler in samplers}
            entries += [line([], [], color=_GREY, label=name, **style) for name, style in shown.items()]
        if len(weights) > 1:
            shown = {name: {**styles[samplers[0], name], "linestyle": "none"} for name in weights}
            entries += [line([], [], color=_GREY, label=f"{name} weights", **style) for name, style in shown.items()]
        if floor is not None:
            label = f"{floor.num_images:,} held-out images"
            entries.append(line([], [], color=_GREY, linewidth=1, linestyle=_DOTTED, label=label))
        return entries


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """A colour for each name. More names than colours in the palette get shades from dark to light."""
    if len(names) <= len(PALETTE):
        return dict(zip(names, PALETTE, strict=False))
    shades = import_optional("matplotlib", extra="evaluation").colormaps["viridis"]
    return {name: shades(number / len(names)) for number, name in enumerate(names)}


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > _WIDE_RANGE


def _steps_of_decade(values: Sequence[float]) -> tuple[float, ...]:
    """Where a decade of a logarithmic axis has labels."""
    num_decades = math.log10(max(values) / min(values))
    return (1, 1.5, 2, 3, 5, 7) if num_decades < 1.2 else (1, 2, 5) if num_decades < 3 else (1,)


def _apart(places: Sequence[float], *, is_log: bool) -> list[float]:
    """Those of the sorted places whose labels do not touch. The last one is always kept."""
    position = math.log if is_log else float
    gap = _TICK_GAP * (position(places[-1]) - position(places[0]))
    kept = [places[-1]]
    for place in reversed(places[:-1]):
        if position(kept[-1]) - position(place) >= gap:
            kept.append(place)
    return kept[::-1]
