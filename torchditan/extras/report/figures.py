# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of all reports as matplotlib figures, in one style, and their encoding as SVG and PNG.

Notable:
- Changes are ratios on a logarithmic axis with labels in percent. Twice as fast and half as fast have the same distance
  from no change, and large effects such as patch size do not compress the others.
- Colours are those of Okabe and Ito, which colour-blind readers can distinguish.
- Error bars and bands are 95% intervals over training seeds.
- Labels are untrusted: they are never read as formulas, and the SVG escapes them.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from torchditan.config.optional_libraries import import_optional
from torchditan.extras.report.labels import axis_name, ordered_values, shorten, value_name

if TYPE_CHECKING:
    import pandas as pd

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
_MARKERS = ("o", "s", "D", "^", "P", "X", "v", "*")
_DASHES = ("-", "--", "-.", ":")
_PAGE_WIDTH = 12.2  # inches; the page would shrink wider figures, and their text with them
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9.5,
    "grid.color": "#E3E3E3",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: it can be searched, and any browser has a font
    "svg.hashsalt": "torchditan",  # equal figures get equal bytes
    "text.parse_math": False,
}
_LONGEST_LABEL = 64
_MOST_POINTS = 40_000  # of all curves of a panel
_MOST_ROWS = 60
_WIDE_RANGE = 4.0  # above this ratio of the largest to the smallest value, an axis is logarithmic

P = ParamSpec("P")
T = TypeVar("T")


class Curve(NamedTuple):
    """`values` by step or time. `half_widths` are those of 95% intervals. `panel` is the title of its panel, if any."""

    label: str
    values: pd.Series
    half_widths: pd.Series | None = None
    panel: str = ""
    has_failed: bool = False


class Panel(NamedTuple):
    """Curves with common axes. If it `is_smooth`, thick lines are running means over about 1/20 of each curve.

    An axis `is_log` if its values have a wide range.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    is_log: bool = False
    is_smooth: bool = False


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of what creates or encodes a figure."""

    @wraps(function)
    def in_style(*arguments: P.args, **options: P.kwargs) -> T:
        with import_optional("matplotlib", extra="analysis").rc_context(_STYLE):
            return function(*arguments, **options)

    return in_style


@styled
def encoded(figure: Any, kind: str) -> bytes:
    """The file of a figure, `svg` or `png`. Equal figures give equal bytes."""
    nameless = ("Software",) if kind == "png" else ("Creator", "Date", "Format", "Type")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a label in another script
        figure.savefig(file, format=kind, metadata=dict.fromkeys(nameless))
    return file.getvalue()


def new_figure(num_panels: int, *, height: float, width: float = 4.2, **options: Any) -> tuple[Any, list[Any]]:
    """A figure with rows of three panels, and the panels. Height and width are those of a panel, in inches."""
    columns = min(3, num_panels)
    rows = -(-num_panels // columns)
    size = (min(_PAGE_WIDTH, 1 + width * columns), height * rows)
    figure = import_optional("matplotlib.figure", extra="analysis").Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    return figure, panels[:num_panels]


def look_of(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of one of several lines."""
    cycle, number = divmod(index, len(PALETTE))
    return {"color": PALETTE[number], "marker": _MARKERS[number], "linestyle": _DASHES[cycle % len(_DASHES)]}


def add_legend(figure: Any, looks: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """A legend below the panels, if there is something to distinguish."""
    line = import_optional("matplotlib.lines", extra="analysis").Line2D
    # matplotlib hides labels that begin with an underscore.
    named = [(f" {name}" if name.startswith("_") else name, look) for name, look in looks]
    entries = [line([], [], label=shorten(name, _LONGEST_LABEL), **look) for name, look in named]
    if len(entries) > 1:
        longest = max(len(entry.get_label()) for entry in entries)
        columns = max(1, min(len(entries), round(14 * figure.get_figwidth()) // (longest + 10)))
        figure.legend(handles=entries, loc="outside lower left", ncols=columns, handlelength=2.4)


def scale_axis(axis: Any, values: Sequence[float], *, from_zero: bool = False) -> None:
    """Make an axis logarithmic with plain labels if its values have a wide range; else linear."""
    ticker = import_optional("matplotlib.ticker", extra="analysis")
    if len(values) and min(values) > 0 and max(values) / min(values) > _WIDE_RANGE:
        num_decades = math.log10(max(values) / min(values))
        steps = (1, 1.5, 2, 3, 5, 7) if num_decades < 1.2 else (1, 2, 5) if num_decades < 3 else (1,)
        axis._set_axes_scale("log")
        axis.set_major_locator(ticker.LogLocator(subs=steps))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(ticker.NullLocator())
    elif from_zero:
        axis.axes.set_ylim(0, 1.08 * max(values))


@styled
def curves_figure(panels: Sequence[Panel]) -> Any:
    """Curves of all kinds: a panel for each, and a colour for each label. A cross marks the end of a failed run."""
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    looks = {label: look_of(index) | {"marker": None} for index, label in enumerate(labels)}
    # Equal curves cover each other, so the first of the others are wider.
    widths = {label: 1.5 + min(len(labels) - 1 - index, 3) for index, label in enumerate(labels)}
    figure, axes = new_figure(len(panels), height=3.0)
    for panel, axis in zip(panels, axes, strict=True):
        for curve in panel.curves:
            _draw_curve(axis, curve, panel, looks[curve.label] | {"linewidth": widths[curve.label]})
        values = [value for curve in panel.curves for value in (curve.values.min(), curve.values.max())]
        if panel.is_log:
            scale_axis(axis.yaxis, values)
        else:
            axis.set_ylim(0, 1.08 * max(values) or 1.0)
        ends = [curve.values.index[-1] for curve in panel.curves]
        if panel.x != "step" and max(ends) > 10 * min(ends) > 0:  # times of devices that are far apart
            scale_axis(axis.xaxis, [x for curve in panel.curves for x in curve.values.index[curve.values.index > 0]])
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.set_title(panel.title)
    add_legend(figure, looks.items())
    return figure


def _draw_curve(axis: Any, curve: Curve, panel: Panel, look: dict[str, Any]) -> None:
    step = 1 + len(curve.values) * len(panel.curves) // _MOST_POINTS
    reach = len(curve.values) // 40 if panel.is_smooth else 0
    if reach and curve.half_widths is None:
        axis.plot(curve.values.iloc[::step], linewidth=0.8, alpha=0.3, color=look["color"])
    smooth = curve.values.rolling(2 * reach + 1, center=True, min_periods=1).mean()
    axis.plot(smooth.iloc[::step], **look | ({"marker": "o", "markersize": 3.5} if len(smooth) < 30 else {}))
    if curve.half_widths is not None:
        low, high = (curve.values + sign * curve.half_widths for sign in (-1, 1))
        axis.fill_between(curve.values.index, low, high, color=look["color"], alpha=0.18, linewidth=0)
    if curve.has_failed:
        axis.plot(smooth.index[-1:], smooth.iloc[-1:], "X", color=look["color"], markersize=9)


@styled
def effects_figure(effects: pd.DataFrame) -> Any:
    """Medians, quartiles and extremes of the changes: a panel per metric, a row per `label`, a colour per grid."""
    grids = list(effects["grid"].unique())
    figure, panels = _rows_figure(effects, "metric", height=0.3 * max(1, 0.6 * len(grids)))
    for panel, mine in panels:
        for effect in mine.itertuples():
            number = grids.index(effect.grid)
            place, color = effect.row + 0.7 * ((number + 0.5) / len(grids) - 0.5), PALETTE[number % len(PALETTE)]
            for ends, width in (
                ((effect.minimum_percent, effect.maximum_percent), 1),
                ((effect.quartile_1_percent, effect.quartile_3_percent), 5),
            ):
                panel.plot([1 + end / 100 for end in ends], [place, place], color=color, linewidth=width)
            median = 1 + effect.median_percent / 100
            panel.plot(median, place, "o", color="white", markeredgecolor=color, markeredgewidth=2, zorder=3)
        ratios = 1 + mine[["minimum_percent", "maximum_percent"]] / 100
        _percent_axis(panel, min(0.98, ratios.min(axis=None)), max(1.02, ratios.max(axis=None)))
    add_legend(figure, [(name, look_of(index) | {"marker": None}) for index, name in enumerate(grids)])
    return figure


@styled
def verdict_figure(verdicts: pd.DataFrame, colors: dict[str, str]) -> Any:
    """Differences with their 95% intervals: a panel per figure, a row per `label`, a colour per verdict."""
    figure, panels = _rows_figure(verdicts, "figure", height=0.3)
    for panel, mine in panels:
        for verdict in mine.itertuples():
            half = None if verdict.num_seeds < 2 else verdict.half_width
            color = colors[verdict.verdict]
            panel.errorbar(verdict.difference, verdict.row, xerr=half, color=color, fmt="o", capsize=3, elinewidth=2)
        panel.axvline(0, color="#333", linewidth=1, zorder=1)
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlabel("difference")
    words = set(verdicts["verdict"])
    add_legend(figure, [(word, {"color": color, "marker": "o"}) for word, color in colors.items() if word in words])
    return figure


def _rows_figure(frame: pd.DataFrame, by: str, *, height: float) -> tuple[Any, list[tuple[Any, pd.DataFrame]]]:
    """A figure with a row per `label` and a panel per value of `by`; each panel with its part of the frame."""
    labels = list(frame["label"].unique())[:_MOST_ROWS]
    frame = frame[frame["label"].isin(labels)]
    parts = [part.assign(row=part["label"].map(labels.index)) for _, part in frame.groupby(by, sort=False)]
    figure, panels = new_figure(len(parts), height=1.1 + height * len(labels), sharey=True)
    for panel, part in zip(panels, parts, strict=True):
        panel.set_title(f"{part['name'].iloc[0]}, {part['better'].iloc[0]} is better")
    panels[0].set_yticks(range(len(labels)), [shorten(name, _LONGEST_LABEL) for name in labels])
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    return figure, list(zip(panels, parts, strict=True))


def _percent_axis(panel: Any, low: float, high: float) -> None:
    """A logarithmic axis of ratios with labels in percent."""
    ticker = import_optional("matplotlib.ticker", extra="analysis")
    panel.set_xscale("log")
    panel.set_xlim(low * (low / high) ** 0.1, high * (high / low) ** 0.1)
    few = ticker.MaxNLocator(4, steps=[1, 2, 5, 10])
    panel.xaxis.set_major_locator(few if high / low < 3 else ticker.LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda ratio, _: f"{round(100 * (ratio - 1), 6):+g}%".replace("+0%", "0"))
    )
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.axvline(1, color="#333", linewidth=1, zorder=1)


@styled
def axes_figure(cells: pd.DataFrame, axes: Sequence[str], column: str, title: str) -> Any:
    """A column of the cells over every axis that varies: a panel per axis, a line per setting of the other axes.

    The colour is that of the first axis with few values.
    """
    varied = [axis for axis in axes if cells[axis].nunique() > 1]
    color_axis = next(
        (axis for axis in ["source", *reversed(varied)] if 1 < cells[axis].nunique() <= len(PALETTE)), "source"
    )
    colored = ordered_values(color_axis, cells[color_axis])
    color_of = dict(zip(colored, PALETTE * len(colored), strict=False))
    figure, panels = new_figure(len(varied), height=3.0, sharey=True)
    for panel, axis in zip(panels, varied, strict=True):
        values = ordered_values(axis, cells[axis])
        x, y, half = cells[axis].map(values.index), cells[column], cells.get(f"{column}_half", 0 * cells[column])
        others = [other for other in ("source", *axes) if other != axis]
        for rows in cells.groupby(others, sort=False, dropna=False).indices.values():
            rows = rows[x.iloc[rows].argsort()]
            color = color_of[cells[color_axis].iloc[rows[0]]] if axis != color_axis else "#BBBBBB"
            panel.plot(x.iloc[rows], y.iloc[rows], color=color, linewidth=1, alpha=0.7)
        colors = cells[color_axis].map(color_of)
        panel.scatter(x, y, c=colors, s=16, zorder=3)
        panel.vlines(x, y - half, y + half, colors=colors, linewidth=1.2)
        names = [shorten(value_name(axis, value), 16) for value in values]
        is_long = sum(map(len, names)) > 26
        panel.set_xticks(range(len(values)), names, rotation=30 if is_long else 0, ha="right" if is_long else "center")
        panel.set_xlim(-0.4, len(values) - 0.6)
        panel.set_xlabel(axis_name(axis))
        scale_axis(panel.yaxis, cells[column].tolist(), from_zero=True)
    for panel in panels[::3]:
        panel.set_ylabel(title)
    entries = [
        (f"{axis_name(color_axis)}: {value_name(color_axis, value)}", color) for value, color in color_of.items()
    ]
    add_legend(figure, [(name, {"color": color, "marker": "o"}) for name, color in entries])
    return figure
