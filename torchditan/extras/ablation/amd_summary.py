# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`amd/runs_summary.csv` of a grid: the columns and statuses of AMD's diffusion training benchmark.

Notable:
- everything comes from the ledger and from each run's metrics.jsonl, one record per step;
- means and population standard deviations exclude the first `WARMUP_STEPS`. The tail is the last `TAIL_STEPS` of the
  other steps. Both numbers are AMD's defaults;
- every setting is a column too, translated to AMD's terms (`settings_of`);
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

from torchditan.config.options import Config
from torchditan.extras.ablation.grid import BATCH_SIZE, PARALLEL, PRECISION, Grid, Run, parallel_degrees
from torchditan.extras.ablation.ledger import CSV_NAME, SKIPPED_AFTER_OOM, Row, read_ledger
from torchditan.extras.ablation.maker import RUNS_FOLDER
from torchditan.extras.published.resolutions import resolution_numbers, resolution_of
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_config, read_metrics

FOLDER = "amd"
WARMUP_STEPS, TAIL_STEPS = 5, 10

_FIGURES = ("loss", "loss_tail", "step_time_total", "step_time_gpu", "fps_gpu", "tflops")
COLUMNS = (
    *("run_id", "run_name", "timestamp", "status", "git_hash", "git_user", "total_elapsed_time"),
    *(f"{statistic}_{figure}" for figure in _FIGURES for statistic in ("avg", "std")),
    "num_samples",
)
"""Further columns are the settings of a run (`settings_of`)."""
_MODELS = {
    "flux/FLUX.1-dev": "flux-dev",
    "sdxl/SDXL": "stable-diffusion-xl",
    "hunyuan_video/HunyuanVideo": "hunyuan-video",
    "mochi/Mochi-1": "mochi-1",
    "wan/Wan2.1-I2V-14B": "wan2_1-i2v",
}
"""Their names of models; others keep ours."""
_PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16", "bfloat16_f8": "fp8"}

STATUSES = {"completed": "success", "oom": "oom", "error": "error", "timeout": "error"}
"""Maps our statuses to theirs. A skipped run is `oom-skipped` if a smaller batch ran out of memory, else `not_run`."""


def write_amd_summary(grid: Grid, folder: Path) -> Path:
    """Write the summary of the grid in `folder`, which may be incomplete. Returns the path of the file."""
    rows = {row["run_name"]: row for row in read_ledger(folder, axes=grid.columns)}
    user = provenance.git_user()
    lines = []
    for number, run in enumerate(grid.runs(), start=1):
        row, records = rows.get(run.name), read_metrics(folder / RUNS_FOLDER / run.name)
        settings = settings_of(run, row, folder)
        lines.append(summary_row(number, run.name, row, records, git_user=user) | settings)
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, (*COLUMNS, *settings), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    path = folder / FOLDER / CSV_NAME
    path.parent.mkdir(exist_ok=True)
    write_file(path, buffer.getvalue().encode())
    return path


def summary_row(
    run_id: int, run_name: str, row: Row | None, records: Sequence[Mapping[str, Any]], *, git_user: str | None
) -> Row:
    """One line of the summary, from the row of the ledger (None: not made yet) and the lines of metrics.jsonl."""
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


def settings_of(run: Run, row: Row | None, folder: Path) -> Row:
    """The settings of a run of the grid in `folder`, in AMD's terms. Nested ones are Python dictionaries."""
    config, checkpointing = run.config, run.config.activation_checkpoint
    replicate, shard = parallel_degrees(run.axes[PARALLEL])
    use_cpu = None if row is None else row["device_type"] == "cpu"
    compiled = {"dynamo_backend": config.compile.backend if config.training.compile else "no"}
    sharded = {
        "fsdp_sharding_strategy": "FULL_SHARD" if replicate == 1 else "HYBRID_SHARD",
        "fsdp_activation_checkpointing": False,  # that of the model is `gradient_checkpointing`
        "fsdp_offload_params": config.training.enable_cpu_offload,
    }
    replicated = "NO" if replicate == 1 else "MULTI_CPU" if use_cpu else "MULTI_GPU"
    model = f"{config.model.name}/{config.model.flavor}"
    resolution, num_frames = _resolution(config)
    every = checkpointing.selective_ac_option
    shares = {"none": 0, "full": 1, "fraction": checkpointing.fraction}
    selective = 1 / int(every) if every.isdecimal() else None  # they have no counterpart of `op`
    return {
        "distributed_type": "FSDP" if shard > 1 else replicated,
        "dynamo_config": {**compiled, "dynamo_mode": config.compile.mode},
        "fsdp_config": sharded if shard > 1 else None,
        "machine_rank": 0,
        "mixed_precision": _PRECISIONS.get(_precision(run, folder)),
        "num_machines": 1,
        "num_processes": run.num_devices,
        "rdzv_backend": "c10d",
        "use_cpu": use_cpu,
        "model": _MODELS.get(model, model),
        "model_path": config.model.path,
        "train_data_path": config.dataset.root_dir,
        "train_batch_size": run.axes[BATCH_SIZE] if row is None else row[BATCH_SIZE],
        "num_iterations": config.training.steps,
        "resolution": resolution,
        "num_frames": num_frames,
        "gradient_checkpointing": shares.get(checkpointing.mode, selective),
        "logging_dir": str(folder),
        "profiling_logging_dir": None,
    }


def _precision(run: Run, folder: Path) -> str:
    """That of the run; "auto" of a run that has not chosen yet."""
    precision: str = run.axes[PRECISION]
    if precision == "auto" and (folder / RUNS_FOLDER / run.name / "config.json").exists():
        precision = read_config(folder / RUNS_FOLDER / run.name)["config"]["training"]["mixed_precision_param"]
    return precision


def _resolution(config: Config) -> tuple[str | None, int | None]:
    """(`512`, or `WIDTH,HEIGHT` if they differ; frames of a video) of the samples, in pixels for published models."""
    stored, size = resolution_of(config), config.dataset.image_size
    height, width, *frames = resolution_numbers(stored) if stored else (size[0], size[-1]) if size else (None, None)
    text = f"{height}" if height == width else f"{width},{height}"
    return text if height else None, frames[0] if frames else None


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
