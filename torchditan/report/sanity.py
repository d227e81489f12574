# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sanity checks of measured runs: properties that valid measurements must have.

Notable: a failed check removes nothing. The report shows it next to the results, with the affected runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchditan.ablation.grid import BATCH_SIZE, CHECKPOINT_FRACTION, CHECKPOINTING, COMPILE
from torchditan.report.grid_results import GridResults
from torchditan.report.pairs import MEMORY, MFU, THROUGHPUT, Metric, matched_pairs

if TYPE_CHECKING:
    import pandas as pd

_FALL_PERCENT = 1.0  # smaller falls are noise of repeated measurements
_UNSTEADY_PERCENT = 10.0
_LOSS_PERCENT = 2.0
_BASE_KEYS = ("base", "settings", "steps", "window", "memory_limit_gib")  # keys of grid.json that no axis covers
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Check:
    """One check. `passed` is None if no run could be checked. `rows` are its findings, under `columns`."""

    title: str
    passed: bool | None
    sentence: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def run_checks(results: GridResults, pairs: pd.DataFrame) -> list[Check]:
    """Run all checks of the results and of their same-batch pairs."""
    return [
        *(_grows_with_batch(results, metric) for metric in (THROUGHPUT, MFU, MEMORY)),
        _same_loss(results, pairs),
        _one_origin(results, pairs),
        _one_device(results),
        _same_base(results),
        _steady_steps(results),
        _complete_measurements(results),
    ]


def _grows_with_batch(results: GridResults, metric: Metric) -> Check:
    """Compare the metric between each batch size of a setting and the next larger one."""
    title = f"{metric.name[0].upper()}{metric.name[1:]} does not fall as the batch grows"
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    cells = results.cells[results.cells["batch"].notna() & results.cells[metric.column].notna()]
    cells = cells.sort_values("batch", kind="stable")
    groups = cells.groupby(setting, sort=False, dropna=False)
    before = groups[metric.column].shift()
    steps = int(before.notna().sum())
    if not steps:
        unknown = metric is MFU and not results.cells.empty and results.cells[MFU.column].isna().all()
        why = "the peak of this device is unknown" if unknown else "no setting has two batch sizes"
        return Check(title, None, f"Not checked: {why}.")
    change = 100 * (cells[metric.column] / before - 1)
    falls = change[change < -_FALL_PERCENT].sort_values(kind="stable")
    if falls.empty:
        return Check(title, True, f"True for all {count(steps, 'step')} from one batch size to the next.")
    smaller = groups["batch"].shift()
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
    sentence = (
        f"It falls by more than {_FALL_PERCENT:g}% in {len(falls)} of {count(steps, 'step')} from one batch size to "
        f"the next. The largest fall is {-falls.iloc[0]:.1f}% at {rows[0][0]} (batch {rows[0][2]})."
    )
    return Check(title, False, sentence, ("run", "grid", "batch", metric.name, "change"), rows)


def _same_loss(results: GridResults, pairs: pd.DataFrame) -> Check:
    """Compiling and recomputing do not change the result of a step: the losses must agree."""
    title = "Compiling and activation checkpointing do not change the loss"
    chosen = pairs[pairs["axis"].isin((COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION))]
    loss = results.cells["loss_last"].to_numpy(float)
    a, b = chosen["a"].to_numpy(int), chosen["b"].to_numpy(int)
    difference = chosen.assign(percent=100 * abs(loss[b] / loss[a] - 1))
    difference = difference[difference["percent"].notna()]
    if difference.empty:
        return Check(title, None, "Not checked: no matched pair with a loss.")
    wrong = difference[difference["percent"] > _LOSS_PERCENT].sort_values("percent", ascending=False, kind="stable")
    largest = difference["percent"].max()
    if wrong.empty:
        pairs_text = count(len(difference), "matched pair")
        return Check(title, True, f"The last losses of {pairs_text} differ by at most {largest:.2g}%.")
    names = results.cells["run_name"].to_numpy()
    rows = [
        (names[row.a], names[row.b], f"{loss[row.a]:.4g} → {loss[row.b]:.4g}", f"{row.percent:.1f}%")
        for row in wrong.itertuples()
    ]
    sentence = (
        f"The last losses differ by more than {_LOSS_PERCENT:g}% in {len(wrong)} of "
        f"{count(len(difference), 'matched pair')}, by at most {largest:.1f}%."
    )
    return Check(title, False, sentence, ("run", "paired with", "last loss", "difference"), rows)


def _one_origin(results: GridResults, pairs: pd.DataFrame) -> Check:
    title = "Both runs of a pair come from one commit, one set of versions and equal numbers of steps"
    if pairs.empty:
        return Check(title, None, "Not checked: no matched pair.")
    mixed = pairs[pairs["mixed"]]
    if mixed.empty:
        return Check(title, True, f"True for all {count(len(pairs), 'matched pair')}.")
    names, made_by = results.cells["run_name"].to_numpy(), results.cells["made_by"].to_numpy()
    rows = [(names[row.a], made_by[row.a], names[row.b], made_by[row.b]) for row in mixed.itertuples()]
    sentence = (
        f"{len(mixed)} of {count(len(pairs), 'matched pair')} mix them. The medians include these pairs; "
        "the column `mixed` of pairs.csv marks them."
    )
    return Check(title, False, sentence, ("run", "made by", "paired with", "made by"), rows)


def _one_device(results: GridResults) -> Check:
    """Pairs across devices are never formed. This check counts how many that excludes."""
    title = "A grid ran on one kind of device"
    runs = results.runs[results.runs["device"] != ""]
    if runs.empty:
        return Check(title, None, "Not checked: no run recorded its device.")
    devices = runs.groupby("grid")["device"].nunique()
    if (devices <= 1).all():
        return Check(title, True, "True: no pair was excluded for mixing devices.")
    effects = [axis for axis in results.axes if axis != BATCH_SIZE]
    within = len(matched_pairs(results.cells, results.axes, effects))
    merged = results.cells.assign(source=results.cells["grid"])
    merged = merged.drop_duplicates(["source", *results.axes]).reset_index(drop=True)
    across = max(len(matched_pairs(merged, results.axes, effects)) - within, 0)
    several = devices[devices > 1]
    rows = [(grid, ", ".join(sorted(set(runs["device"][runs["grid"] == grid])))) for grid in several.index]
    sentence = (
        f"{count(len(several), 'grid')} ran on several. Each device is analysed separately. At least "
        f"{count(across, 'pair')} that would mix devices "
        f"{'was' if across == 1 else 'were'} excluded."
    )
    return Check(title, False, sentence, ("grid", "devices"), rows)


def _same_base(results: GridResults) -> Check:
    """Constant settings must be equal in all folders, or differences between folders are not due to their axes."""
    title = "Folders agree in base file, settings and steps"
    (first, there), *others = results.contents.items()
    if not others:
        return Check(title, None, "Not checked: only one folder.")
    rows = [
        (name, key, _shown(there.get(key)), _shown(here.get(key)))
        for name, here in others
        for key in _BASE_KEYS
        if here.get(key) != there.get(key)
    ]
    if not rows:
        return Check(title, True, "True according to their grid.json, or to the config.json of their runs.")
    sentence = f"{count(len({row[0] for row in rows}), 'folder')} different from {first}: this may explain differences."
    return Check(title, False, sentence, ("grid", "key", f"in {first}", "there"), rows)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _steady_steps(results: GridResults) -> Check:
    title = "Step times of a run are steady"
    cells = results.cells
    spread = 100 * cells["step_time_s_std"] / cells["step_time_s_mean"]
    known = int(spread.notna().sum())
    if not known:
        return Check(title, None, "Not checked: no run has a standard deviation of its steps.")
    wrong = spread[spread > _UNSTEADY_PERCENT].sort_values(ascending=False, kind="stable")
    if wrong.empty:
        sentence = (
            f"Their standard deviation is {spread.median():.1f}% (median of {known}), at most {spread.max():.1f}%."
        )
        return Check(title, True, sentence)
    rows = [(cells["run_name"][row], cells["source"][row], f"{value:.0f}%") for row, value in wrong.items()]
    sentence = (
        f"In {len(wrong)} of {known} settings their standard deviation is over {_UNSTEADY_PERCENT:g}% of the mean: "
        "other work on the machine, a compilation inside the window, or too few steps."
    )
    return Check(title, False, sentence, ("run", "grid", "standard deviation of the step time"), rows)


def _complete_measurements(results: GridResults) -> Check:
    """Find completed runs that lack a number that every completed run must have."""
    title = "Completed runs have their measurements and a finite loss"
    completed = results.runs[results.runs["status"] == "completed"]
    if completed.empty:
        return Check(title, None, "Not checked: no run completed.")
    needed = (THROUGHPUT.column, MEMORY.column, "loss_last")
    rows = []
    for name in needed:
        for row in completed.index[completed[name].isna()]:
            rows.append((completed["run_name"][row], completed["source"][row], name))
    over = completed.index[completed[MFU.column] > 100]
    rows += [(completed["run_name"][row], completed["source"][row], "mfu_mean over 100%") for row in over]
    if not rows:
        return Check(title, True, f"True for all {len(completed)}.")
    names = len({row[:2] for row in rows})
    sentence = f"{names} of {count(len(completed), 'completed run')} lack one. Runs without throughput are not data."
    return Check(title, False, sentence, ("run", "grid", "missing or impossible"), rows)


def count(number: int, noun: str) -> str:
    """`1 pair`, `2 pairs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
