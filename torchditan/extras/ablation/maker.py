# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Makes one run of a grid on any machine, from its flags to its row of the ledger."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torchditan.config.loader import as_flags
from torchditan.errors import ConfigError
from torchditan.extras.ablation.autotune import STORE_NAME, TRIALS_FOLDER, NothingFits, TrialFailed, find_batch_size
from torchditan.extras.ablation.board import Board
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import BATCH_SIZE, Grid, Run
from torchditan.extras.ablation.launch import TRAIN, Job, Outcome, Tick, end_processes, execute, last_step
from torchditan.extras.ablation.ledger import Row, row_of, row_of_outcome

RUNS_FOLDER = "runs"


@dataclass(frozen=True)
class Maker:
    """Everything that a run needs. Slurm jobs pickle it to send it to another machine."""

    grid: Grid
    folder: Path
    """That of the grid."""
    program: tuple[str, ...] = TRAIN
    """Of a rank."""
    board: Board | None = None
    """Shows the progress of runs on this machine."""

    def run_folder(self, run: Run) -> Path:
        return self.folder / RUNS_FOLDER / run.name

    def job(self, run: Run, *, batch_size: int | None = None) -> Job:
        """The job of a run; `batch_size` is the result of a search."""
        values = dict(run.flags) if batch_size is None else {**run.flags, BATCH_SIZE: batch_size}
        base = {} if self.grid.base is None else {"job.config_file": self.grid.base}
        places = {"job.dump_folder": str(self.folder / RUNS_FOLDER), "metrics.experiment_name": run.name}
        return Job(
            program=(*self.program, *as_flags({**base, **values, **places})),
            folder=self.run_folder(run),
            num_ranks=run.num_devices,  # torchrun also for one device, so that every run starts alike
            timeout_s=self.grid.timeout_s,
            memory_limit_gib=self.grid.memory_limit_gib,
        )

    def make(self, run: Run, device: Device | None = None) -> Row:
        """Make one run on this machine and return its row, whatever its status."""
        device = device or Device.here()
        if (refusal := device.refuses(run)) is not None:
            return row_of(self.grid, run, "skipped", refusal, device=device)
        end_processes(self.job(run).ranks)  # of an earlier attempt whose runner was just killed
        shutil.rmtree(self.run_folder(run), ignore_errors=True)
        started = time.time()
        tick = self._tick(run, started)
        batch_size: int | None = None
        try:
            if run.axes[BATCH_SIZE] == "auto":
                batch_size = self._search(run, device, tick)
            outcome = execute(self.job(run, batch_size=batch_size), on_tick=tick)
        except NothingFits as error:
            outcome = Outcome("oom", str(error), started, time.time() - started)
        except (ConfigError, TrialFailed, OSError) as error:
            outcome = Outcome("error", str(error), started, time.time() - started)
        row = row_of_outcome(self.grid, run, outcome, folder=self.run_folder(run), device=device)
        return row if batch_size is None else {**row, BATCH_SIZE: batch_size}

    def _search(self, run: Run, device: Device, tick: Tick) -> int:
        limit = run.config.autotune.memory_limit_gib or self.grid.memory_limit_gib
        show = print if self.board is None else self.board.line
        return find_batch_size(
            run.config.replace({"metrics.experiment_name": run.name, "autotune.memory_limit_gib": limit}),
            device=device,
            num_devices=run.num_devices,
            folder=self.folder / TRIALS_FOLDER,
            store=self.folder.parent / STORE_NAME,
            program=self.program,
            timeout_s=self.grid.timeout_s,
            on_tick=tick,
            on_trial=lambda trial: show(f"{run.name}: {trial}"),
        )

    def _tick(self, run: Run, started: float) -> Tick:
        def describe() -> str:
            step = last_step(self.run_folder(run))
            return f"{run.name}: step {step}/{self.grid.steps}, {int(time.time() - started)} s"

        return lambda: self.board.running(describe) if self.board is not None else None
