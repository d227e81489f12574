# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plots of the report as plotly figures: percent changes, interactions, batch, frontier, scaling, folders.

Notable:
- Changes are ratios on a logarithmic axis with labels in percent. Twice as fast and half as fast have the same distance
  from no change, and large effects such as patch size do not compress the others.
- Colours are those of Okabe and Ito, which colour-blind readers can distinguish. In the heat maps blue is better and
  orange is worse.
- Means over training seeds have bars: their 95% intervals.
- A figure is None if its runs are missing; the report then shows a sentence instead.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from torchditan.finetune.resolutions import MODEL, RESOLUTION
from torchditan.report.analysis import Analysis, Effect, frontier, interactions, scaling
from torchditan.report.findings import AXIS_NAMES, effect_name, percent, value_name
from torchditan.report.grid_results import ordered_values, work_axes
from torchditan.report.pairs import MEMORY, METRICS, THROUGHPUT, Metric
from torchditan.report.sanity import MINUS

if TYPE_CHECKING:
    import pandas as pd

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_NICE_PERCENT = (0.2, 0.5, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90, 95)
_NICE_GROWTH = (*_NICE_PERCENT[:12], 75, 100, 150, 200, 300, 400, 500, 700, 1000, 1500, 2000, 3000, 5000, 10000)
_MOST_POINTS = 400  # single pairs drawn per whisker
_SVG_POINTS = 3000  # above this number WebGL draws the points
_MOST_COLUMNS = 24
_LETTER_WIDTH, _TICK_GAP = 0.035, 0.05  # relative to the narrowest panel
_PER_DEVICE = "images_per_second_per_device_mean"


def effects_figure(analysis: Analysis, effects: list[Effect]) -> Any | None:
    """Median, quartiles, extremes and single pairs of every effect on every metric, one colour per source."""
    effects = [effect for effect in effects if effect.change(THROUGHPUT).num_pairs]
    if not effects:
        return None
    metrics = [metric for metric in METRICS if any(effect.change(metric).num_pairs for effect in effects)]
    sources = list(dict.fromkeys(effect.source for effect in effects))
    keys = list(dict.fromkeys(effect.key for effect in effects))
    titles = [f"{metric.name}, {metric.better} is better" for metric in metrics]
    figure = subplots(cols=len(metrics), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=titles)
    spread = 1 - 1 / len(sources) - 0.1 if len(keys) < len(effects) else 0.0
    for column, metric in enumerate(metrics, start=1):
        known = [effect for effect in effects if effect.change(metric).num_pairs]
        heights = {
            id(effect): keys.index(effect.key)
            + spread * (sources.index(effect.source) / max(len(sources) - 1, 1) - 0.5)
            for effect in known
        }
        for number, source in enumerate(sources):
            mine = [effect for effect in known if effect.source == source]
            color = PALETTE[number % len(PALETTE)]
            for trace in _whiskers(mine, [heights[id(effect)] for effect in mine], metric, color=color, name=source):
                figure.add_trace(trace.update(showlegend=trace.showlegend and column == 1), row=1, col=column)
        low = min([1.0, *(1 + effect.change(metric).minimum / 100 for effect in known)])
        high = max([1.0, *(1 + effect.change(metric).maximum / 100 for effect in known)])
        end = _percent_axis(figure, low, high, column)
        _write_counts(figure, known, list(heights.values()), metric, end, column)
    names = [effect_name(next(effect for effect in effects if effect.key == key)) for key in keys]
    figure.update_yaxes(
        tickvals=list(range(len(keys))), ticktext=names, range=[len(keys) - 0.4, -0.6], showgrid=True, zeroline=False
    )
    rows = max(1.0, 0.7 * len(sources)) if spread else 1.0
    return style(figure, height=int(130 + 34 * rows * len(keys)), top=66, legend_gap=34 if len(sources) > 1 else None)


def _whiskers(effects: list[Effect], heights: list[float], metric: Metric, *, color: str, name: str) -> list[Any]:
    go = import_module("plotly.graph_objects")
    points_x, points_y, thin, thick, lines, text = [], [], [], [], [], []
    for effect, height in zip(effects, heights, strict=True):
        change = effect.change(metric)
        values = 1 + effect.pairs[f"{metric.column}_percent"].dropna().to_numpy(float) / 100
        if len(values) <= _MOST_POINTS:
            points_x += values.tolist()
            points_y += [height] * len(values)
        thin += [1 + change.minimum / 100, 1 + change.maximum / 100, None]
        thick += [1 + change.quartile_1 / 100, 1 + change.quartile_3 / 100, None]
        lines += [height, height, None]
        text.append(
            f"<b>{effect_name(effect)}</b><br>{metric.name} {percent(change.median)} (median of {change.num_pairs})<br>"
            f"middle half {percent(change.quartile_1)} to {percent(change.quartile_3)}<br>"
            f"all {percent(change.minimum)} to {percent(change.maximum)}<br>{name}"
        )
    medians = [1 + effect.change(metric).median / 100 for effect in effects]
    shared: dict[str, Any] = {"legendgroup": name, "showlegend": False}
    return [
        go.Scatter(
            x=points_x, y=points_y, mode="markers", hoverinfo="skip",
            marker={"color": color, "size": 5, "opacity": 0.18}, **shared,
        ),
        go.Scatter(x=thin, y=lines, mode="lines", hoverinfo="skip", line={"color": color, "width": 1}, **shared),
        go.Scatter(x=thick, y=lines, mode="lines", hoverinfo="skip", line={"color": color, "width": 6}, **shared),
        go.Scatter(
            x=medians, y=heights, mode="markers", name=name, hovertext=text, hoverinfo="text",
            marker={"color": "white", "size": 9, "line": {"color": color, "width": 2.5}},
            legendgroup=name, showlegend=True,
        ),
    ]  # fmt: skip


def _write_counts(
    figure: Any, effects: list[Effect], heights: list[float], metric: Metric, end: float, column: int
) -> None:
    """Write `n=...` for every effect at the empty right edge of a panel."""
    go = import_module("plotly.graph_objects")
    counts = go.Scatter(
        x=[end] * len(effects),
        y=heights,
        mode="text",
        text=[f"n={effect.change(metric).num_pairs:,} " for effect in effects],
        textposition="middle left",
        textfont={"size": 11, "color": "#555"},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_trace(counts, row=1, col=column)


def _percent_axis(figure: Any, low: float, high: float, column: int) -> float:
    """Set a logarithmic axis of ratios with labels in percent and free space at its right. Returns its end."""
    width = max(math.log10(high / low), 0.02)
    start, end = math.log10(low) - 0.06 * width, math.log10(high) + 0.3 * width
    ticks = percent_ticks(start, end)
    figure.update_xaxes(
        type="log",
        range=[start, end],
        tickvals=[1 + tick / 100 for tick in ticks],
        ticktext=[_tick_label(tick) for tick in ticks],
        tickangle=0,
        row=1,
        col=column,
    )
    figure.add_vline(x=1, line={"color": "#333", "width": 1}, row=1, col=column)
    return float(10**end)


def percent_ticks(start: float, end: float) -> list[float]:
    """Round percentages for an axis of log10 ratios, from no change outwards, spaced so that labels do not overlap."""
    end -= 0.07 * (end - start)  # the last label must not reach into the next panel
    ticks = [0.0]
    for sign, nice in ((1, _NICE_GROWTH), (-1, _NICE_PERCENT)):
        last, last_label = 0.0, "0"
        for value in nice:
            label = _tick_label(sign * value)
            position = math.log10(1 + sign * value / 100)
            room = _TICK_GAP + _LETTER_WIDTH * (len(label) + len(last_label)) / 2
            if start <= position <= end and abs(position - last) >= room * (end - start):
                ticks.append(float(sign * value))
                last, last_label = position, label
    return sorted(ticks)


def _tick_label(percentage: float) -> str:
    return f"{percentage:+g}%".replace("-", MINUS) if percentage else "0"


def interactions_figure(analysis: Analysis) -> Any | None:
    """Each effect for each value of another axis: a heat map per source and metric, selected in a menu."""
    go = import_module("plotly.graph_objects")
    maps = []
    for metric in METRICS:
        for source in analysis.results.sources:
            table = interactions(analysis, source, metric)
            if len(table):
                maps.append((metric, source, table))
    if not maps:
        return None
    figure = go.Figure()
    buttons = []
    heights = []
    for number, (metric, source, table) in enumerate(maps):
        effects = [effect for effect in analysis.same_batch if effect.source == source and len(effect.pairs)]
        trace = _heat_map(analysis, effects, metric, table)
        figure.add_trace(trace.update(visible=number == 0))
        visible = [index == number for index in range(len(maps))]
        title = metric.name if len(analysis.results.sources) == 1 else f"{metric.name}, {source}"
        buttons.append({"label": title, "method": "update", "args": [{"visible": visible}]})
        heights.append(len(effects))
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(tickangle=-40, showgrid=False)
    style(figure, height=int(230 + 30 * max(heights)), top=80)
    figure.update_layout(updatemenus=[_menu(buttons)], margin={"b": 130})
    return figure


def _heat_map(analysis: Analysis, effects: list[Effect], metric: Metric, table: pd.DataFrame) -> Any:
    go = import_module("plotly.graph_objects")
    axes = _mapped_axes(analysis, table)
    columns = [(axis, value) for axis in axes for value in ordered_values(axis, table["value"][table["axis"] == axis])]
    cells = {(row.effect, row.axis, row.value): (row.median, row.num_pairs) for row in table.itertuples()}
    sign = 1 if metric.higher_is_better else -1
    values, texts, hovers = [], [], []
    for position, effect in enumerate(effects):
        known = [cells.get((position, *column)) for column in columns]
        # Logarithmic like the other plots: the blue of +100% is as strong as the orange of −50%.
        values.append([None if cell is None else sign * math.log2(1 + cell[0] / 100) for cell in known])
        texts.append(["" if cell is None else percent(cell[0]) for cell in known])
        hovers.append(
            [
                ""
                if cell is None
                else f"<b>{effect_name(effect)}</b><br>with {_axis_value(*column)}<br>"
                f"{metric.name} {percent(cell[0])}, median of {cell[1]:,} pairs"
                for column, cell in zip(columns, known, strict=True)
            ]
        )
    largest = max((abs(value) for row in values for value in row if value is not None), default=1.0) or 1.0
    limit = min(max(largest, 0.1), 1.0)
    return go.Heatmap(
        z=values,
        x=[_axis_value(*column) for column in columns],
        y=[effect_name(effect) for effect in effects],
        text=texts,
        texttemplate="%{text}",
        textfont={"size": 11 if len(columns) <= 16 else 10 if len(columns) <= 20 else 9, "color": "#111"},
        hovertext=hovers,
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        zmin=-limit,
        zmax=limit,
        xgap=2,
        ygap=2,
        colorscale=[[0, "#F2A25C"], [0.5, "#F7F7F7"], [1, "#7DB8DE"]],
        colorbar={
            "tickvals": [-limit, 0, limit], "ticktext": ["worse", "equal", "better"], "thickness": 10, "len": 0.6
        },
    )  # fmt: skip


def _mapped_axes(analysis: Analysis, table: pd.DataFrame) -> list[str]:
    """Axes whose values are columns of the map. If too many, those with the most values are dropped first."""
    widths = table.groupby("axis")["value"].nunique()
    axes = [axis for axis in analysis.results.varied if axis in widths.index]
    while len(axes) > 1 and sum(widths[axis] for axis in axes) > _MOST_COLUMNS:
        axes.remove(max(axes, key=lambda axis: widths[axis]))
    return axes


def batch_figure(analysis: Analysis) -> Any | None:
    """Throughput per device and peak memory over the batch size, one line per setting."""
    results = analysis.results
    cells = results.cells[results.cells["batch"].notna()]
    batches = sorted(cells["batch"].unique())
    if len(batches) < 2:
        return None
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    cells = cells.assign(setting=cells.groupby(setting, sort=False, dropna=False).ngroup())
    cells = cells.sort_values(["setting", "batch"], kind="stable")
    panels = (("batch", _PER_DEVICE), ("batch", MEMORY.column))
    titles = ["images/s per device", "peak memory per device, GiB"]
    figure = _colored_panels(analysis, cells, panels, titles, mode="lines+markers")
    shown = batches if len(batches) <= 12 else batches[:: math.ceil(len(batches) / 12)]
    figure.update_xaxes(
        type="log", title="batch per device", tickvals=shown, ticktext=[f"{batch:g}" for batch in shown]
    )
    log_axis(figure, cells[_PER_DEVICE], col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    return figure


def frontier_figure(analysis: Analysis) -> Any | None:
    """Throughput per device over peak memory, with the Pareto frontier."""
    go = import_module("plotly.graph_objects")
    cells = analysis.results.cells
    cells = cells[cells[MEMORY.column].notna() & cells[_PER_DEVICE].notna()]
    if cells.empty:
        return None
    panels = ((MEMORY.column, _PER_DEVICE),)
    figure = _colored_panels(analysis, cells.assign(setting=0), panels, [], mode="markers")
    best = frontier(cells)
    x, y, names = [], [], []
    for _, line in best.groupby(["source", *work_axes(best.columns)], sort=False):
        x += [*line[MEMORY.column], None]
        y += [*line[_PER_DEVICE], None]
        names += [*line["run_name"], None]
    figure.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines+markers", name="frontier", hovertext=names,
            hovertemplate="<b>frontier</b><br>%{hovertext}<br>%{x:.3g} GiB, %{y:.4g} images/s<extra></extra>",
            line={"color": "#333", "width": 1.2, "dash": "dot", "shape": "hv"},
            marker={"symbol": "circle-open", "size": 13, "color": "#333"},
        )
    )  # fmt: skip
    for button in figure.layout.updatemenus[0].buttons if figure.layout.updatemenus else ():
        button.args[0]["visible"].append(True)
    figure.update_xaxes(title="peak memory per device, GiB", rangemode="tozero")
    log_axis(figure, cells[_PER_DEVICE], title="images/s per device")
    return figure


def _colored_panels(
    analysis: Analysis, cells: pd.DataFrame, panels: tuple[tuple[str, str], ...], titles: list[str], *, mode: str
) -> Any:
    """Cells in one or two panels of (x, y) columns, coloured by an axis selected in a menu."""
    figure = subplots(cols=len(panels), subplot_titles=titles or None, horizontal_spacing=0.09)
    axes = _color_axes(analysis)
    buttons, owners = [], []
    for number, axis in enumerate(axes):
        values = ordered_values(axis, cells[axis].unique())
        for index, value in enumerate(values):
            mine = cells[cells[axis] == value]
            for column, (x, y) in enumerate(panels, start=1):
                trace = _points(mine, x, y, mode, index, name=value_name(axis, value), many=len(cells) > _SVG_POINTS)
                trace.update(visible=number == 0, showlegend=column == 1, legendgroup=value)
                figure.add_trace(trace, row=1, col=column)
                owners.append(number)
    for number, axis in enumerate(axes):
        visible = [owner == number for owner in owners]
        label = f"colour: {AXIS_NAMES.get(axis, axis)}"
        buttons.append({"label": label, "method": "update", "args": [{"visible": visible}]})
    style(figure, height=560, top=110, legend_gap=56)
    if len(buttons) > 1:
        figure.update_layout(updatemenus=[_menu(buttons)])
    return figure


def _color_axes(analysis: Analysis) -> list[str]:
    """Axes for colours: the source if there are several, compile, and the other varied axes with few values."""
    results = analysis.results
    several = ["source"] if len(results.sources) > 1 else []
    known = (MODEL, COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION, PRECISION, PARALLEL, PATCH_SIZE)
    varied = [axis for axis in known if axis in results.varied and results.cells[axis].nunique() > 1]
    others = [
        axis
        for axis in results.varied
        if axis not in (*known, BATCH_SIZE) and 1 < results.cells[axis].nunique() <= len(PALETTE)
    ]
    return [*several, *varied, *others] or ["source"]


def _points(cells: pd.DataFrame, x: str, y: str, mode: str, index: int, *, name: str, many: bool) -> Any:
    """One trace; lines break between settings."""
    go = import_module("plotly.graph_objects")
    xs, ys, names = cells[x].to_numpy(float), cells[y].to_numpy(float), cells["run_name"].to_numpy(object)
    bars = {"error_x": cells.get(f"{x}_half"), "error_y": cells[f"{y}_half"]}
    bars = {name: values for name, values in bars.items() if values is not None and values.notna().any()}
    halves = [values.to_numpy(float) for values in bars.values()]
    if "lines" in mode:
        xs, ys, names, *halves = _with_gaps([xs, ys, names, *halves], cells["setting"].to_numpy())
    error_bars = {name: {"array": half, "thickness": 1} for name, half in zip(bars, halves, strict=True)}
    color = PALETTE[index % len(PALETTE)]
    labels = {"batch": "batch %{x:g}", MEMORY.column: "%{x:.3g} GiB"}[x]
    unit = "GiB" if y == MEMORY.column else "images/s"
    kind = go.Scattergl if many else go.Scatter
    return kind(
        x=xs,
        y=ys,
        mode=mode,
        name=name,
        hovertext=names,
        hovertemplate=f"%{{hovertext}}<br>{labels}<br>%{{y:.4g}} {unit}<extra></extra>",
        line={"color": color, "width": 1.2} if "lines" in mode else None,
        marker={"color": color, "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "opacity": 0.75},
        **error_bars,
    )


def _with_gaps(columns: list[Any], settings: Any) -> list[Any]:
    """The columns, with an empty entry wherever the setting changes."""
    import numpy as np

    ends = np.flatnonzero(settings[1:] != settings[:-1]) + 1
    return [np.insert(column, ends, "" if column.dtype == object else np.nan) for column in columns]


def scaling_figure(analysis: Analysis) -> Any | None:
    """Throughput per device relative to the fewest devices, one line per mode and source."""
    go = import_module("plotly.graph_objects")
    table = scaling(analysis.results)
    if table.empty:
        return None
    figure = go.Figure()
    several = len(analysis.results.sources) > 1
    for number, ((source, mode), line) in enumerate(table.groupby(["source", "mode"], sort=False)):
        color = PALETTE[number % len(PALETTE)]
        figure.add_trace(
            go.Scatter(
                x=line["num_devices"],
                y=100 * line["part"],
                name=f"{mode}, {source}" if several else mode,
                mode="lines+markers",
                customdata=line["num_pairs"],
                hovertemplate="%{x} devices: %{y:.1f}%, median of %{customdata} settings<extra></extra>",
                line={"color": color, "width": 2},
                marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9},
            )
        )
    devices = sorted(table["num_devices"].unique().tolist())
    figure.update_xaxes(type="log", title="devices (batch per device constant)", tickvals=devices, ticktext=devices)
    figure.update_yaxes(title="% of images/s per device", rangemode="tozero")
    figure.add_hline(y=100, line={"color": "#333", "width": 1, "dash": "dot"})
    return style(figure, height=420, top=50, legend_gap=56)


def folders_figure(analysis: Analysis) -> Any | None:
    """Each folder relative to the first one, over the settings that completed in both."""
    return effects_figure(analysis, analysis.between_folders)


def _axis_value(axis: str, value: str) -> str:
    shown = value_name(axis, value)
    if axis in (PRECISION, PARALLEL, FLAVOR, MODEL, RESOLUTION):
        return shown
    short = {COMPILE: "compile", CHECKPOINTING: "checkpointing", BATCH_SIZE: "batch", PATCH_SIZE: "patch"}
    return f"{short.get(axis, axis.split('.')[-1])} {shown}"


def subplots(**arguments: Any) -> Any:
    return import_module("plotly.subplots").make_subplots(rows=1, **arguments)


def _menu(buttons: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 34, "t": 0},
        "bgcolor": "white", "bordercolor": "#999", "showactive": True,
    }  # fmt: skip


def log_axis(figure: Any, values: pd.Series, **where: Any) -> None:
    """Set a logarithmic vertical axis with plain tick labels, or a linear axis if the values are similar."""
    low, high = math.log10(values.min()), math.log10(values.max())
    if high - low < 0.6:
        figure.update_yaxes(rangemode="tozero", **where)
        return
    lowest, highest = math.floor(low), math.ceil(high)
    steps = (1, 2, 3, 5, 7) if high - low < 1.2 else (1, 2, 5) if high - low < 4 else (1,)
    ticks = [step * 10.0**power for power in range(lowest, highest + 1) for step in steps]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks], **where)


def style(figure: Any, *, height: int, top: int = 40, legend_gap: int | None = None) -> Any:
    """Apply the common style. A legend is `legend_gap` pixels below the axes, so that long names can wrap."""
    inside = height - top - 100
    figure.update_layout(
        template="plotly_white",
        height=height,
        font={"family": _FONT, "size": 13, "color": "#111"},
        margin={"l": 60, "r": 30, "t": top, "b": 50},
        showlegend=legend_gap is not None,
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": -(legend_gap or 0) / inside, "yanchor": "top"},
        hoverlabel={"bgcolor": "white", "font": {"color": "#111"}},
    )
    figure.update_xaxes(automargin=True, gridcolor="#E3E3E3")
    figure.update_yaxes(automargin=True, gridcolor="#E3E3E3")
    figure.update_annotations(font_size=13)
    return figure
