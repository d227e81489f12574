# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The one place that writes and reads a run's files: `<dump_folder>/<experiment_name>/`.

Notable:
- Nothing is created before `open`, and `open` changes nothing in a folder that it refuses.
- A run holds a lock on its folder. The kernel drops it with the process, however that ends.
- Files are written beside, synced and renamed: a reader sees the old file or the new one, never half of it.
  `metrics.jsonl` grows by whole lines instead; readers skip the line a killed run left torn.
- A launcher that must know how each rank fared names a folder in the environment (`RANKS_VARIABLE`): every rank keeps
  one small file there, from its first moment to its end.
- Reading (`read_config`, `read_metrics`, `read_status`, `read_rank_statuses`) needs no torch.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import socket
import sys
import weakref
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from torchditan.config.errors import ConfigError, option_error
from torchditan.config.trajectory import differences
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_config, read_metrics

STATES = ("running", "completed", "interrupted", "oom", "error")


_OWN_NAMES = ("config.json", "metrics.jsonl", "status.json", ".lock", "samples", "wandb", "flight_recorder")


_FOLDER_OPTIONS = (
    ("checkpoint", "folder"),
    ("metrics", "save_tb_folder"),
    ("profiling", "save_traces_folder"),
    ("profiling", "save_memory_snapshot_folder"),
)


def run_path(dump_folder: str, experiment_name: str) -> Path:
    """Where a run lives; a name that would leave the dump folder is a ConfigError."""
    _check_inside("metrics.experiment_name", experiment_name, "the dump folder")
    return Path(dump_folder) / experiment_name


def check_folders(config: dict[str, Any]) -> None:
    """Every folder option of the resolved `config` stays inside the run directory, else ConfigError."""
    for section, key in _FOLDER_OPTIONS:
        value = config.get(section, {}).get(key)
        if value is not None:
            _check_inside(f"{section}.{key}", value, "the run directory")
            if Path(value).parts[0] in _OWN_NAMES:
                raise option_error(f"{section}.{key}", value, "is a name the run uses itself; choose another")


class RunDirectory:
    """The files of one run. Rank 0 is the writer; other ranks use the paths, their writes do nothing."""

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self.path = Path(path)
        self.is_writer = is_writer
        self._lock: int | None = None
        self._metrics: IO[bytes] | None = None
        self._unwritten = b""  # lines, or the rest of one, that a full disk did not take
        self._has_warned = False
        self._is_new = False
        self._created: list[Path] = []  # folders that `open` made, deepest first
        self._replaced: dict[Path, bytes | None] = {}  # files that are not as `open` found them

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    def sample_path(self, step: int) -> Path:
        return self.path / "samples" / f"step_{step:08d}.png"

    def folder(self, name: str) -> Path:
        """Folder that an option names (`metrics.save_tb_folder`, `checkpoint.folder`, ...)."""
        return self.path / name

    def open(
        self, config: dict[str, Any], *, trajectory: dict[str, Any], device: str = "cpu", world_size: int = 1
    ) -> None:
        """Take the folder for this run and write config.json.

        `config` is the resolved configuration as nested dicts; `trajectory` the settings that decide what
        the weights become. ConfigError where the folder holds a run with another trajectory, or a run that
        is still going; the folder is left as it was.
        """
        check_folders(config)
        if not self.is_writer:
            return
        self._refuse_other_trajectory(trajectory)
        self._create_and_lock()
        try:
            # Again under the lock: another run may have taken the folder in between.
            stored = self._refuse_other_trajectory(trajectory)
        except ConfigError:
            self.close()
            raise
        self._remove_debris()
        self._is_new = stored is None
        files = (self.config_path, self.status_path)
        self._replaced = {file: file.read_bytes() if file.exists() else None for file in files}
        now = _now()
        content = {
            "run_id": stored["run_id"] if stored else uuid4().hex[:8],
            "created": stored["created"] if stored else now,
            "started": now,
            "config": config,
            "trajectory": trajectory,
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": provenance.git_commit(),
            "hardware": {**provenance.hardware(device, world_size), **_kept_threads(stored)},
            "command": sys.argv,
        }
        write_file(self.config_path, to_json(content, indent=2))

    def _remove_debris(self) -> None:
        """What killed processes had half-written beside the run's files."""
        for path in [*self.path.glob(".*.partial"), *self.path.glob("samples/.*.partial")]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        self._close_metrics()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Undo `open`, for a user's mistake found before any step; what trained in the folder stays."""
        began = self.metrics_path.exists() or any(self.path.glob("*/step[-_]*"))
        if self._lock is None or (self._is_new and began):
            return
        if self._created:
            shutil.rmtree(self.path)
            for parent in self._created[1:]:
                if not any(parent.iterdir()):
                    parent.rmdir()
        else:
            for file, content in self._replaced.items():
                if content is None:
                    file.unlink(missing_ok=True)
                else:
                    write_file(file, content)
            if self._is_new:
                (self.path / ".lock").unlink()
        self.close()

    def write_status(
        self, state: str, reason: str | None = None, *, step: int | None = None, rank: int = 0, **extra: Any
    ) -> None:
        """Write status.json: how the run stands, and why. `rank` is the one the reason comes from.

        Does nothing unless `open` succeeded: a refused folder holds the status of another run.
        """
        assert state in STATES, state
        if self._lock is not None:
            self._write_status({"state": state, "reason": reason, "step": step, "time": _now(), "rank": rank, **extra})

    def write_failure(self, state: str, reason: str, *, step: int, rank: int) -> None:
        """`write_status` for a rank that fails while all are running and may not be the writer: when it exits,
        the others are ended before they can write anything."""
        assert state in STATES, state
        self._write_status({"state": state, "reason": reason, "step": step, "time": _now(), "rank": rank})

    def _write_status(self, status: dict[str, Any]) -> None:
        try:
            write_file(self.status_path, to_json(status, indent=2))
        except OSError as error:  # a full disk, which is no reason to end a run, nor to hide why one ended
            text = f"{self.status_path} cannot be written ({error.strerror}): {status['state']}"
            print(f"warning: {text}{', ' + status['reason'] if status['reason'] else ''}", file=sys.stderr)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl; NaN and infinities are written as null.

        What a full disk does not take is kept and written with a later line.
        """
        if not self.is_writer:
            return
        assert self._lock is not None, "the run directory is not open"
        self._unwritten += to_json(record) + b"\n"
        self._write_metrics()

    def _write_metrics(self, *, sync: bool = False) -> None:
        try:
            if self._metrics is None:
                self._metrics = open(self.metrics_path, "ab", buffering=0)  # noqa: SIM115  open as long as the run
            while self._unwritten:
                written = self._metrics.write(self._unwritten)
                self._unwritten = self._unwritten[written:]
            if sync:
                os.fsync(self._metrics.fileno())
        except OSError as error:
            if not self._has_warned:
                later = "its lines are kept and written when there is room"
                print(f"warning: {self.metrics_path} cannot be written ({error.strerror}); {later}", file=sys.stderr)
            self._has_warned = True

    def sync_metrics(self) -> None:
        """What was appended is on the disk when this returns, and survives a power cut."""
        if self._metrics is not None or self._unwritten:
            self._write_metrics(sync=True)

    def _close_metrics(self) -> None:
        if self._unwritten:
            self._write_metrics()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def truncate_metrics(self, step: int) -> None:
        """Before a resume from `step`: drop the lines of later steps, and what a kill left torn.

        A run that begins anew in its folder (step 0) has lost nothing by it: what an earlier attempt without a
        checkpoint measured is kept beside, as `metrics.jsonl.1`, `.2` and so on.
        """
        if not self.is_writer or not self.metrics_path.exists():
            return
        self._close_metrics()
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        if step == 0 and self.metrics_path.stat().st_size:
            names = (self.path / f"metrics.jsonl.{number}" for number in itertools.count(1))
            os.replace(self.metrics_path, next(name for name in names if not name.exists()))
            return
        write_file(self.metrics_path, b"".join(to_json(record) + b"\n" for record in kept))

    def _refuse_other_trajectory(self, trajectory: dict[str, Any]) -> dict[str, Any] | None:
        """The stored config.json, None for a new run; ConfigError where the folder belongs to another run."""
        if not self.config_path.exists():
            if self.metrics_path.exists():
                raise ConfigError(
                    f"{self.path} holds metrics.jsonl but no config.json, so what made it is unknown; "
                    "name this run with --metrics.experiment_name"
                )
            return None
        stored = read_config(self.path)
        differing = differences(stored.get("trajectory", {}), trajectory)
        if differing:
            raise ConfigError(
                f"{self.path} holds a run with other settings: {'; '.join(differing)}. "
                "To resume it use its settings, else name a new run with --metrics.experiment_name"
            )
        return stored

    def _create_and_lock(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            right = f"{self.path} is no folder that can be written ({error.strerror}); choose another"
            raise option_error("job.dump_folder", str(self.path.parent), right) from None
        self._created = missing
        try:
            take_lock(lock, self.path, holder="process", remedy="name this run with --metrics.experiment_name")
        except ConfigError:
            os.close(lock)
            raise
        self._lock = lock
        self._drop_lock_in_forks()

    def _drop_lock_in_forks(self) -> None:
        """A forked data worker would inherit the lock, and hold it after its parent was killed."""
        reference = weakref.ref(self)

        def drop() -> None:
            directory = reference()
            if directory is not None and directory._lock is not None:
                os.close(directory._lock)
                directory._lock = None

        os.register_at_fork(after_in_child=drop)


def take_lock(lock: int, folder: Path, *, holder: str, remedy: str) -> None:
    """Lock an open file of `folder` until this process ends, and write into it who holds it.

    Args:
        lock: file descriptor, open for reading and writing.
        folder: what is locked.
        holder: what kind of process locks such folders, for the message.
        remedy: what else to do than wait, for the message.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 200).decode().strip()
        raise ConfigError(f"{folder} is in use by {holder} {pid}; wait for it, or {remedy}") from None
    except OSError as error:
        # Some cluster file systems are mounted without locks; that is no reason not to train.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        print(f"warning: {folder} cannot be locked ({error.strerror})", file=sys.stderr)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"PID {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _kept_threads(stored: dict[str, Any] | None) -> dict[str, Any]:
    """The CPU threads that a run started with, which decide its last bits; later resumes return to them."""
    threads = (stored or {}).get("hardware", {}).get("cpu_threads")
    return {} if threads is None else {"cpu_threads": threads}


def _check_inside(option: str, value: str, place: str) -> None:
    parts = Path(value).parts
    if not parts or Path(value).is_absolute() or ".." in parts:
        raise option_error(option, value, f"must name a folder inside {place}, without `..`")


def to_json(value: Any, indent: int | None = None) -> bytes:
    text = json.dumps(_finite(value), indent=indent, allow_nan=False, default=str, ensure_ascii=False)
    return text.encode()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
