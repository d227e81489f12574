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

from torchditan.ablation.grid import PRECISION, SEED
from torchditan.ablation.maker import RUNS_FOLDER
from torchditan.evaluation.card_figures import spread_of
from torchditan.evaluation.card_tables import rounded
from torchditan.report.grid_results import GridResults, ordered_values
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    import pandas as pd

LEARNING_RATE = "optimizer.lr"
FEWEST_STEPS = 100
"""Minimum number of steps of a run whose loss is shown. Random latents of short benchmarks cannot be learned."""
_MOST_POINTS = 100


@dataclass(frozen=True)
class LossCurve:
    """One run, or the mean of several seeds: means of the loss over intervals of steps."""

    run_name: str
    source: str
    status: str
    precision: str
    learning_rate: str
    """Empty if the grid does not vary it."""
    steps: list[float]
    losses: list[float]
    half_widths: list[float] = field(default_factory=list)
    """Half of the 95% interval of the mean over training seeds; empty for one run."""


def loss_curves(results: GridResults) -> list[LossCurve]:
    """Curves of all runs with at least `FEWEST_STEPS` logged steps, and of shorter failed runs of the same grids."""
    runs = results.runs
    long = runs[runs["steps"] >= FEWEST_STEPS]
    curves: dict[tuple[Any, ...], list[LossCurve]] = {}
    for _, run in long.iterrows():
        records = read_metrics(results.folders[run["grid"]] / RUNS_FOLDER / run["run_name"])
        points = [(record["step"], record["loss"]) for record in records if _is_finite(record.get("loss"))]
        if points:
            steps, losses = zip(*_means(points), strict=True)
            rate = run[LEARNING_RATE] if LEARNING_RATE in results.axes else ""
            setting = (*(run[axis] for axis in ("source", "repeat", *results.axes)),)
            is_alone = run["status"] != "completed"
            curves.setdefault((*setting, run["run_name"] if is_alone else None, len(steps)), []).append(
                LossCurve(
                    run_name=run["run_name"],
                    source=run["source"],
                    status=run["status"],
                    precision=run[PRECISION],
                    learning_rate=rate,
                    steps=list(steps),
                    losses=list(losses),
                )
            )
    return [_mean_curve(seeds) for seeds in curves.values()]


def _mean_curve(curves: list[LossCurve]) -> LossCurve:
    """The mean of one setting's curves, which have equally many points."""
    if len(curves) == 1:
        return curves[0]
    spreads = [spread_of(losses) for losses in zip(*(curve.losses for curve in curves), strict=True)]
    return replace(
        curves[0],
        run_name=f"{curves[0].run_name} and {len(curves) - 1} more seeds",
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
    """Mean loss over the measured window, by learning rate and precision, in order.

    Several training seeds give its 95% interval. If no run completed, the entry has the statuses of the runs.
    """
    runs = results.runs[results.runs["steps"] >= FEWEST_STEPS]
    rates = runs[LEARNING_RATE] if LEARNING_RATE in results.axes else runs[PRECISION].map(lambda _: "")
    return {
        rate: {
            precision: _final_loss(runs[(rates == rate) & (runs[PRECISION] == precision)])
            for precision in ordered_values(PRECISION, runs[PRECISION])
        }
        for rate in ordered_values(LEARNING_RATE, rates)
    }


def _final_loss(runs: pd.DataFrame) -> str:
    completed = runs[(runs["status"] == "completed") & runs["loss_mean"].notna()]
    if completed.empty:
        return ", ".join(dict.fromkeys(runs["status"]))
    seeds = completed.groupby(SEED)["loss_mean"].mean().to_list()
    if len(seeds) == 1:
        return f"{seeds[0]:.4g}"
    mean, _, half = spread_of(seeds)
    return f"{rounded(mean, half)} ± {rounded(half, half)} ({len(seeds)} seeds)"
