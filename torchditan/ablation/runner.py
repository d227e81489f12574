# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Makes the runs of a grid, one after another or through Slurm, and writes the ledger.

Notable:
- the folder of a grid is `<dump_folder>/<name>/`. `grid.json` describes the grid, `runs/` contains the run directories,
  and the ledger is rewritten after every run. A repeated command makes only the runs that are missing or failed;
- only one runner at a time can use the folder. The kernel releases its lock when the process exits;
- after a run with status `oom` the larger batches of that cell are skipped; after an error they are not. Every call
  decides again, from the existing rows, which runs to skip;
- a run that fails affects only its own row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torchditan.ablation.board import Board
from torchditan.ablation.device import Device, probe
from torchditan.ablation.grid import BATCH_SIZE, SEED, Grid, Run, is_grid
from torchditan.ablation.launch import TRAIN, last_step
from torchditan.ablation.launchers import SLURM_FOLDER, Launcher, Pending
from torchditan.ablation.ledger import SCHEMA_VERSION, SKIPPED_AFTER_OOM, Row, read_ledger, write_ledger
from torchditan.ablation.maker import Maker, Watch, maker_of
from torchditan.config.errors import ConfigError
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import take_lock

GRID_NAME = "grid.json"
RETRIED = ("error", "timeout")
"""Statuses that a repeated command retries by default."""

_KIND = "torchditan ablation grid"


@dataclass
class GridFolder:
    """The folder of a grid and its ledger."""

    path: Path
    grid: Grid
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
            # Check again under the lock: another runner may have created the grid in between.
            self._refuse_other_content()
            self.rows = {row["run_name"]: row for row in read_ledger(self.path, axes=self.grid.columns)}
            content = {"schema_version": SCHEMA_VERSION, "kind": _KIND, **asdict(self.grid)}
            write_file(self.path / GRID_NAME, json.dumps(content, indent=2, ensure_ascii=False).encode())
            yield
        finally:
            os.close(lock)

    def keep(self, row: Row, order: Sequence[str]) -> None:
        """Add a row to the ledger. Rows are in the order of the grid, followed by rows of removed cells."""
        self.rows[row["run_name"]] = row
        self.write(order)

    def write(self, order: Sequence[str]) -> None:
        ours = [self.rows[name] for name in order if name in self.rows]
        others = [row for name, row in self.rows.items() if name not in set(order)]
        write_ledger(self.path, [*ours, *others], axes=self.grid.columns)

    def _refuse_other_content(self) -> None:
        if not self.path.exists():
            return
        if not (self.path / GRID_NAME).exists():
            strangers = (
                []
                if not self.path.is_dir()
                else [path.name for path in self.path.iterdir() if path.name not in (".lock", SLURM_FOLDER)]
            )
            if strangers or not self.path.is_dir():
                raise ConfigError(f"{self.path} is not a grid folder (no {GRID_NAME}); name another with --name")
            return
        there, here = _identity(read_grid(self.path)), _identity(json.loads(json.dumps(asdict(self.grid))))
        for key, value in here.items():
            if there.get(key) != value:
                raise ConfigError(
                    f"{self.path} holds another grid: {key} is {json.dumps(there.get(key))} there and "
                    f"{json.dumps(value)} here; name a new folder with --name"
                )


def _identity(content: dict[str, Any]) -> dict[str, Any]:
    """What cannot change in the folder of a grid. With `one_at_a_time`, runs are named by changes from the baseline."""
    axes: dict[str, list[Any]] = content.get("axes", {})
    keys = ("name", "base", "settings", "steps", "window", "autotune", "memory_limit_gib")
    is_one_at_a_time = bool(content.get("one_at_a_time"))  # older grids lack it
    baseline = {axis: values[0] for axis, values in axes.items() if axis != SEED} if is_one_at_a_time else {}
    return {
        **{key: content.get(key) for key in keys},
        "axes": sorted(axes),
        "one_at_a_time": is_one_at_a_time,
        **{f"the first value of {axis}": value for axis, value in baseline.items()},
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
    if content.get("kind") != _KIND or content.get("schema_version") != SCHEMA_VERSION:
        version = content.get("schema_version")
        right = f"this version reads {SCHEMA_VERSION}; name another folder with --name"
        raise ConfigError(f"{path}/{GRID_NAME} has schema version {version}: {right}")
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
    retry: Sequence[str] = RETRIED,
    board: Callable[[int, int], Board] | None = None,
    find_device: Callable[[], Device] | None = probe,
    program: tuple[str, ...] = TRAIN,
    poll_s: float = 1.0,
) -> list[Row]:
    """Make the missing runs of `grid`. Returns the rows of all runs, in order.

    Args:
        grid: result of `load_grid`.
        path: folder of the grid.
        launcher: LocalLauncher, or SlurmLauncher.
        retry: statuses of runs to make again.
        board: creates the live table from (number of runs, width of their names).
        find_device: detects the devices of this machine; None if the runs are made on other machines.
        program: of a rank, as in `Job`.
        poll_s: seconds between two checks of submitted runs.

    Raises:
        ConfigError: the grid or the folder is invalid, see GridFolder and Grid.runs. No run was started.
    """
    runs = grid.runs()
    order = [run.name for run in runs]
    folder = GridFolder(path, grid)
    maker = maker_of(grid, path, program=program)
    device = find_device() if find_device is not None else None
    refused = {} if device is None else {run.name: device.refuses(run) for run in runs}
    if refused and all(refused.values()):
        raise ConfigError(f"{grid.name}: no run can be made here: {refused[order[0]]}")
    with folder.hold():
        shown = (board or _board)(len(runs), max(map(len, order)))
        where = device.name if device else "slurm"
        shown.begin(f"{grid.name}: {len(runs)} runs of {grid.steps} steps on {where}, into {path}")
        _Schedule(runs, folder, maker, launcher, device, refused, shown, retry, poll_s).work()
        shown.close()
    return [folder.rows[name] for name in order]


def _board(num_runs: int, name_width: int) -> Board:
    return Board(sys.stdout, num_runs=num_runs, name_width=name_width)


@dataclass
class _Schedule:
    """Schedules runs: the next is the first undecided one whose smaller batches are decided."""

    runs: list[Run]
    folder: GridFolder
    maker: Maker
    launcher: Launcher
    device: Device | None
    refused: dict[str, str | None]
    board: Board
    retry: Sequence[str]
    poll_s: float

    def work(self) -> None:
        waiting = self._runs_to_make()
        pending: dict[str, tuple[Run, Pending]] = {}
        try:
            while waiting or pending:
                waiting = self._skip(waiting)
                for run in self._ready(waiting, [run for run, _ in pending.values()]):
                    waiting.remove(run)
                    pending[run.name] = (run, self._submit(run))
                finished = [run for run, job in pending.values() if job.done()]
                for run in finished:
                    self._keep(pending.pop(run.name)[1].result(), is_new=True)
                if pending and not finished:
                    self.board.running(lambda: f"{len(pending)} running")
                    time.sleep(self.poll_s)
        finally:
            for _, job in pending.values():
                job.cancel()

    def _runs_to_make(self) -> list[Run]:
        """Show the rows that need no new run. Returns the other runs, including all skipped ones."""
        waiting = []
        for run in self.runs:
            row = self.folder.rows.get(run.name)
            if row is None or row["status"] == "skipped" or row["status"] in self.retry:
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
            reason = self.refused.get(run.name)
            smaller = out_of_memory.get(run.cell)
            if reason is None and smaller is not None and smaller < run.axes[BATCH_SIZE]:
                reason = f"{BATCH_SIZE} {smaller} {SKIPPED_AFTER_OOM}"
            if reason is None:
                left.append(run)
            else:
                self._keep(self.maker.skipped_row(run, reason, device=self.device), is_new=False)
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
        started = time.monotonic()

        def describe() -> str:
            seconds = int(time.monotonic() - started)
            return f"{run.name}: step {last_step(self.maker.run_folder(run))}/{self.maker.steps}, {seconds} s"

        watch = Watch(tick=lambda: self.board.running(describe), say=self.board.line)
        return self.launcher.submit(self.maker, run, device=self.device, watch=watch)

    def _keep(self, row: Row, *, is_new: bool) -> None:
        self.folder.keep(row, [run.name for run in self.runs])
        self.board.row(row, is_new=is_new)
