# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The ledger of a grid: `runs_summary.csv` and `.parquet`, one row per run, whatever its status.

Notable:
- a missing number is empty, never zero;
- measurements come from `metrics.jsonl`: mean and sample standard deviation over the last `window` steps, with one
  record per step. The first step, which compiles and warms up, is never part of the window;
- `compile_s` is the time of the first step minus that of a later one: compilation, or only the warm-up in eager runs;
- `start_up_s` runs from the launch to the start of the first step, `elapsed_s` from the launch to the end;
- memory is the maximum over ranks and steps. images/s, TFLOP/s and MFU are the values of the trainer;
- figures of quality (`QUALITY`) are those after the last step. A ledger has a column for each that a run measured;
- both files are written under a temporary name and renamed. A truncated ledger, or one of another version, is
  refused.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchditan.ablation.grid import ALIASES, CHECKPOINT_FRACTION, STANDARD_AXES
from torchditan.config.errors import ConfigError
from torchditan.config.schema import options
from torchditan.run.atomic_files import write_file

SCHEMA_VERSION = 1
CSV_NAME, PARQUET_NAME = "runs_summary.csv", "runs_summary.parquet"
STATUSES = ("completed", "oom", "error", "timeout", "skipped")
SKIPPED_AFTER_OOM = "of this cell ran out of memory"
"""Part of the reason of a run that was skipped because a smaller batch ran out of memory."""

_BEFORE_AXES: dict[str, type] = {
    "schema_version": int,
    "grid": str,
    "run_name": str,
    "repeat": int,
    "status": str,
    "reason": str,
}
_AFTER_AXES: dict[str, type] = {
    "num_devices": int,
    "steps": int,
    "window": int,
    "step_time_s_mean": float,
    "step_time_s_std": float,
    "images_per_second_mean": float,
    "images_per_second_std": float,
    "images_per_second_per_device_mean": float,
    "tflops_per_device_mean": float,
    "tflops_per_device_std": float,
    "mfu_mean": float,
    "mfu_std": float,
    "peak_memory_gib": float,
    "peak_reserved_gib": float,
    "loss_last": float,
    "loss_mean": float,
    "compile_s": float,
    "start_up_s": float,
    "elapsed_s": float,
    "git_commit": str,
    "torch_version": str,
    "python_version": str,
    "device": str,
    "device_type": str,
    "host": str,
    "started": str,
}
QUALITY: dict[str, bool] = {
    "validation_loss": False,
    "FD-EffNetLite0": False,
    "KID-EffNetLite0": False,
    "recall-EffNetLite0": True,
    "coverage-EffNetLite0": True,
    "FID": False,
    "KID": False,
    "recall": True,
    "coverage": True,
    "accuracy_generated": True,
    "prompts seen: all": True,
    "prompts held-out: all": True,
}
"""Figures of validation and evaluation, as metrics.jsonl names them, and whether higher is better."""

Row = dict[str, Any]


def columns(axes: Iterable[str], *, measured: Iterable[str] = ()) -> list[str]:
    """Columns of a ledger with these axes, in order. The standard axes are always included.

    `measured` contains the names of the figures that a run has; others than those of `QUALITY` are ignored.
    """
    further = [axis for axis in axes if axis not in STANDARD_AXES]
    found = set(measured)
    quality = [name for name in QUALITY if name in found]
    return [*_BEFORE_AXES, *STANDARD_AXES, *further, *_AFTER_AXES, *quality]


def column_type(column: str) -> type:
    """int, float, bool or str. Lists are stored as text."""
    if column in ALIASES:
        return float if column == CHECKPOINT_FRACTION else str
    known = {**_BEFORE_AXES, **_AFTER_AXES, **dict.fromkeys(QUALITY, float)}.get(column)
    if known is not None:
        return known
    option = options()[column]
    return str if option.is_list else option.kind


def measure(records: Sequence[Mapping[str, Any]], *, window: int, num_devices: int) -> Row:
    """Columns computed from metrics.jsonl with one record per step; empty without a full window after step 1."""
    if len(records) < window + 1:
        return {}
    last = records[-window:]
    row: Row = {}
    for key in ("step_time_s", "images_per_second", "tflops_per_device", "mfu"):
        values = [record[key] for record in last if record.get(key) is not None]
        if len(values) == window:
            row[f"{key}_mean"] = statistics.fmean(values)
            row[f"{key}_std"] = statistics.stdev(values) if window > 1 else None
    for key in ("peak_memory_gib", "peak_reserved_gib"):
        peaks = [record[key] for record in records if record.get(key) is not None]
        row[key] = max(peaks, default=None)
    losses: list[Any] = [record.get("loss") for record in last]
    row["loss_last"] = losses[-1]
    row["loss_mean"] = None if None in losses else statistics.fmean(losses)
    if "images_per_second_mean" in row:
        row["images_per_second_per_device_mean"] = row["images_per_second_mean"] / num_devices
    if "step_time_s_mean" in row and records[0].get("step_time_s") is not None:
        row["compile_s"] = max(0.0, records[0]["step_time_s"] - row["step_time_s_mean"])
    # Both tasks run after the last step, whatever their frequency.
    figures = {name: last[-1].get(name) for name in QUALITY}
    return row | {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


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
        ConfigError: the ledger has another version, other columns, or is truncated.
    """
    path = folder / CSV_NAME
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    remedy = "move it away to repeat the runs"
    lines = list(csv.reader(io.StringIO(text, newline="")))
    header = lines[0] if lines else []
    if header[:1] != ["schema_version"] or not text.endswith("\n"):
        raise ConfigError(f"{path} is cut off, or not a ledger; {remedy}")
    for number, values in enumerate(lines[1:], start=2):
        if values[0] != str(SCHEMA_VERSION):
            right = f"this version reads {SCHEMA_VERSION}"
            raise ConfigError(f"{path}, line {number}: has schema version {values[0]}, {right}; {remedy}")
        if len(values) != len(header):
            what = f"has {len(values)} of {len(header)} columns, the file is cut off"
            raise ConfigError(f"{path}, line {number}: {what}; {remedy}")
    expected = columns(axes, measured=header)
    if header != expected:
        odd = sorted(set(header) ^ set(expected))
        raise ConfigError(f"{path} has other columns than this grid ({', '.join(odd) or 'in another order'}); {remedy}")
    return [_parse_row(dict(zip(header, values, strict=True)), path) for values in lines[1:]]


def _parse_row(row: dict[str, str], path: Path) -> Row:
    try:
        return {name: _from_text(text, column_type(name)) for name, text in row.items()}
    except (KeyError, ValueError):
        raise ConfigError(f"{path}: the row of {row['run_name']} does not parse; move the file away") from None


def _from_text(text: str, kind: type) -> Any:
    if text == "":
        return None
    if kind is bool:
        return {"true": True, "false": False}[text]
    return kind(text)


def to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return json.dumps(value)
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)
