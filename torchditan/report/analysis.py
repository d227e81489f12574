# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Analysis of ablation grids: every comparison is computed once, for tables, plots and findings.

Notable: the report and effects.csv are made from the same `Analysis`, so they always agree.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchditan.ablation.grid import BATCH_SIZE, COMPILE, PARALLEL, parallel_degrees
from torchditan.report.grid_results import GridResults, parallel_mode, read_grids, work_axes
from torchditan.report.pairs import (
    METRICS,
    THROUGHPUT,
    Change,
    Metric,
    best_batch_pairs,
    change_of,
    compared_values,
    folder_pairs,
    matched_pairs,
    with_changes,
)
from torchditan.report.sanity import Check, run_checks
from torchditan.report.verdicts import Verdict, judge

if TYPE_CHECKING:
    import pandas as pd

EFFECT_COLUMNS = (
    "comparison",
    "grid",
    "axis",
    "from_value",
    "to_value",
    "metric",
    "better",
    "num_pairs",
    "median_percent",
    "quartile_1_percent",
    "quartile_3_percent",
    "minimum_percent",
    "maximum_percent",
    "num_better",
    "noise_percent",
    "num_mixed",
)


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one step of one axis in one source on every metric. `pairs` are its rows."""

    source: str
    axis: str
    from_value: str
    to_value: str
    pairs: pd.DataFrame
    changes: dict[str, Change]  # by the metric's column

    def change(self, metric: Metric) -> Change:
        return self.changes[metric.column]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.axis, self.from_value, self.to_value


@dataclass(frozen=True)
class Repayment:
    """Start-up cost of compiling, and the number of steps after which it is repaid; medians over pairs."""

    num_pairs: int
    seconds: float
    steps: float | None  # None if compiled steps are not faster


@dataclass(frozen=True)
class Analysis:
    """All comparisons of the results. Pairs include their changes. Effects without pairs are listed too."""

    results: GridResults
    pairs: pd.DataFrame
    same_batch: list[Effect]
    best_pairs: pd.DataFrame
    best_batch: list[Effect]
    num_unequal_batches: int
    between_folders: list[Effect]
    folder_changes: pd.DataFrame
    checks: list[Check]
    verdicts: list[Verdict]


def analyse(folders: list[Path], *, figures: list[str] | None = None) -> Analysis:
    """Read the ledgers of the grid folders and compute all comparisons.

    `figures` are the names of the figures of quality to judge; None judges all.
    """
    results = read_grids(folders)
    cells = results.cells
    pairs = with_changes(matched_pairs(cells, results.axes, results.effects), cells)
    best, num_unequal = best_batch_pairs(results)
    best = with_changes(best, cells)
    between = with_changes(folder_pairs(results), cells)
    return Analysis(
        results=results,
        pairs=pairs,
        same_batch=_effects(results, pairs),
        best_pairs=best,
        best_batch=_effects(results, best),
        num_unequal_batches=num_unequal,
        between_folders=[
            _effect(between[between["source"] == source], source, ("source", results.sources[0], source))
            for source in results.sources[1:]
        ],
        folder_changes=between,
        checks=run_checks(results, pairs),
        verdicts=judge(results, figures),
    )


def _effects(results: GridResults, pairs: pd.DataFrame) -> list[Effect]:
    """Effects of all sources, ordered by axis and value. A varied axis without pairs gets one empty effect."""
    found = []
    groups = dict(list(pairs.groupby(["source", "axis", "from_value", "to_value"], sort=False)))
    nothing = pairs.iloc[:0]
    for axis in results.effects:
        for start, end in compared_values(axis, results.runs[axis].unique()):
            if axis == PARALLEL and math.prod(parallel_degrees(start)) != math.prod(parallel_degrees(end)):
                continue  # covered by scaling
            for source in results.sources:
                here = results.runs[results.runs["source"] == source][axis]
                if start in here.values and end in here.values:
                    group = groups.get((source, axis, start, end), nothing)
                    found.append(_effect(group, source, (axis, start, end)))
    return found


def _effect(pairs: pd.DataFrame, source: str, key: tuple[str, str, str]) -> Effect:
    changes = {metric.column: change_of(pairs, metric) for metric in METRICS}
    return Effect(source, *key, pairs, changes)


def repayment(effect: Effect, cells: pd.DataFrame) -> Repayment | None:
    """Start-up cost of compiling relative to the time saved per compiled step; None if not measured."""
    assert effect.axis == COMPILE, effect.axis
    a, b = effect.pairs["a"].to_numpy(int), effect.pairs["b"].to_numpy(int)
    start = cells["compile_s"].to_numpy(float)
    step = cells["step_time_s_mean"].to_numpy(float)
    import numpy as np

    cost = start[b] - np.nan_to_num(start[a])  # eager: its first step, if recorded
    known = ~np.isnan(cost) & (cost > 0)
    if not known.any():
        return None
    saved = (step[a] - step[b])[known]
    steps = np.where(saved > 0, cost[known] / np.where(saved > 0, saved, 1), np.inf)
    median = float(np.median(steps))
    return Repayment(int(known.sum()), float(np.median(cost[known])), median if np.isfinite(median) else None)


def interactions(analysis: Analysis, source: str, metric: Metric) -> pd.DataFrame:
    """Median change and number of pairs of each effect of a source, for each value of each other axis.

    Columns: `effect` (position in the source's effects with pairs), `axis`, `value`, `median`, `num_pairs`.
    """
    import pandas as pd

    results = analysis.results
    column = f"{metric.column}_percent"
    rows = []
    effects = [effect for effect in analysis.same_batch if effect.source == source and len(effect.pairs)]
    for position, effect in enumerate(effects):
        known = effect.pairs[effect.pairs[column].notna()]
        settings = results.cells.iloc[known["a"]]
        for axis in results.varied:
            if axis == effect.axis:
                continue
            groups = known[column].groupby(settings[axis].to_numpy())
            for value, median in groups.median().items():
                rows.append((position, axis, value, median, int(groups.size()[value])))
    return pd.DataFrame(rows, columns=["effect", "axis", "value", "median", "num_pairs"])


def scaling(results: GridResults) -> pd.DataFrame:
    """Throughput per device on more devices, relative to the same setting on the fewest devices.

    The batch per device is constant (weak scaling). Each mode starts at one device, which belongs to all modes, or at
    the fewest devices of that mode. Columns: `source`, `mode`, `num_devices`, `part` (median), `num_pairs`.
    """
    import pandas as pd

    cells = results.cells.assign(mode=[parallel_mode(value) for value in results.cells[PARALLEL]])
    per_device = "images_per_second_per_device_mean"
    cells = cells[cells[per_device].notna()]
    others = ["source", *(axis for axis in results.axes if axis != PARALLEL)]
    single = cells[cells["mode"] == "one device"]
    columns = ["source", "mode", "num_devices", "part", "num_pairs"]
    rows = []
    for mode in ("FSDP", "HSDP", "DDP"):
        line = pd.concat([single, cells[cells["mode"] == mode]])
        if line["mode"].nunique() == 0 or mode not in set(line["mode"]):
            continue
        fewest = line.groupby("source")["num_devices"].transform("min")
        base = line[line["num_devices"] == fewest].groupby(others, dropna=False)[per_device].mean()
        joined = line.join(base.rename("base"), on=others)
        joined["part"] = joined[per_device] / joined["base"]
        known = joined[joined["part"].notna()]
        for (source, devices), part in known.groupby(["source", "num_devices"])["part"]:
            rows.append((source, mode, int(devices), float(part.median()), len(part)))
    found = pd.DataFrame(rows, columns=columns)
    counts = found.groupby(["source", "mode"])["num_devices"].transform("nunique")
    return found[counts > 1].reset_index(drop=True)


def frontier(cells: pd.DataFrame) -> pd.DataFrame:
    """Pareto-optimal cells in memory and throughput per device, for each source, model and patch size.

    Patch sizes and models do different work, so each has its own frontier. Sorted by memory within each.
    """
    work = ["source", *work_axes(cells.columns)]
    known = cells[cells["peak_memory_gib"].notna() & cells["images_per_second_per_device_mean"].notna()]
    ordered = known.sort_values(
        [*work, "peak_memory_gib", "images_per_second_per_device_mean"],
        ascending=[True] * (len(work) + 1) + [False],
        kind="stable",
    )
    speed = ordered["images_per_second_per_device_mean"]
    keys = [ordered[name] for name in work]
    fastest_so_far = speed.groupby(keys, sort=False).cummax()
    is_first = fastest_so_far.groupby(keys, sort=False).shift() < fastest_so_far
    return ordered[is_first | ~ordered.duplicated(work)]


def fastest(results: GridResults) -> pd.DataFrame:
    """The fastest cell of each source, model, resolution, patch size and number of devices."""
    cells = results.cells
    groups = cells.groupby(["source", *work_axes(results.axes), "num_devices"], sort=False, dropna=False)
    return cells.loc[groups[THROUGHPUT.column].idxmax()] if len(cells) else cells


def largest_batches(results: GridResults) -> pd.DataFrame:
    """For each setting that reached its memory limit: the largest batch that ran, and the smallest that did not fit."""
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    runs = results.runs
    fits = runs[runs["status"] == "completed"].groupby(setting, sort=False, dropna=False)["batch"].max()
    fails = runs[runs["status"] == "oom"].groupby(setting, sort=False, dropna=False)["batch"].min()
    table = fails.rename("fails").to_frame().join(fits.rename("fits"))
    return table.reset_index()


def effects_csv(analysis: Analysis) -> bytes:
    """effects.csv: all effects on all metrics, one row each."""
    import csv

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(EFFECT_COLUMNS)
    comparisons = (
        ("same batch", analysis.same_batch),
        ("best batch", analysis.best_batch),
        ("between folders", analysis.between_folders),
    )
    for comparison, effects in comparisons:
        for effect in effects:
            for metric in METRICS:
                change = effect.change(metric)
                numbers = (f"{value:.6g}" if change.num_pairs else "" for value in change[1:6])
                noise = f"{change.noise:.6g}" if change.num_pairs else ""
                mixed = int(effect.pairs["mixed"].sum())
                where = (comparison, effect.source, *effect.key, metric.column, metric.better)
                writer.writerow((*where, change.num_pairs, *numbers, change.num_better, noise, mixed))
    return file.getvalue().encode()


def pairs_csv(analysis: Analysis) -> bytes:
    """pairs.csv: every pair of every comparison, by the names of its runs."""
    import pandas as pd

    names = analysis.results.cells["run_name"].to_numpy()
    frames = []
    comparisons = (
        ("same batch", analysis.pairs),
        ("best batch", analysis.best_pairs),
        ("between folders", analysis.folder_changes),
    )
    for comparison, pairs in comparisons:
        frame = pairs.rename(columns={"source": "grid"}).drop(columns=["a", "b"])
        frame = frame.drop(columns=[name for name in frame if name.endswith("_noise")])
        frame.insert(0, "comparison", comparison)
        frame.insert(5, "from_run", names[pairs["a"].to_numpy(int)])
        frame.insert(6, "to_run", names[pairs["b"].to_numpy(int)])
        frames.append(frame)
    table = pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)
    text: str = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text.encode()
