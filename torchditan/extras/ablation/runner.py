# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Makes the runs of a grid through a launcher, and writes the ledger.

Notable:
- the folder of a grid is `<dump_folder>/<name>/`. `grid.json` describes the grid, `runs/` contains the run directories,
  and the ledger is rewritten after every run. A repeated command makes only the runs that are missing or failed;
- only one runner at a time can use the folder. The kernel releases its lock when the process exits;
- after a run with status `oom` the larger batches of that cell are skipped; after an error they are not. Every call
  decides again, from the existing rows, which runs to skip;
- a run that fails affects only its own row.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from torchditan.errors import ConfigError
from torchditan.extras.ablation.board import Board
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import BATCH_SIZE, SEED, Grid, Run, is_grid
from torchditan.extras.ablation.launch import TRAIN, Launcher, Pending
from torchditan.extras.ablation.ledger import SCHEMA_VERSION, SKIPPED_AFTER_OOM, Row, read_ledger, row_of, write_ledger
from torchditan.extras.ablation.maker import Maker
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import take_lock

GRID_NAME = "grid.json"
RETRIED = ("error", "timeout")
"""Statuses that a repeated command retries."""

_KIND = "torchditan ablation grid"
_POLL_S = 1.0


@dataclass
class GridFolder:
    """The folder of a grid and its ledger."""

    path: Path
    grid: Grid
    log_folder: str
    """That of the launcher, which may exist before the first run."""
    rows: dict[str, Row] = field(default_factory=dict)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context manager that locks the folder for this runner.

        Raises:
            ConfigError: the folder does not belong to this grid, or another runner uses it. It is not changed.
        """
        self._refuse_other_content()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path} is not a writable folder ({error.strerror})") from None
        try:
            take_lock(lock, self.path, holder="runner", remedy="name a new folder with --name")
            self.rows = {row["run_name"]: row for row in read_ledger(self.path, axes=self.grid.columns)}
            content = {"schema_version": SCHEMA_VERSION, "kind": _KIND, **self._content()}
            write_file(self.path / GRID_NAME, json.dumps(content, indent=2, ensure_ascii=False).encode())
            yield
        finally:
            os.close(lock)

    def write(self, order: Sequence[str]) -> None:
        """Write the ledger. Rows are in the order of the grid, followed by rows of removed cells."""
        ours = [self.rows[name] for name in order if name in self.rows]
        others = [row for name, row in self.rows.items() if name not in set(order)]
        write_ledger(self.path, [*ours, *others], axes=self.grid.columns)

    def _content(self) -> dict[str, Any]:
        return {**asdict(self.grid), "base_options": self.grid.base_options}

    def _refuse_other_content(self) -> None:
        if (self.path / GRID_NAME).exists():
            content = json.loads(json.dumps(self._content()))
            stored = {"base_options": content["base_options"], **read_grid(self.path)}  # not in older ones
            there, here = _identity(stored), _identity(content)
            for key in here | there:
                if there.get(key) != here.get(key):
                    raise ConfigError(
                        f"{self.path} holds another grid: {key} is {json.dumps(there.get(key))} there and "
                        f"{json.dumps(here.get(key))} here; name a new folder with --name"
                    )
        elif self.path.is_dir() and {path.name for path in self.path.iterdir()} - {".lock", self.log_folder}:
            raise ConfigError(f"{self.path} is not a grid folder (no {GRID_NAME}); name another with --name")


def _identity(content: dict[str, Any]) -> dict[str, Any]:
    """What cannot change in the folder of a grid. With `one_at_a_time`, runs are named by changes from the baseline."""
    axes: dict[str, list[Any]] = content["axes"]
    keys = ("name", "base", "settings", "steps", "window", "autotune", "memory_limit_gib", "one_at_a_time")
    baseline = {axis: values[0] for axis, values in axes.items() if axis != SEED and content.get("one_at_a_time")}
    return {
        **{key: content.get(key) for key in keys},
        "axes": sorted(axes),
        **{f"the first value of {axis}": value for axis, value in baseline.items()},
        **{f"{option} of the base": value for option, value in content["base_options"].items()},
    }


def read_grid(path: Path) -> dict[str, Any]:
    """Read grid.json of a grid folder.

    Raises:
        ConfigError: the folder is not a grid folder, or has another version.
    """
    try:
        content: dict[str, Any] = json.loads((path / GRID_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path} is not a grid folder: it has no readable {GRID_NAME}") from None
    if not is_grid(content) or not {"name", "axes"} <= content.keys():
        raise ConfigError(f"{path} is not a grid folder: its {GRID_NAME} does not describe a grid")
    if (content.get("kind"), content.get("schema_version")) != (_KIND, SCHEMA_VERSION):
        version = f"has schema version {content.get('schema_version')}: this version reads {SCHEMA_VERSION}"
        raise ConfigError(f"{path}/{GRID_NAME} {version}; name another folder with --name")
    return content


def stored_grid(path: Path) -> Grid:
    """The grid in the grid.json of a folder."""
    content = read_grid(path)
    return Grid(**{field.name: content[field.name] for field in fields(Grid) if field.name in content})


def run_grid(
    grid: Grid,
    *,
    path: Path,
    launcher: Launcher,
    program: tuple[str, ...] = TRAIN,
    stream: TextIO | None = None,
) -> list[Row]:
    """Make the missing runs of `grid`. Returns the rows of all runs, in order.

    Args:
        grid: result of `load_grid`.
        path: folder of the grid.
        launcher: where runs are made.
        program: of a rank, as in `Job`.
        stream: for the table of the runs; None: stdout.

    Raises:
        ConfigError: the grid or the folder is invalid, see GridFolder and Grid.runs. No run was started.
    """
    runs = grid.runs()
    device = Device.here() if launcher.is_here else None
    if device is not None and all(device.refuses(run) for run in runs):
        raise ConfigError(f"{grid.name}: no run can be made here: {device.refuses(runs[0])}")
    folder = GridFolder(path, grid, launcher.log_folder)
    with folder.hold():
        board = Board(stream or sys.stdout, num_runs=len(runs), name_width=max(len(run.name) for run in runs))
        where = device.name if device else "other machines"
        board.begin(f"{grid.name}: {len(runs)} runs of {grid.steps} steps on {where}, into {path}")
        maker = Maker(replace(grid), path, program, board if launcher.is_here else None)
        _Schedule(runs, folder, maker, launcher, device, board).work()
        board.close()
    return [folder.rows[run.name] for run in runs]


@dataclass
class _Schedule:
    """Schedules runs: the next is the first undecided one whose smaller batches are decided."""

    runs: list[Run]
    folder: GridFolder
    maker: Maker
    launcher: Launcher
    device: Device | None
    board: Board

    def work(self) -> None:
        waiting = self._runs_to_make()
        pending: list[tuple[Run, Pending]] = []
        try:
            while waiting or pending:
                waiting = self._skip(waiting)
                for run in self._ready(waiting, [run for run, _ in pending]):
                    waiting.remove(run)
                    pending.append((run, self._submit(run)))
                finished = [(run, work) for run, work in pending if work.done()]
                for run, work in finished:
                    pending.remove((run, work))
                    self._keep(self._result(run, work))
                if pending and not finished:
                    self.board.running(lambda: f"{len(pending)} running")
                    time.sleep(_POLL_S)
        finally:
            for _, work in pending:
                work.cancel()

    def _runs_to_make(self) -> list[Run]:
        """Show the rows that need no new run. Returns the other runs, including all skipped ones."""
        waiting = []
        for run in self.runs:
            row = self.folder.rows.get(run.name)
            if row is None or row["status"] in ("skipped", *RETRIED):
                waiting.append(run)
            else:
                self.board.row(row, is_new=False)
        self.folder.write([run.name for run in self.runs])
        return waiting

    def _skip(self, waiting: list[Run]) -> list[Run]:
        """Record the runs that can be skipped. Returns the others."""
        out_of_memory: dict[tuple[Any, ...], int] = {}  # smallest such batch per cell, in any repeat
        for run in self.runs:
            row = self.folder.rows.get(run.name)
            if row is not None and row["status"] == "oom" and run.axes[BATCH_SIZE] != "auto":
                batch_size = run.axes[BATCH_SIZE]
                out_of_memory[run.cell] = min(batch_size, out_of_memory.get(run.cell, batch_size))
        left = []
        for run in waiting:
            smaller = out_of_memory.get(run.cell)
            if smaller is None or run.axes[BATCH_SIZE] <= smaller:
                left.append(run)
            else:
                reason = f"{BATCH_SIZE} {smaller} {SKIPPED_AFTER_OOM}"
                self._keep(row_of(self.maker.grid, run, "skipped", reason, device=self.device))
        return left

    def _ready(self, waiting: list[Run], pending: list[Run]) -> list[Run]:
        """Runs to submit now, one per cell and seed at a time: its status may make the next one unnecessary."""
        busy = {(run.cell, run.axes.get(SEED)) for run in pending}
        num_free = self.launcher.max_parallel - len(pending)
        ready: list[Run] = []
        for run in waiting:
            if len(ready) < num_free and (run.cell, run.axes.get(SEED)) not in busy:
                ready.append(run)
                busy.add((run.cell, run.axes.get(SEED)))
        return ready

    def _submit(self, run: Run) -> Pending:
        work = functools.partial(self.maker.make, run, self.device)
        return self.launcher.submit(
            work, name=run.name, num_devices=run.num_devices, timeout_s=self.maker.grid.timeout_s
        )

    def _result(self, run: Run, work: Pending) -> Row:
        try:
            row: Row = work.result()
        except Exception as error:  # the job was refused or preempted, its node failed, or its time expired
            where = f"job {work.job_id}" if hasattr(work, "job_id") else "not submitted"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            row = row_of(self.maker.grid, run, "error", f"{where}: {reason}", device=None)
        return row

    def _keep(self, row: Row) -> None:
        self.folder.rows[row["run_name"]] = row
        self.folder.write([run.name for run in self.runs])
        self.board.row(row, is_new=row["status"] != "skipped")
