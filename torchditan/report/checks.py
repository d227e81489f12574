# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Warnings about measured runs: properties that valid measurements must have, and where these results lack them.

Notable: a warning removes nothing from the results. The report shows it with the affected runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchditan.ablation.grid import BATCH_SIZE, CHECKPOINT_FRACTION, CHECKPOINTING, COMPILE
from torchditan.report.effects import MEMORY, METRICS, MFU, THROUGHPUT, Metric
from torchditan.report.grid_results import GridResults
from torchditan.report.labels import MINUS, count
from torchditan.report.page import Warned, table

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
    return [warning for warning in found if warning is not None]


def _failed_runs(results: GridResults) -> Warned | None:
    failed = results.runs[results.runs["status"].isin(("error", "timeout"))]
    if failed.empty:
        return None
    reasons = failed["reason"].replace("", "no reason recorded")
    rows = [*zip(failed["run_name"], failed["grid"], failed["status"], reasons, strict=True)]
    often = ", most often" if reasons.nunique() > 1 else ""
    sentence = f"{count(len(rows), 'run')} failed{often}: {reasons.value_counts().index[0]}"
    return Warned(sentence, table(("run", "grid", "status", "reason"), rows))


def _falls_with_batch(results: GridResults, metric: Metric) -> Warned | None:
    """Compare the metric between each batch size of a setting and the next larger one."""
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    cells = results.cells[results.cells["batch"].notna() & results.cells[metric.column].notna()]
    cells = cells.sort_values("batch", kind="stable")
    groups = cells.groupby(setting, sort=False, dropna=False)
    before, smaller = groups[metric.column].shift(), groups["batch"].shift()
    change = 100 * (cells[metric.column] / before - 1)
    falls = change[change < -_FALL_PERCENT].sort_values(kind="stable")
    if falls.empty:
        return None
    rows = [
        (
            cells["run_name"][row],
            cells["source"][row],
            f"{smaller[row]:g} → {cells['batch'][row]:g}",
            f"{before[row]:,.4g} → {cells[metric.column][row]:,.4g} {metric.unit}",
            f"{fall:.1f}%".replace("-", MINUS),
        )
        for row, fall in falls.items()
    ]
    steps = count(int(before.notna().sum()), "step")
    sentence = (
        f"{metric.name[0].upper()}{metric.name[1:]} falls by more than {_FALL_PERCENT:g}% in {len(rows)} of {steps} "
        f"from one batch size to the next, by up to {-falls.iloc[0]:.1f}%."
    )
    return Warned(sentence, table(("run", "grid", "batch", metric.name, "change"), rows))


def _losses_differ(results: GridResults, pairs: pd.DataFrame) -> Warned | None:
    """Compiling and recomputing do not change the result of a step: the losses must agree."""
    chosen = pairs[pairs["axis"].isin((COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION))]
    loss = results.cells["loss_last"].to_numpy(float)
    a, b = chosen["a"].to_numpy(int), chosen["b"].to_numpy(int)
    difference = chosen.assign(percent=100 * abs(loss[b] / loss[a] - 1))
    wrong = difference[difference["percent"] > _LOSS_PERCENT].sort_values("percent", ascending=False, kind="stable")
    if wrong.empty:
        return None
    names = results.cells["run_name"].to_numpy()
    rows = [
        (names[row.a], names[row.b], f"{loss[row.a]:.4g} → {loss[row.b]:.4g}", f"{row.percent:.1f}%")
        for row in wrong.itertuples()
    ]
    num_known = int(difference["percent"].notna().sum())
    sentence = (
        "Compiling and activation checkpointing must not change the loss, but the last losses differ by more than "
        f"{_LOSS_PERCENT:g}% in {len(rows)} of {count(num_known, 'matched pair')}, by up to "
        f"{wrong['percent'].iloc[0]:.1f}%."
    )
    return Warned(sentence, table(("run", "paired with", "last loss", "difference"), rows))


def _mixed_origins(pairs: pd.DataFrame, cells: pd.DataFrame) -> Warned | None:
    mixed = pairs[pairs["mixed"]]
    if mixed.empty:
        return None
    names, made_by = cells["run_name"].to_numpy(), cells["made_by"].to_numpy()
    rows = [(names[row.a], made_by[row.a], names[row.b], made_by[row.b]) for row in mixed.itertuples()]
    sentence = (
        f"{len(mixed)} of {count(len(pairs), 'matched pair')} mix commits, versions or numbers of steps. The medians "
        "include these pairs; the column mixed of pairs.csv marks them."
    )
    return Warned(sentence, table(("run", "made by", "paired with", "made by"), rows))


def _several_devices(results: GridResults) -> Warned | None:
    """Pairs across devices are never formed."""
    runs = results.runs[results.runs["device"] != ""]
    devices = runs.groupby("grid")["device"].unique()
    several = devices[devices.map(len) > 1]
    if several.empty:
        return None
    sentence = f"{count(len(several), 'grid')} ran on several kinds of device. Each kind is analysed separately."
    rows = [(grid, ", ".join(sorted(names))) for grid, names in several.items()]
    return Warned(sentence, table(("grid", "devices"), rows))


def _other_base(results: GridResults) -> Warned | None:
    """Constant settings must be equal in all folders, or differences between folders are not due to their axes."""
    (first, there), *others = results.contents.items()
    rows = [
        (name, key, _shown(there.get(key)), _shown(here.get(key)))
        for name, here in others
        for key in _BASE_KEYS
        if here.get(key) != there.get(key)
    ]
    if not rows:
        return None
    folders = count(len({row[0] for row in rows}), "folder")
    sentence = f"{folders} with other base settings than {first}, which may explain differences between folders."
    return Warned(sentence, table(("grid", "key", f"in {first}", "there"), rows))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _unsteady_steps(results: GridResults) -> Warned | None:
    cells = results.cells
    spread = 100 * cells["step_time_s_std"] / cells["step_time_s_mean"]
    wrong = spread[spread > _UNSTEADY_PERCENT].sort_values(ascending=False, kind="stable")
    if wrong.empty:
        return None
    rows = [(cells["run_name"][row], cells["source"][row], f"{value:.0f}%") for row, value in wrong.items()]
    sentence = (
        f"The step times of {len(rows)} of {count(len(spread), 'setting')} vary by more than {_UNSTEADY_PERCENT:g}% "
        "of their mean: other work on the machine, a compilation inside the window, or too few steps."
    )
    return Warned(sentence, table(("run", "grid", "standard deviation of the step time"), rows))


def _missing_measurements(results: GridResults) -> Warned | None:
    """Find completed runs that lack a number that every completed run must have."""

    def cases() -> Iterator[tuple[str, ...]]:
        for name in (THROUGHPUT.column, MEMORY.column, "loss_last"):
            missing = completed[completed[name].isna()]
            yield from zip(missing["run_name"], missing["source"], [name] * len(missing), strict=True)
        over = completed[completed[MFU.column] > 100]
        yield from zip(over["run_name"], over["source"], ["mfu_mean over 100%"] * len(over), strict=True)

    completed = results.runs[results.runs["status"] == "completed"]
    rows = list(cases())
    if not rows:
        return None
    runs = len({row[:2] for row in rows})
    sentence = (
        f"{runs} of {count(len(completed), 'completed run')} lack a measurement or have an impossible one. Runs "
        "without throughput are not data."
    )
    return Warned(sentence, table(("run", "grid", "missing or impossible"), rows))
