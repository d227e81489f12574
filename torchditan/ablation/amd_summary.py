# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`amd/runs_summary.csv` of a grid: the columns and statuses of AMD's diffusion training benchmark.

Notable:
- everything comes from the ledger and from each run's metrics.jsonl, one record per step;
- means and population standard deviations exclude the first `WARMUP_STEPS`. The tail is the last `TAIL_STEPS` of the
  other steps. Both numbers are AMD's defaults;
- values that were not measured are empty, never 0. docs/compatibility.md defines each column.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from torchditan.ablation.grid import Grid
from torchditan.ablation.ledger import CSV_NAME, SKIPPED_AFTER_OOM, Row, read_ledger
from torchditan.ablation.maker import RUNS_FOLDER
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics

FOLDER = "amd"
WARMUP_STEPS, TAIL_STEPS = 5, 10

COLUMNS = (
    "run_id",
    "run_name",
    "timestamp",
    "status",
    "git_hash",
    "git_user",
    "total_elapsed_time",
    "avg_loss",
    "std_loss",
    "avg_loss_tail",
    "std_loss_tail",
    "avg_step_time_total",
    "std_step_time_total",
    "avg_step_time_gpu",
    "std_step_time_gpu",
    "avg_fps_gpu",
    "std_fps_gpu",
    "avg_tflops",
    "std_tflops",
    "num_samples",
)
STATUSES = {"completed": "success", "oom": "oom", "error": "error", "timeout": "error"}
"""Maps our statuses to theirs. A skipped run is `oom-skipped` if a smaller batch ran out of memory, else `not_run`."""


def write_amd_summary(grid: Grid, folder: Path) -> Path:
    """Write the summary of the grid in `folder`, which may be incomplete. Returns the path of the file."""
    rows = {row["run_name"]: row for row in read_ledger(folder, axes=grid.columns)}
    user = provenance.git_user()
    lines = [
        summary_row(number, run.name, rows.get(run.name), read_metrics(folder / RUNS_FOLDER / run.name), git_user=user)
        for number, run in enumerate(grid.runs(), start=1)
    ]
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    path = folder / FOLDER / CSV_NAME
    path.parent.mkdir(exist_ok=True)
    write_file(path, buffer.getvalue().encode())
    return path


def summary_row(
    run_id: int, run_name: str, row: Row | None, records: Sequence[Mapping[str, Any]], *, git_user: str | None
) -> Row:
    """One line of the summary.

    Args:
        run_id: number of the run in the grid, from 1.
        run_name: its name in the ledger.
        row: its row of the ledger; None if it was not made yet.
        records: its metrics.jsonl.
        git_user: user who runs the grid.
    """
    if row is None or row["status"] == "skipped":
        was_larger = row is not None and SKIPPED_AFTER_OOM in (row["reason"] or "")
        return {"run_id": run_id, "run_name": run_name, "status": "oom-skipped" if was_larger else "not_run"}
    measured = records[WARMUP_STEPS:]
    losses = [record["loss"] for record in measured]
    device_times = [_device_time(record) for record in measured]
    per_device = [
        None if seconds is None else record["images_per_second"] * record["step_time_s"] / row["num_devices"] / seconds
        for record, seconds in zip(measured, device_times, strict=True)
    ]
    times = [record["step_time_s"] for record in records]
    return {
        "run_id": run_id,
        "run_name": run_name,
        "timestamp": _ended(row),
        "status": STATUSES[row["status"]],
        "git_hash": row["git_commit"],
        "git_user": git_user,
        "total_elapsed_time": sum(times) if times and None not in times else None,
        **_mean_and_std("loss", losses),
        **_mean_and_std("loss_tail", losses[-TAIL_STEPS:]),
        **_mean_and_std("step_time_total", [record["step_time_s"] for record in measured]),
        **_mean_and_std("step_time_gpu", device_times),
        **_mean_and_std("fps_gpu", per_device),
        **_mean_and_std("tflops", [record["tflops_per_device"] for record in measured]),
        "num_samples": len(measured),
    }


def _device_time(record: Mapping[str, Any]) -> float | None:
    """Seconds of a step without the wait for its batch. A grid reads the loss of each step, so no work is queued."""
    step_time, waiting = record["step_time_s"], record.get("data_loading_percent")
    if step_time is None or waiting is None or waiting >= 100 or record["images_per_second"] is None:
        return None
    return step_time * (1 - waiting / 100)


def _mean_and_std(name: str, values: Iterable[float | None]) -> Row:
    """Empty unless every step has the value: a mean over only some steps would not describe the run."""
    known = list(values)
    if not known or None in known:
        return {f"avg_{name}": None, f"std_{name}": None}
    numbers = [float(value) for value in known if value is not None]
    return {f"avg_{name}": statistics.fmean(numbers), f"std_{name}": statistics.pstdev(numbers)}


def _ended(row: Row) -> str | None:
    if row["started"] is None or row["elapsed_s"] is None:
        return None
    ended = datetime.fromisoformat(row["started"]) + timedelta(seconds=row["elapsed_s"])
    return ended.isoformat(timespec="seconds")
