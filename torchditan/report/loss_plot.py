# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The plot of the loss over steps: a panel per precision, a colour per learning rate, a band over training seeds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torchditan.ablation.grid import PRECISION
from torchditan.report.findings import value_name
from torchditan.report.grid_results import ordered_values
from torchditan.report.losses import LEARNING_RATE, LossCurve
from torchditan.report.plots import PALETTE, log_axis, style, subplots


def loss_figure(curves: list[LossCurve]) -> Any | None:
    """Loss over steps: a panel per precision, a colour per learning rate, and a cross at the end of failed runs.

    The mean over training seeds has a band, its 95% interval.
    """
    go = import_module("plotly.graph_objects")
    if not curves:
        return None
    import pandas as pd

    precisions = ordered_values(PRECISION, [curve.precision for curve in curves])
    rates = ordered_values(LEARNING_RATE, [curve.learning_rate for curve in curves])
    titles = [value_name(PRECISION, precision) for precision in precisions]
    figure = subplots(cols=len(precisions), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
    named: set[str] = set()
    for curve in curves:
        number = rates.index(curve.learning_rate)
        color = PALETTE[number % len(PALETTE)]
        failed = curve.status not in ("completed", "skipped")
        column = precisions.index(curve.precision) + 1
        if curve.half_widths:
            figure.add_trace(_band(curve, color), row=1, col=column)
        figure.add_trace(
            go.Scatter(
                x=curve.steps,
                y=curve.losses,
                mode="lines+markers" if failed else "lines",
                marker={"color": color, "size": [0] * (len(curve.steps) - 1) + [10], "symbol": "x"},
                line={"color": color, "width": 1.8},
                name=f"learning rate {curve.learning_rate}" if curve.learning_rate else "loss",
                legendgroup=curve.learning_rate,
                showlegend=curve.learning_rate not in named,
                hovertext=f"{curve.run_name}{f', {curve.status}' if failed else ''}",
                hovertemplate="%{hovertext}<br>step %{x:.0f}: %{y:.4g}<extra></extra>",
            ),
            row=1,
            col=column,
        )
        named.add(curve.learning_rate)
    figure.update_xaxes(title="step", rangemode="tozero")
    style(figure, height=480, top=50, legend_gap=56)
    log_axis(figure, pd.Series([loss for curve in curves for loss in curve.losses]))
    figure.update_yaxes(title="loss", col=1)
    return figure


def _band(curve: LossCurve, color: str) -> Any:
    """The 95% interval of the mean over training seeds, as a filled outline."""
    edges = [
        [loss + sign * half for loss, half in zip(curve.losses, curve.half_widths, strict=True)] for sign in (-1, 1)
    ]
    return import_module("plotly.graph_objects").Scatter(
        x=[*curve.steps, *reversed(curve.steps)],
        y=[*edges[0], *reversed(edges[1])],
        mode="none",
        fill="toself",
        fillcolor=f"rgba({', '.join(str(int(color[start : start + 2], 16)) for start in (1, 3, 5))}, 0.18)",
        legendgroup=curve.learning_rate,
        showlegend=False,
        hoverinfo="skip",
    )
