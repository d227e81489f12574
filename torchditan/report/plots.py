# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of all reports as matplotlib figures, in one style, and their encoding as SVG and PNG.

Notable:
- Changes are ratios on a logarithmic axis with labels in percent. Twice as fast and half as fast have the same distance
  from no change, and large effects such as patch size do not compress the others.
- Colours are those of Okabe and Ito, which colour-blind readers can distinguish.
- Error bars and bands are 95% intervals over training seeds. One that would cover impossible values is left out.
- A figure is None if its runs are missing; the report then has no such plot.
- Labels are untrusted: they are never read as formulas, and the SVG escapes them.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from torchditan.ablation.grid import (
    BATCH_SIZE,
    CHECKPOINT_FRACTION,
    CHECKPOINTING,
    COMPILE,
    FLAVOR,
    PARALLEL,
    PATCH_SIZE,
    PRECISION,
)
from torchditan.config.optional_libraries import import_optional
from torchditan.finetune.resolutions import MODEL
from torchditan.report.effects import MEMORY, METRICS, PER_DEVICE, THROUGHPUT, Effect, frontier, scaling
from torchditan.report.grid_results import GridResults, ordered_values, work_axes
from torchditan.report.labels import MINUS, axis_name, change_name, evenly, shorten, value_name
from torchditan.report.losses import LossCurve
from torchditan.report.page import Look, Plot
from torchditan.report.verdicts import BETTER, INCONCLUSIVE, ONE_SEED, WORSE, verdict_names

if TYPE_CHECKING:
    import pandas as pd

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "D", "^", "P", "X", "v", "*")
DASHES = ("-", "--", "-.", ":")
_LEGEND_DASHES = ("", "8 4", "2 3", "8 3 2 3")
DOTTED = (0, (1, 2))
PAGE_WIDTH = 12.2
"""Inches. Wider figures would be shrunk by the page, and their text with them."""
_SMALL_WIDTH = 4.7
_MOST_MARKED = 30
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
_MOST_BARS = 60
_MOST_PANELS = 8
_VECTOR_POINTS = 3000  # more points are drawn as pixels inside the SVG
_MOST_POINTS = 2000  # of a curve; more would not be visible
_WIDE_RANGE = 4.0  # above this ratio of the largest to the smallest value, an axis is logarithmic
_NICE_PERCENT = (0.2, 0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 95)
_NICE_GROWTH = (*_NICE_PERCENT[:12], 75, 100, 150, 200, 300, 400, 500, 700, 1000, 1500, 2000, 3000, 5000, 10000)
_PERCENT_GAP = 0.18  # between two labels, of the length of the axis
_VERDICT_COLORS = {BETTER: PALETTE[0], WORSE: PALETTE[1], INCONCLUSIVE: PALETTE[7], ONE_SEED: PALETTE[6]}

P = ParamSpec("P")
T = TypeVar("T")
Points = Sequence[tuple[float, float]]


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of what creates or draws a figure."""

    @wraps(function)
    def in_style(*arguments: P.args, **options: P.kwargs) -> T:
        with import_optional("matplotlib", extra="analysis").rc_context(_STYLE):
            return function(*arguments, **options)

    return in_style


@styled
def draw(figure: Any, name: str, title: str, looks: Sequence[Look] = ()) -> Plot:
    """Encode a figure for a page. Its files get a legend of `looks`, which the page shows once for several plots."""
    svg = _encoded(figure, "svg")
    inline = svg.decode()
    return Plot(name, title, inline[inline.index("<svg") :], partial(_files, figure, name, svg, looks))


@styled
def _files(figure: Any, name: str, svg: bytes, looks: Sequence[Look]) -> dict[str, bytes]:
    if len(looks) > 1:
        add_legend(figure, [legend_entry(look.name, color=look.color, linestyle=_dashes(look)) for look in looks])
        svg = _encoded(figure, "svg")
    return {f"{name}.svg": svg, f"{name}.png": _encoded(figure, "png")}


def _encoded(figure: Any, kind: str) -> bytes:
    """Equal figures give equal bytes."""
    nameless = ("Software",) if kind == "png" else ("Creator", "Date", "Format", "Type")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a label in another script
        figure.savefig(file, format=kind, metadata=dict.fromkeys(nameless))
    return file.getvalue()


def new_figure(
    num_panels: int, *, columns: int = 3, height: float, width: float = PAGE_WIDTH, **options: Any
) -> tuple[Any, list[Any]]:
    """A figure, and its panels row by row. `height` is that of a row, in inches."""
    columns = min(columns, num_panels)
    rows = -(-num_panels // columns)
    figure = import_optional("matplotlib.figure", extra="analysis").Figure(
        figsize=(width, height * rows), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    return figure, panels[:num_panels]


def legend_entry(name: str, **look: Any) -> Any:
    """An entry of a legend. matplotlib hides labels that begin with an underscore."""
    line = import_optional("matplotlib.lines", extra="analysis").Line2D
    return line([], [], label=shorten(f" {name}" if name.startswith("_") else name, _LONGEST_LABEL), **look)


def add_legend(figure: Any, entries: Sequence[Any]) -> None:
    """A legend below the panels, if there is something to distinguish."""
    if len(entries) > 1:
        longest = max(len(entry.get_label()) for entry in entries)
        columns = max(1, min(len(entries), round(14 * figure.get_figwidth()) // (longest + 10)))
        figure.legend(handles=entries, loc="outside lower left", ncols=columns, handlelength=2.4)


def look_of(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of one of several lines."""
    cycle, number = divmod(index, len(PALETTE))
    return {"color": PALETTE[number], "marker": MARKERS[number], "linestyle": DASHES[cycle % len(DASHES)]}


def is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > _WIDE_RANGE


def scale_axis(axis: Any, values: Sequence[float], *, from_zero: bool = False) -> None:
    """Make an axis logarithmic with plain labels if its values have a wide range; else linear."""
    ticker = import_optional("matplotlib.ticker", extra="analysis")
    if is_wide(values):
        num_decades = math.log10(max(values) / min(values))
        steps = (1, 1.5, 2, 3, 5, 7) if num_decades < 1.2 else (1, 2, 5) if num_decades < 3 else (1,)
        axis._set_axes_scale("log")
        axis.set_major_locator(ticker.LogLocator(subs=steps))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(ticker.NullLocator())
    elif from_zero and values and min(values) >= 0:
        axis.axes.set_ylim(0, max(axis.axes.get_ylim()[1], 1.08 * max(values)))


# Grids


@styled
def effects_figure(effects: Sequence[Effect]) -> Any | None:
    """Median, quartiles, extremes and single pairs of every effect on every metric, a colour per source."""
    effects = [effect for effect in effects if effect.change(THROUGHPUT).num_pairs][:_MOST_BARS]
    if not effects:
        return None
    metrics = [metric for metric in METRICS if any(effect.change(metric).num_pairs for effect in effects)]
    sources = list(dict.fromkeys(effect.source for effect in effects))
    keys = list(dict.fromkeys(effect.key for effect in effects))
    is_shared = len(keys) < len(effects)  # several sources in one row
    height = 1.1 + 0.3 * len(keys) * (max(1.0, 0.6 * len(sources)) if is_shared else 1)
    figure, panels = new_figure(len(metrics), height=height, sharey=True)
    for panel, metric in zip(panels, metrics, strict=True):
        known = [effect for effect in effects if effect.change(metric).num_pairs]
        for effect in known:
            change, source = effect.change(metric), sources.index(effect.source)
            shift = 0.7 * ((source + 0.5) / len(sources) - 0.5) if is_shared else 0.0
            _whisker(panel, effect, change, metric.column, keys.index(effect.key) + shift, PALETTE[source % 8])
        low = min(1.0, *(1 + effect.change(metric).minimum / 100 for effect in known))
        high = max(1.0, *(1 + effect.change(metric).maximum / 100 for effect in known))
        _percent_axis(panel, low, high)
        panel.set_title(f"{metric.name}, {metric.better} is better")
    labels = [shorten(change_name(*key), _LONGEST_LABEL) for key in keys]
    panels[0].set_yticks(range(len(keys)), labels)
    panels[0].set_ylim(len(keys) - 0.4, -0.6)
    add_legend(figure, [legend_entry(name, color=look_of(i)["color"], linewidth=5) for i, name in enumerate(sources)])
    return figure


def _whisker(panel: Any, effect: Effect, change: Any, column: str, height: float, color: str) -> None:
    values = 1 + effect.pairs[f"{column}_percent"].dropna().to_numpy(float) / 100
    panel.plot(values[:400], [height] * len(values[:400]), "o", color=color, alpha=0.2, markersize=4)
    for ends, width in (((change.minimum, change.maximum), 1), ((change.quartile_1, change.quartile_3), 5)):
        panel.plot([1 + end / 100 for end in ends], [height, height], color=color, linewidth=width)
    median = 1 + change.median / 100
    panel.plot(median, height, "o", color="white", markeredgecolor=color, markeredgewidth=2, markersize=7, zorder=3)


def _percent_axis(panel: Any, low: float, high: float) -> None:
    """A logarithmic axis of ratios with labels in percent."""
    width = max(math.log10(high / low), 0.02)
    start, end = math.log10(low) - 0.1 * width, math.log10(high) + 0.1 * width
    panel.set_xscale("log")
    panel.set_xlim(10**start, 10**end)
    ticks = percent_ticks(start, end)
    labels = [f"{tick:+g}%".replace("-", MINUS) if tick else "0" for tick in ticks]
    panel.set_xticks([1 + tick / 100 for tick in ticks], labels)
    panel.set_xticks([], minor=True)
    panel.axvline(1, color="#333", linewidth=1, zorder=1)


def percent_ticks(start: float, end: float) -> list[float]:
    """Round percentages on an axis of log10 ratios, from no change outwards, as far apart as their labels need."""
    ticks = [0.0]
    for sign, nice in ((1, _NICE_GROWTH), (-1, _NICE_PERCENT)):
        last = 0.0
        for value in nice:
            position = math.log10(1 + sign * value / 100)
            if start <= position <= end and abs(position - last) >= _PERCENT_GAP * (end - start):
                ticks.append(float(sign * value))
                last = position
    return sorted(ticks)


@styled
def verdict_figure(verdicts: pd.DataFrame) -> Any | None:
    """Differences with their 95% intervals, a panel per figure, a row per comparison, a colour per verdict."""
    known = verdicts[verdicts["num_seeds"] > 0]
    if known.empty:
        return None
    known = known.assign(row=[", ".join(filter(None, name)) for name in verdict_names(known)])
    rows = list(known["row"].unique())[:_MOST_BARS]
    figure, panels = new_figure(known["figure"].nunique(), height=1.1 + 0.3 * len(rows), sharey=True)
    for panel, (_, mine) in zip(panels, known.groupby("figure", sort=False), strict=True):
        for verdict in mine[mine["row"].isin(rows)].itertuples():
            panel.errorbar(
                verdict.difference, rows.index(verdict.row), xerr=verdict.half_width if verdict.has_interval else None,
                color=_VERDICT_COLORS[verdict.verdict], fmt="o", capsize=3, elinewidth=2,
                fillstyle="none" if verdict.verdict == ONE_SEED else "full",
            )  # fmt: skip
        panel.axvline(0, color="#333", linewidth=1, zorder=1)
        panel.set_title(f"{mine['name'].iloc[0]}, {mine['better'].iloc[0]} is better")
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlabel("difference")
    panels[0].set_yticks(range(len(rows)), [shorten(name, _LONGEST_LABEL) for name in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    words = set(known["verdict"])
    add_legend(
        figure,
        [legend_entry(word, color=color, marker="o") for word, color in _VERDICT_COLORS.items() if word in words],
    )
    return figure


@styled
def axes_figure(results: GridResults, column: str, title: str) -> Any | None:
    """A column of the cells over every varied axis: a panel per axis, a line per setting of the other axes."""
    cells = results.cells[results.cells[column].notna()]
    varied = sorted(results.varied, key=lambda axis: axis != BATCH_SIZE)
    axes = [axis for axis in varied if cells[axis].nunique() > 1][:_MOST_PANELS]
    if not axes:
        return None
    collection = import_optional("matplotlib.collections", extra="analysis").LineCollection
    colors, entries = _colors(results, cells)
    figure, panels = new_figure(len(axes), columns=4, height=3.0, sharey=True, width=min(PAGE_WIDTH, 2 + 4 * len(axes)))
    y = cells[column].to_numpy(float)
    half = cells[f"{column}_half"].where(cells[f"{column}_half"] < y).to_numpy(float)  # the others: too few runs
    for panel, axis in zip(panels, axes, strict=True):
        values = ordered_values(axis, cells[axis].unique())
        x = cells[axis].map({value: place for place, value in enumerate(values)}).to_numpy(float)
        rest = ["source", *(other for other in results.axes if other != axis)]
        lines = [rows[x[rows].argsort()] for rows in cells.groupby(rest, sort=False, dropna=False).indices.values()]
        lines = [rows for rows in lines if len(rows) > 1]
        looks = [colors[rows[0]] if len({colors[row] for row in rows}) == 1 else "#BBBBBB" for rows in lines]
        segments = [list(zip(x[rows], y[rows], strict=True)) for rows in lines]
        many = len(cells) > _VECTOR_POINTS
        panel.add_collection(collection(segments, colors=looks, linewidths=1, alpha=0.7, rasterized=many))
        panel.scatter(x, y, c=colors, s=16, zorder=3, rasterized=many)
        panel.vlines(x, y - half, y + half, colors=colors, linewidth=1.2, rasterized=many)
        names = [shorten(value_name(axis, value), 16) for value in values]
        is_long = sum(map(len, names)) > 26
        panel.set_xticks(range(len(values)), names, rotation=30 if is_long else 0, ha="right" if is_long else "center")
        panel.set_xlim(-0.4, len(values) - 0.6)
        panel.set_xlabel(axis_name(axis))
        scale_axis(panel.yaxis, y.tolist(), from_zero=True)
    for panel in panels[::4]:
        panel.set_ylabel(title)
    add_legend(figure, entries)
    return figure


def _colors(results: GridResults, cells: pd.DataFrame) -> tuple[list[str], list[Any]]:
    """The colour of each cell, by the first axis that has some values but not many; and entries of a legend."""
    usual = ("source", MODEL, FLAVOR, PATCH_SIZE, COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION, PRECISION, PARALLEL)
    candidates = [axis for axis in usual if axis in cells] + [axis for axis in results.varied if axis != BATCH_SIZE]
    axis = next((axis for axis in candidates if 1 < cells[axis].nunique() <= len(PALETTE)), None)
    if axis is None:
        return [PALETTE[0]] * len(cells), []
    values = ordered_values(axis, cells[axis].unique())
    color_of = dict(zip(values, PALETTE, strict=False))
    entries = [
        legend_entry(f"{axis_name(axis)}: {value_name(axis, value)}", color=color, marker="o", linewidth=1)
        for value, color in color_of.items()
    ]
    return [color_of[value] for value in cells[axis]], entries


@styled
def frontier_figure(results: GridResults) -> Any | None:
    """Throughput per device over peak memory, with the Pareto frontier; None if all cells are alike."""
    cells = results.cells[results.cells[MEMORY.column].notna() & results.cells[PER_DEVICE].notna()]
    if min(cells[MEMORY.column].nunique(), cells[PER_DEVICE].nunique()) < 2:
        return None
    figure, (panel,) = new_figure(1, height=4.2, width=8.4)
    colors, entries = _colors(results, cells)
    x, y = (cells[column].to_numpy(float) for column in (MEMORY.column, PER_DEVICE))
    panel.scatter(x, y, c=colors, s=22, rasterized=len(cells) > _VECTOR_POINTS)
    best = frontier(cells)
    for _, line in best.groupby(["source", *work_axes(best.columns)], sort=False):
        steps = line[MEMORY.column], line[PER_DEVICE]
        panel.plot(*steps, drawstyle="steps-post", color="#333", linewidth=1.2, linestyle=DOTTED, zorder=1)
        panel.plot(*steps, "o", color="#333", fillstyle="none", markersize=9)
    panel.set_xlabel("peak memory per device, GiB")
    panel.set_ylabel("images/s per device")
    scale_axis(panel.yaxis, y.tolist())
    scale_axis(panel.xaxis, x.tolist())
    line = legend_entry("frontier: nothing else is better in both", color="#333", linestyle=DOTTED)
    add_legend(figure, [*entries, line])
    return figure


@styled
def scaling_figure(results: GridResults) -> Any | None:
    """Throughput per device relative to the fewest devices, a line per mode and source."""
    table = scaling(results)
    if table.empty:
        return None
    figure, (panel,) = new_figure(1, height=3.6, width=7)
    several = len(results.sources) > 1
    entries = []
    for number, ((source, mode), line) in enumerate(table.groupby(["source", "mode"], sort=False)):
        panel.plot(line["num_devices"], 100 * line["part"], **look_of(number))
        entries.append(legend_entry(f"{mode}, {source}" if several else str(mode), **look_of(number)))
    devices = sorted(table["num_devices"].unique().tolist())
    panel.set_xscale("log")
    panel.set_xticks(devices, map(str, devices))
    panel.set_xticks([], minor=True)
    panel.set_xlabel("devices (batch per device constant)")
    panel.set_ylabel("% of images/s per device")
    panel.axhline(100, color="#333", linewidth=1, linestyle=DOTTED)
    panel.set_ylim(bottom=0)
    add_legend(figure, entries)
    return figure


@styled
def loss_figure(curves: Sequence[LossCurve]) -> Any | None:
    """Loss over steps: a panel per precision, a colour per setting, and a cross at the end of failed runs.

    The mean over training seeds has a band, its 95% interval.
    """
    if not curves:
        return None
    precisions = ordered_values(PRECISION, [curve.precision for curve in curves])
    settings = list(dict.fromkeys(curve.setting for curve in curves))
    figure, panels = new_figure(len(precisions), height=4, sharey=True, width=min(PAGE_WIDTH, 3 + 5 * len(precisions)))
    for curve in curves:
        panel = panels[precisions.index(curve.precision)]
        look = {**look_of(settings.index(curve.setting)), "marker": None}
        panel.plot(curve.steps, curve.losses, linewidth=1.6, alpha=0.9 if len(curves) < 40 else 0.4, **look)
        if curve.half_widths:
            low = [y - half if half < y else math.nan for y, half in zip(curve.losses, curve.half_widths, strict=True)]
            high = [y + half for y, half in zip(curve.losses, curve.half_widths, strict=True)]
            panel.fill_between(curve.steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
        if curve.status not in ("completed", "skipped"):
            panel.plot(curve.steps[-1], curve.losses[-1], "X", color=look["color"], markersize=9)
    losses = [loss for curve in curves for loss in curve.losses]
    for panel, precision in zip(panels, precisions, strict=True):
        panel.set_title(value_name(PRECISION, precision))
        panel.set_xlabel("step")
        scale_axis(panel.yaxis, losses)
    panels[0].set_ylabel("loss")
    looks = [{**look_of(index), "marker": None} for index in range(len(settings))]
    add_legend(figure, [legend_entry(name or "loss", **look) for name, look in zip(settings, looks, strict=True)])
    return figure


# Runs


class Panel(NamedTuple):
    """Curves of runs, in the order of the runs.

    `faint` are the single values behind smoothed curves. An axis `is_log` if its values have a wide range.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Points]
    faint: Sequence[Points] = ()
    is_log: bool = False


def draw_panel(name: str, panel: Panel, looks: Sequence[Look]) -> Plot:
    return draw(_small_figure(panel, looks), f"plot-{name}", panel.title, looks)


@styled
def _small_figure(panel: Panel, looks: Sequence[Look]) -> Any:
    """One panel that is readable on a phone. The page has its title and its legend."""
    figure, (axis,) = new_figure(1, height=3.0, width=_SMALL_WIDTH)
    faint = panel.faint or [()] * len(panel.curves)
    for points, raw, look in zip(panel.curves, faint, looks, strict=True):
        if raw:
            axis.plot(*zip(*evenly(raw, _MOST_POINTS), strict=True), linewidth=0.8, alpha=0.3, color=look.color)
        if points:
            marker = "o" if len(points) < _MOST_MARKED else ""
            drawn = {"color": look.color, "linestyle": _dashes(look), "marker": marker, "markersize": 3.5}
            axis.plot(*zip(*evenly(points, _MOST_POINTS), strict=True), linewidth=look.width, **drawn)
    values = [y for points in (*panel.curves, *faint) for _, y in points]
    if panel.is_log:
        scale_axis(axis.yaxis, values)
    elif values:
        axis.set_ylim(0, 1.08 * max(values) or 1.0)
    ends = [points[-1][0] for points in panel.curves if points]
    if panel.x != "step" and max(ends) > 10 * min(ends) > 0:  # times of devices that are far apart
        scale_axis(axis.xaxis, [x for points in panel.curves for x, _ in points if x > 0])
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    return figure


def _dashes(look: Look) -> Any:
    return (0, tuple(float(length) / 2 for length in look.dashes.split())) if look.dashes else "-"


def looks_of(names: Sequence[str], *, is_ordered: bool = False) -> list[Look]:
    """A colour for each name, and dashes where colours repeat. Ordered names get shades from dark to light.

    Equal curves cover each other, so the first of the others are wider.
    """
    if is_ordered:
        to_hex = import_optional("matplotlib.colors", extra="analysis").to_hex
        shades = import_optional("matplotlib", extra="analysis").colormaps["viridis"]
        last = max(1, len(names) - 1)
        return [Look(name, to_hex(shades(0.88 * index / last))) for index, name in enumerate(names)]
    cycles = [divmod(index, len(PALETTE)) for index in range(len(names))]
    return [
        Look(name, PALETTE[number], _LEGEND_DASHES[cycle % len(_LEGEND_DASHES)], width=1.5 + min(len(names) - 1 - i, 3))
        for i, (name, (cycle, number)) in enumerate(zip(names, cycles, strict=True))
    ]
