# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Warnings about measured runs: properties that valid measurements must have, and where these results lack them.

Notable: a warning removes nothing from the results. The report shows it with the affected runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torchditan.ablation.grid import BATCH_SIZE, CHECKPOINT_FRACTION, CHECKPOINTING, COMPILE
from torchditan.report.effects import MEMORY, METRICS, MFU, THROUGHPUT, Metric
from torchditan.report.grid_results import GridResults
from torchditan.report.labels import MINUS, count
from torchditan.report.page import Table, Warned, table

if TYPE_CHECKING:
    import pandas as pd

_FALL_PERCENT = 1.0  # smaller falls are noise of repeated measurements
_UNSTEADY_PERCENT = 10.0
_LOSS_PERCENT = 2.0
_BASE_KEYS = ("base", "settings", "steps", "window", "memory_limit_gib")  # keys of grid.json that no axis covers


def find_warnings(results: GridResults, pairs: pd.DataFrame) -> list[Warned]:
    """Check the results and their same-batch pairs."""
    found = [
        _failed_runs(results),
        *(_falls_with_batch(results, metric) for metric in METRICS),
        _losses_differ(results, pairs),
        _mixed_origins(pairs, results.cells),
        _several_devices(results),
        _other_base(results),
        _unsteady_steps(results),
        _missing_measurements(results),
    ]
    return [warning for warning in found if warning.cases is not None and len(warning.cases.frame)]


def _failed_runs(results: GridResults) -> Warned:
    failed = results.runs[results.runs["status"].isin(("error", "timeout"))].rename(columns={"run_name": "run"})
    reasons = failed["reason"].replace("", "no reason recorded")
    often = ", most often" if reasons.nunique() > 1 else ""
    cases = failed[["run", "grid", "status"]].assign(reason=reasons)
    first = "".join(reasons.value_counts().index[:1])
    return Warned(f"{count(len(cases), 'run')} failed{often}: {first}", Table(cases))


def _falls_with_batch(results: GridResults, metric: Metric) -> Warned:
    """Compare the metric between each batch size of a setting and the next larger one."""
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    cells = results.cells[results.cells["batch"].notna() & results.cells[metric.column].notna()]
    cells = cells.assign(value=cells[metric.column]).sort_values("batch", kind="stable")
    groups = cells.groupby(setting, sort=False, dropna=False)
    cells = cells.assign(before=groups["value"].shift(), smaller=groups["batch"].shift())
    cells["change"] = 100 * (cells["value"] / cells["before"] - 1)
    falls = cells[cells["change"] < -_FALL_PERCENT].sort_values("change", kind="stable")
    rows = [
        (
            cell.run_name,
            cell.source,
            f"{cell.smaller:g} → {cell.batch:g}",
            f"{cell.before:,.4g} → {cell.value:,.4g} {metric.unit}",
            f"{cell.change:.1f}%".replace("-", MINUS),
        )
        for cell in falls.itertuples()
    ]
    sentence = (
        f"{metric.name[0].upper()}{metric.name[1:]} falls by more than {_FALL_PERCENT:g}% in {len(rows)} of "
        f"{count(int(cells['before'].notna().sum()), 'step')} from one batch size to the next, by up to "
        f"{-falls['change'].min():.1f}%."
    )
    return Warned(sentence, table(("run", "grid", "batch", metric.name, "change"), rows))


def _losses_differ(results: GridResults, pairs: pd.DataFrame) -> Warned:
    """Compiling and recomputing do not change the result of a step: the losses must agree."""
    chosen = pairs[pairs["axis"].isin((COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION))]
    loss, names = results.cells["loss_last"].to_numpy(float), results.cells["run_name"].to_numpy()
    a, b = chosen["a"].to_numpy(int), chosen["b"].to_numpy(int)
    difference = chosen.assign(percent=100 * abs(loss[b] / loss[a] - 1))
    wrong = difference[difference["percent"] > _LOSS_PERCENT].sort_values("percent", ascending=False, kind="stable")
    rows = [
        (names[row.a], names[row.b], f"{loss[row.a]:.4g} → {loss[row.b]:.4g}", f"{row.percent:.1f}%")
        for row in wrong.itertuples()
    ]
    sentence = (
        "Compiling and activation checkpointing must not change the loss, but the last losses differ by more than "
        f"{_LOSS_PERCENT:g}% in {len(rows)} of {count(int(difference['percent'].notna().sum()), 'matched pair')}, by "
        f"up to {wrong['percent'].max():.1f}%."
    )
    return Warned(sentence, table(("run", "paired with", "last loss", "difference"), rows))


def _mixed_origins(pairs: pd.DataFrame, cells: pd.DataFrame) -> Warned:
    names, made_by = cells["run_name"].to_numpy(), cells["made_by"].to_numpy()
    mixed = pairs[pairs["mixed"].astype(bool)]
    rows = [(names[row.a], made_by[row.a], names[row.b], made_by[row.b]) for row in mixed.itertuples()]
    sentence = (
        f"{len(rows)} of {count(len(pairs), 'matched pair')} mix commits, versions or numbers of steps. The medians "
        "include these pairs; the column mixed of pairs.csv marks them."
    )
    return Warned(sentence, table(("run", "made by", "paired with", "made by"), rows))


def _several_devices(results: GridResults) -> Warned:
    """Pairs across devices are never formed."""
    runs = results.runs[results.runs["device"] != ""]
    devices = runs.groupby("grid")["device"].unique()
    rows = [(grid, ", ".join(sorted(names))) for grid, names in devices.items() if len(names) > 1]
    sentence = f"{count(len(rows), 'grid')} ran on several kinds of device. Each kind is analysed separately."
    return Warned(sentence, table(("grid", "devices"), rows))


def _other_base(results: GridResults) -> Warned:
    """Constant settings must be equal in all folders, or differences between folders are not due to their axes."""
    (first, there), *others = results.contents.items()
    rows = [
        (name, key, *(json.dumps(side.get(key), ensure_ascii=False, sort_keys=True) for side in (there, here)))
        for name, here in others
        for key in _BASE_KEYS
        if here.get(key) != there.get(key)
    ]
    folders = count(len({row[0] for row in rows}), "folder")
    sentence = f"{folders} with other base settings than {first}, which may explain differences between folders."
    return Warned(sentence, table(("grid", "key", f"in {first}", "there"), rows))


def _unsteady_steps(results: GridResults) -> Warned:
    cells = results.cells.assign(spread=100 * results.cells["step_time_s_std"] / results.cells["step_time_s_mean"])
    wrong = cells[cells["spread"] > _UNSTEADY_PERCENT].sort_values("spread", ascending=False, kind="stable")
    rows = [(cell.run_name, cell.source, f"{cell.spread:.0f}%") for cell in wrong.itertuples()]
    sentence = (
        f"The step times of {len(rows)} of {count(len(cells), 'setting')} vary by more than {_UNSTEADY_PERCENT:g}% "
        "of their mean: other work on the machine, a compilation inside the window, or too few steps."
    )
    return Warned(sentence, table(("run", "grid", "standard deviation of the step time"), rows))


def _missing_measurements(results: GridResults) -> Warned:
    """Find completed runs that lack a number that every completed run must have."""
    completed = results.runs[results.runs["status"] == "completed"]
    required = (THROUGHPUT.column, MEMORY.column, "loss_last")
    wrong = {name: completed[completed[name].isna()] for name in required}
    wrong |= {"mfu_mean over 100%": completed[completed[MFU.column] > 100]}
    rows = [(run.run_name, run.source, name) for name, runs in wrong.items() for run in runs.itertuples()]
    sentence = (
        f"{len({row[:2] for row in rows})} of {count(len(completed), 'completed run')} lack a measurement or have an "
        "impossible one. Runs without throughput are not data."
    )
    return Warned(sentence, table(("run", "grid", "missing or impossible"), rows))
