# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Makes one run of a grid on any machine, from its flags to its row of the ledger."""

from __future__ import annotations

import functools
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from torchditan.ablation.autotune import STORE_NAME, TRIALS_FOLDER, NothingFits, TrialFailed, find_batch_size
from torchditan.ablation.device import Device
from torchditan.ablation.grid import BATCH_SIZE, Grid, Run, as_flags
from torchditan.ablation.launch import RANKS_FOLDER, TRAIN, Job, Outcome, Tick, end_processes, execute
from torchditan.ablation.ledger import SCHEMA_VERSION, Row, columns, measure
from torchditan.config.errors import ConfigError, shorten
from torchditan.run import provenance
from torchditan.run.reading import read_config, read_metrics

RUNS_FOLDER = "runs"
_LONGEST_REASON = 300


class Watch(NamedTuple):
    """Callbacks during a run."""

    tick: Tick
    """Called a few times a second."""
    say: Callable[[str], None]
    """Called with a line of progress."""


@dataclass(frozen=True)
class Maker:
    """Everything that a run needs. Slurm jobs pickle it to send it to another machine."""

    grid: str
    folder: Path
    steps: int
    window: int
    timeout_s: float
    memory_limit_gib: float | None
    base: str | None
    store: Path
    """File with the trials of earlier batch size searches."""
    program: tuple[str, ...] = TRAIN

    def run_folder(self, run: Run) -> Path:
        return self.folder / RUNS_FOLDER / run.name

    def job(self, run: Run, *, batch_size: int | None = None) -> Job:
        """The job of a run; `batch_size` is the result of a search."""
        values = dict(run.flags) if batch_size is None else {**run.flags, BATCH_SIZE: batch_size}
        base = {} if self.base is None else {"job.config_file": self.base}
        places = {"job.dump_folder": str(self.folder / RUNS_FOLDER), "metrics.experiment_name": run.name}
        return Job(
            folder=self.run_folder(run),
            flags=tuple(as_flags({**base, **values, **places})),
            num_devices=run.num_devices,
            timeout_s=self.timeout_s,
            memory_limit_gib=self.memory_limit_gib,
            program=self.program,
        )

    def make(self, run: Run, *, device: Device, watch: Watch | None = None) -> Row:
        """Make one run and return its row, whatever its status."""
        folder = self.run_folder(run)
        end_processes(folder / RANKS_FOLDER)  # processes of an earlier attempt whose runner was just killed
        shutil.rmtree(folder, ignore_errors=True)
        started = time.time()
        batch_size: int | None = None
        try:
            if run.axes[BATCH_SIZE] == "auto":
                batch_size = self._search(run, device=device, watch=watch)
            outcome = execute(self.job(run, batch_size=batch_size), on_tick=watch.tick if watch else None)
        except NothingFits as error:
            outcome = Outcome("oom", str(error), started, time.time() - started)
        except (ConfigError, TrialFailed, OSError) as error:
            outcome = Outcome("error", str(error), started, time.time() - started)
        return self._row(run, outcome, batch_size=batch_size, device=device)

    def _search(self, run: Run, *, device: Device, watch: Watch | None) -> int:
        limit = run.config.autotune.memory_limit_gib or self.memory_limit_gib
        return find_batch_size(
            run.config.replace({"metrics.experiment_name": run.name, "autotune.memory_limit_gib": limit}),
            device=device,
            num_devices=run.num_devices,
            folder=self.folder / TRIALS_FOLDER,
            store=self.store,
            program=self.program,
            timeout_s=self.timeout_s,
            on_tick=watch.tick if watch else None,
            on_trial=(lambda trial: watch.say(f"{run.name}: {trial}")) if watch else None,
        )

    def _row(self, run: Run, outcome: Outcome, *, batch_size: int | None, device: Device | None) -> Row:
        folder = self.run_folder(run)
        status, reason = outcome.status, outcome.reason
        measured: Row = {}
        if status == "completed":
            records = read_metrics(folder)
            measured = measure(records, window=self.window, num_devices=run.num_devices)
            if not measured:
                steps = f"{len(records)} of {self.steps} steps were logged"
                status, reason = "error", f"every rank reports that it completed, but {steps}"
        if outcome.peak_memory_gib is not None and measured:
            measured["peak_memory_gib"] = max(outcome.peak_memory_gib, measured["peak_memory_gib"] or 0.0)
        row = {
            **self.skipped_row(run, reason or "", device=device),
            "status": status,
            "reason": None if reason is None else shorten(reason, most=_LONGEST_REASON),
            **measured,
            "start_up_s": outcome.start_up_s,
            "elapsed_s": outcome.elapsed_s,
            "started": datetime.fromtimestamp(outcome.started, timezone.utc).isoformat(timespec="seconds"),
            **provenance_of(folder),
        }
        return row if batch_size is None else {**row, BATCH_SIZE: batch_size}

    def skipped_row(self, run: Run, reason: str, *, device: Device | None) -> Row:
        """The row of a skipped run: all columns, with empty measurements."""
        batch_size = run.axes[BATCH_SIZE]
        return {
            **dict.fromkeys(columns(run.axes)),
            "schema_version": SCHEMA_VERSION,
            "grid": self.grid,
            "run_name": run.name,
            "repeat": run.repeat,
            "status": "skipped",
            "reason": shorten(reason, most=_LONGEST_REASON),
            **run.axes,
            BATCH_SIZE: None if batch_size == "auto" else batch_size,
            "num_devices": run.num_devices,
            "steps": self.steps,
            "window": self.window,
            **_versions(),
            "device": device.name if device else None,
            "device_type": device.type if device else None,
            "host": socket.gethostname() if device else None,
        }


@functools.cache
def _versions() -> Row:
    found = provenance.versions("torch")
    return {
        "git_commit": provenance.git_commit(),
        "torch_version": found["torch"],
        "python_version": found["python"],
    }


def provenance_of(folder: Path) -> Row:
    """Code and machine that the run recorded; empty if it failed before that."""
    try:
        stored = read_config(folder)
    except ConfigError:
        return {}
    versions, hardware = stored.get("versions") or {}, stored.get("hardware") or {}
    return {
        "git_commit": stored.get("git_commit"),
        "torch_version": versions.get("torch"),
        "python_version": versions.get("python"),
        "device": hardware.get("device_name"),
        "device_type": hardware.get("device"),
        "host": hardware.get("hostname"),
    }


def maker_of(grid: Grid, path: Path, *, program: tuple[str, ...] = TRAIN) -> Maker:
    """The maker for the runs of a grid whose folder is `path`."""
    return Maker(
        grid=grid.name,
        folder=path,
        steps=grid.steps,
        window=grid.window,
        timeout_s=grid.timeout_s,
        memory_limit_gib=grid.memory_limit_gib,
        base=grid.base,
        store=path.parent / STORE_NAME,
        program=program,
    )
