# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The curves of compare.html as plotly figures: panels side by side, one line per run.

Notable: equal curves cover each other, so the first line is the widest and all lines stay visible.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torchditan.report import plots
from torchditan.report.compare import Comparison, Run

MOST_POINTS = 2000
"""Maximum number of points per curve; more would not be visible."""
_WIDE_RANGE = 4.0  # above this ratio a loss is drawn on a logarithmic axis
_FAR_APART = 10.0  # the same for times: ratio of the slowest to the fastest run

Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """One of the plots of a row; `points` returns the curve of a run."""

    x: str
    y: str
    points: Callable[[Run], Points]


def curves_figure(comparison: Comparison, panels: Sequence[Panel], *, mode: str = "lines") -> Any | None:
    """Curves of all runs in panels side by side; None if no run has a point."""
    go = import_module("plotly.graph_objects")
    unit = time_unit(comparison)[0]
    titles = [
        f"{f'time in {unit}' if panel.y == unit else panel.y} against {'time' if panel.x == unit else panel.x}"
        for panel in panels
    ]
    figure = plots.subplots(cols=len(panels), subplot_titles=titles, horizontal_spacing=0.08)
    drawn: list[list[Points]] = []
    for column, panel in enumerate(panels, start=1):
        curves = [_thinned(panel.points(run)) for run in comparison.runs]
        drawn.append(curves)
        for index, (run, points) in enumerate(zip(comparison.runs, curves, strict=True)):
            color = plots.PALETTE[index % len(plots.PALETTE)]
            label = html.escape(run.label, quote=False)
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in points],
                    y=[y for _, y in points],
                    mode=mode if len(points) > 1 else "markers",
                    name=label,
                    legendgroup=str(index),
                    showlegend=column == 1,
                    hovertemplate=f"<b>{label}</b><br>{panel.x} %{{x:.6g}}<br>{panel.y} %{{y:.6g}}<extra></extra>",
                    line={"color": color, "width": _width(index, len(comparison.runs))},
                    marker={"symbol": plots.SYMBOLS[index % len(plots.SYMBOLS)], "size": 8, "color": color},
                ),
                row=1,
                col=column,
            )
        _scale(figure, comparison, panel, curves, column)
    if not any(points for curves in drawn for points in curves):
        return None
    return plots.style(figure, height=440, top=50, legend_gap=56)


def _scale(figure: Any, comparison: Comparison, panel: Panel, curves: list[Points], column: int) -> None:
    """Set the axes of one panel and draw the line at which the runs are compared."""
    import numpy as np

    where = {"row": 1, "col": column}
    figure.update_xaxes(title=panel.x, **where)
    unit, seconds = time_unit(comparison)
    ends = [points[-1] for points in curves if points]
    values = np.array([y for points in curves for _, y in points if y > 0])
    is_wide = "loss" in panel.y and len(values) and values.max() / values.min() > _WIDE_RANGE
    if is_wide or (panel.y == unit and _are_far_apart([y for _, y in ends])):
        plots.log_axis(figure, values, **where)
    if panel.x == unit and _are_far_apart([x for x, _ in ends]):
        _log_time(figure, [x for points in curves for x, _ in points if x > 0], **where)
    mark: float | None = comparison.equal_step
    if panel.x == unit:
        mark = None if comparison.equal_time_s is None else comparison.equal_time_s / seconds
    if mark:
        figure.add_vline(x=mark, line={"color": "#555", "width": 1, "dash": "dot"}, **where)


def _log_time(figure: Any, times: list[float], **where: int) -> None:
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks], **where)


def _width(index: int, number: int) -> float:
    """Line width: the first line is the widest, so that lines on top of each other stay visible."""
    return 1.8 + 1.7 * min(number - 1 - index, 3)


def _thinned(points: Sequence[tuple[float, float]]) -> Points:
    """At most `MOST_POINTS` of the points, including the first and the last."""
    if len(points) <= MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(index * last / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def time_unit(comparison: Comparison) -> tuple[str, float]:
    """Title of the time axes and their unit in seconds, chosen for the longest and the shortest run."""
    times = [run.elapsed_s for run in comparison.runs if run.elapsed_s]
    typical = max(times, default=0.0)
    if _are_far_apart(times):
        typical = math.sqrt(min(times) * max(times))
    if typical < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if typical < 3 * 3600 else ("hours", 3600.0)


def _are_far_apart(times: Sequence[float]) -> bool:
    """Whether the fastest run would be unreadable on a linear axis."""
    return bool(times) and min(times) > 0 and max(times) / min(times) > _FAR_APART


def over_time(run: Run, curve: Iterable[tuple[int, float]], seconds: float) -> Points:
    """A curve over the time at which its steps were reached, in units of `seconds`."""
    known = ((run.reached_at(step), value) for step, value in curve)
    return [(time / seconds, value) for time, value in known if time is not None]
