# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The ledger of a grid: `runs_summary.csv` and `.parquet`, one row per run, whatever its status.

Notable:
- a missing number is empty, never zero;
- measurements (`MEASURES`) come from `metrics.jsonl`, one record per step: mean and sample standard deviation over the
  last `window` steps. The first step, which compiles and warms up, is never part of the window;
- figures of quality (`quality`) are those after the last step. A ledger has a column for each that a run measured;
- both files are written under a temporary name and renamed. A truncated ledger, or one with unknown columns, is
  refused; columns that it lacks are empty.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import socket
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchditan.config.schema import Option, options
from torchditan.errors import ConfigError, shorten
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import ALIASES, BATCH_SIZE, STANDARD_AXES, Grid, Run
from torchditan.extras.ablation.launch import Outcome
from torchditan.registry import METRICS, installed_plug_ins, registered
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_config, read_metrics

SCHEMA_VERSION = 1
CSV_NAME, PARQUET_NAME = "runs_summary.csv", "runs_summary.parquet"
STATUSES = ("completed", "oom", "error", "timeout", "skipped")
SKIPPED_AFTER_OOM = "of this cell ran out of memory"
"""Part of the reason of a run that was skipped because a smaller batch ran out of memory."""

_LONGEST_REASON = 300
_FIGURE = Option(float, "a figure of quality")

Row = dict[str, Any]


_WITH_SPREAD = ("step_time_s", "images_per_second", "tflops_per_device", "mfu")
"""Keys of metrics.jsonl whose mean and standard deviation over the window are columns."""
MEASURES = (
    *("step_time_s_mean", "step_time_s_std", "images_per_second_mean", "images_per_second_std"),
    *("images_per_second_per_device_mean", "tflops_per_device_mean", "tflops_per_device_std", "mfu_mean", "mfu_std"),
    *("peak_memory_gib", "peak_reserved_gib", "loss_last", "loss_mean", "compile_s"),
)
"""Columns of `measure`."""
PROVENANCE = ("git_commit", "torch_version", "python_version", "device", "device_type", "host")
"""Columns of `provenance_of`."""
_BEFORE_AXES: dict[str, type] = {
    "schema_version": int,
    "grid": str,
    "run_name": str,
    "repeat": int,
    "status": str,
    "reason": str,
}
_AFTER_AXES: dict[str, type] = {
    **dict.fromkeys(("num_devices", "steps", "window"), int),
    **dict.fromkeys(MEASURES, float),
    **dict.fromkeys(("start_up_s", "elapsed_s"), float),  # from the launch to the first step, and to the end
    **dict.fromkeys((*PROVENANCE, "started"), str),
}


def quality() -> dict[str, bool]:
    """Figures of validation and evaluation for verdicts, as metrics.jsonl names them; whether higher is better."""
    declared = {"validation_loss": False}
    for name in (*METRICS, *installed_plug_ins(METRICS.group)):
        declared |= getattr(registered(METRICS, name), "verdicts", {})
    return declared


def columns(axes: Iterable[str], *, measured: Iterable[str] = ()) -> list[str]:
    """Columns of a ledger with these axes, in order. The standard axes are always included.

    `measured` contains the names of the figures that a run has; others than those of `quality` are ignored.
    """
    further = [axis for axis in axes if axis not in STANDARD_AXES]
    found = set(measured)
    figures = [name for name in quality() if name in found]
    return [*_BEFORE_AXES, *STANDARD_AXES, *further, *_AFTER_AXES, *figures]


def column_type(column: str) -> type:
    """int, float, bool or str. Lists are stored as text; whatever else is not known is a figure."""
    if column in ALIASES:
        return ALIASES[column].kind
    known = {**_BEFORE_AXES, **_AFTER_AXES}.get(column)
    if known is not None:
        return known
    option = options().get(column, _FIGURE)
    return str if option.is_list else option.kind


def measure(records: Sequence[Mapping[str, Any]], *, window: int, num_devices: int) -> Row:
    """Columns computed from metrics.jsonl with one record per step; empty without a full window after step 1.

    Memory is the maximum over ranks and steps. `compile_s` is the time of the first step minus that of a later one:
    compilation, or only the warm-up in eager runs.
    """
    if len(records) < window + 1:
        return {}
    first, *_, last = records

    def values(key: str) -> list[float]:
        """Of the window; [] if a step lacks it."""
        found: list[Any] = [record.get(key) for record in records[-window:]]
        return [] if None in found else found

    def mean(key: str) -> float | None:
        return statistics.fmean(found) if (found := values(key)) else None

    def peak(key: str) -> float | None:
        return max((record[key] for record in records if record.get(key) is not None), default=None)

    row: Row = {}
    for key in _WITH_SPREAD:
        row[f"{key}_mean"], row[f"{key}_std"] = mean(key), None
        if len(found := values(key)) > 1:
            row[f"{key}_std"] = statistics.stdev(found)
    speed, later, start = row["images_per_second_mean"], row["step_time_s_mean"], first.get("step_time_s")
    row["images_per_second_per_device_mean"] = None if speed is None else speed / num_devices
    row |= {key: peak(key) for key in ("peak_memory_gib", "peak_reserved_gib")}
    row |= {"loss_last": last.get("loss"), "loss_mean": mean("loss")}
    row["compile_s"] = None if start is None or later is None else max(0.0, start - later)
    # Validation and evaluation run after the last step, whatever their frequency.
    figures = {name: last.get(name) for name in quality()}
    return row | {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _provenance(stored: Mapping[str, Any]) -> Row:
    """The code and the machine, as the config.json of a run records them."""
    versions, hardware = stored.get("versions") or {}, stored.get("hardware") or {}
    return {
        "git_commit": stored.get("git_commit"),
        "torch_version": versions.get("torch"),
        "python_version": versions.get("python"),
        "device": hardware.get("device_name"),
        "device_type": hardware.get("device"),
        "host": hardware.get("hostname"),
    }


def provenance_of(folder: Path) -> Row:
    """Code and machine that the run recorded; empty if it failed before that."""
    try:
        return _provenance(read_config(folder))
    except ConfigError:
        return {}


@functools.cache
def _provenance_here(device: Device | None) -> Row:
    """Code of this process, and the device of this machine if it makes the runs."""
    hardware = {} if device is None else {"device_name": device.name, "device": device.type}
    hardware |= {} if device is None else {"hostname": socket.gethostname()}
    versions = provenance.versions("torch")
    return _provenance({"git_commit": provenance.git_commit(), "versions": versions, "hardware": hardware})


def row_of(grid: Grid, run: Run, status: str, reason: str | None, *, device: Device | None) -> Row:
    """The row of a run without measurements: all columns.

    Args:
        grid, run: the run and its grid.
        status, reason: how it ended, or why it was not made.
        device: that of this machine; None if runs are made elsewhere.
    """
    batch_size = run.axes[BATCH_SIZE]
    return {
        **dict.fromkeys(columns(run.axes)),
        "schema_version": SCHEMA_VERSION,
        "grid": grid.name,
        "run_name": run.name,
        "repeat": run.repeat,
        "status": status,
        "reason": None if reason is None else shorten(reason, most=_LONGEST_REASON),
        **run.axes,
        BATCH_SIZE: None if batch_size == "auto" else batch_size,
        "num_devices": run.num_devices,
        "steps": grid.steps,
        "window": grid.window,
        **_provenance_here(device),
    }


def row_of_outcome(grid: Grid, run: Run, outcome: Outcome, *, folder: Path, device: Device) -> Row:
    """The row of a run that was made in `folder`."""
    status, reason = outcome.status, outcome.reason
    measured: Row = {}
    if status == "completed":
        records = read_metrics(folder)
        measured = measure(records, window=grid.window, num_devices=run.num_devices)
        if not measured:
            steps = f"{len(records)} of {grid.steps} steps were logged"
            status, reason = "error", f"every rank reports that it completed, but {steps}"
        elif outcome.peak_memory_gib is not None:
            measured["peak_memory_gib"] = max(outcome.peak_memory_gib, measured["peak_memory_gib"] or 0.0)
    return {
        **row_of(grid, run, status if status in STATUSES else "error", reason, device=device),
        **measured,
        "start_up_s": outcome.start_up_s,
        "elapsed_s": outcome.elapsed_s,
        "started": datetime.fromtimestamp(outcome.started, timezone.utc).isoformat(timespec="seconds"),
        **provenance_of(folder),
    }


def write_ledger(folder: Path, rows: Sequence[Row], *, axes: Sequence[str]) -> None:
    """Write both files of the grid in `folder`. The parquet file needs pyarrow."""
    names = columns(axes, measured=(name for row in rows for name, value in row.items() if value is not None))
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([to_text(row.get(name)) for name in names] for row in rows)
    write_file(folder / CSV_NAME, buffer.getvalue().encode())
    _write_parquet(folder / PARQUET_NAME, rows, names)


def _write_parquet(path: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.unlink(missing_ok=True)  # written earlier with pyarrow: it would be older than the CSV
        return
    kinds = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_(), str: pyarrow.string()}
    arrays = {}
    for name in names:
        kind = column_type(name)
        values = [to_text(row.get(name)) or None if kind is str else row.get(name) for row in rows]
        arrays[name] = pyarrow.array(values, type=kinds[kind])
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(arrays), sink)
    write_file(path, sink.getvalue().to_pybytes())


def read_ledger(folder: Path, *, axes: Sequence[str]) -> list[Row]:
    """Read the rows of the ledger in `folder`; [] if it does not exist yet.

    Raises:
        ConfigError: the ledger has unknown columns, or is truncated.
    """
    path = folder / CSV_NAME
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    expected = columns(axes, measured=header)
    odd = (set(header) - set(expected)) | (_BEFORE_AXES.keys() - set(header))
    if odd or not text.endswith("\n"):
        what = f"has other columns than this grid ({', '.join(sorted(odd))})" if text.endswith("\n") else "is cut off"
        raise ConfigError(f"{path} {what}; move it away to repeat the runs")
    rows = []
    for number, values in enumerate(lines, start=2):
        try:
            pairs = zip(header, values, strict=True)
            found = {name: _from_text(value, column_type(name)) for name, value in pairs}
            rows.append({name: found.get(name) for name in expected})
        except (KeyError, ValueError):
            raise ConfigError(f"{path}: line {number} does not parse; move it away to repeat the runs") from None
    return rows


def _from_text(text: str, kind: type) -> Any:
    if text == "":
        return None
    return {"true": True, "false": False}[text] if kind is bool else kind(text)


def to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return json.dumps(value)
    return " ".join(value.split()) if isinstance(value, str) else str(value)
