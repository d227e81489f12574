# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Loss over steps, from the metrics of the runs. A convergence study is a grid with longer runs.

Notable:
- a run whose loss became non-finite is shown up to that point, whatever its status;
- completed runs that differ only in the training seed are one curve, the mean with its 95% interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchditan.ablation.grid import BATCH_SIZE, FLAVOR, PATCH_SIZE, PRECISION, SEED, STANDARD_AXES
from torchditan.ablation.maker import RUNS_FOLDER
from torchditan.evaluation.card import spread_of
from torchditan.report.grid_results import GridResults, ordered_values
from torchditan.report.labels import axis_name, count, mean_with_interval, value_name
from torchditan.report.run_folder import is_run_folder
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    import pandas as pd

LEARNING_RATE = "optimizer.lr"
_MOST_POINTS = 100
_MOST_SETTINGS = 16
"""With more, colours and dashes cannot tell the curves apart."""


@dataclass(frozen=True)
class LossCurve:
    """One run, or the mean of several seeds: means of the loss over intervals of steps."""

    run_name: str
    source: str
    status: str
    precision: str
    setting: str
    """`learning rate 0.001`, `model.mlp swiglu` or `baseline`; see `_settings`."""
    steps: list[float]
    losses: list[float]
    half_widths: list[float] = field(default_factory=list)
    """Half of the 95% interval of the mean over training seeds; empty for one run."""


def loss_curves(results: GridResults) -> list[LossCurve]:
    """Curves of all runs that logged two losses or more."""
    curves: dict[tuple[Any, ...], list[LossCurve]] = {}
    for _, run in results.runs.assign(setting=_settings(results)).iterrows():
        folder = results.folders[run["grid"]]
        records = read_metrics((folder if is_run_folder(folder) else folder / RUNS_FOLDER) / run["run_name"])
        points = [(record["step"], record["loss"]) for record in records if _is_finite(record.get("loss"))]
        if len(points) > 1:
            steps, losses = zip(*_means(points), strict=True)
            cell = (*(run[axis] for axis in ("source", "repeat", *results.axes)),)
            is_alone = run["status"] != "completed"
            curves.setdefault((*cell, run["run_name"] if is_alone else None, len(steps)), []).append(
                LossCurve(
                    run_name=run["run_name"],
                    source=run["source"],
                    status=run["status"],
                    precision=run[PRECISION],
                    setting=run["setting"],
                    steps=list(steps),
                    losses=list(losses),
                )
            )
    return [_mean_curve(seeds) for seeds in curves.values()]


def _settings(results: GridResults) -> pd.Series:
    """What the curves are named after, of each run: its learning rate, or else how it differs from the first run.

    Empty if the runs of a panel do not differ, or in too many ways. What changes only the speed has no name.
    """
    runs = results.runs
    learned = (FLAVOR, PATCH_SIZE, BATCH_SIZE)
    axes = [axis for axis in results.varied if axis in learned or axis not in STANDARD_AXES]
    if axes == [LEARNING_RATE]:
        return "learning rate " + runs[LEARNING_RATE]
    names = runs["source"].map(lambda _: "")
    for axis in axes:
        first, name = runs[axis].iloc[0], axis_name(axis)
        names += [("" if value == first else f", {name} {value_name(axis, value)}") for value in runs[axis]]
    names = names.str.removeprefix(", ").replace("", "baseline")
    return names if 1 < names.nunique() <= _MOST_SETTINGS else names.map(lambda _: "")


def _mean_curve(curves: list[LossCurve]) -> LossCurve:
    """The mean of one setting's curves, which have equally many points."""
    if len(curves) == 1:
        return curves[0]
    spreads = [spread_of(losses) for losses in zip(*(curve.losses for curve in curves), strict=True)]
    return replace(
        curves[0],
        run_name=f"{curves[0].run_name} and {count(len(curves) - 1, 'more seed')}",
        losses=[spread.mean for spread in spreads],
        half_widths=[spread.half_width for spread in spreads],
    )


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _means(points: list[tuple[float, float]]) -> list[tuple[float, ...]]:
    """At most `_MOST_POINTS` points: means over intervals of equal length."""
    length = math.ceil(len(points) / _MOST_POINTS)
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    return [tuple(sum(column) / len(part) for column in zip(*part, strict=True)) for part in stretches]


def final_losses(results: GridResults) -> dict[str, dict[str, str]]:
    """Mean loss over the measured window, by setting (of `LossCurve`) and precision.

    Several training seeds give its 95% interval. If no run completed, the entry has the statuses of the runs.
    """
    runs = results.runs.assign(setting=_settings(results))
    return {
        setting: {
            precision: _final_loss(runs[(runs["setting"] == setting) & (runs[PRECISION] == precision)])
            for precision in ordered_values(PRECISION, runs[PRECISION])
        }
        for setting in dict.fromkeys(runs["setting"])
    }


def _final_loss(runs: pd.DataFrame) -> str:
    completed = runs[(runs["status"] == "completed") & runs["loss_mean"].notna()]
    if completed.empty:
        return ", ".join(dict.fromkeys(runs["status"]))
    seeds = completed.groupby(SEED)["loss_mean"].mean().to_list()
    if len(seeds) == 1:
        return f"{seeds[0]:.4g}"
    mean, _, half = spread_of(seeds)
    return mean_with_interval(mean, half, len(seeds))
