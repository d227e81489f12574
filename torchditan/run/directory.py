# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writes and reads all files of a run, in `<dump_folder>/<experiment_name>/`.

Notable:
- Nothing is created before `open`, and `open` changes nothing in a folder that it refuses.
- A run holds a lock on its folder. The kernel releases it when the process ends, however it ends.
- Files are written to a temporary name, synced and renamed, so a reader sees the old or the new file. `metrics.jsonl`
  grows by complete lines instead; readers skip a line that a killed run left incomplete.
- Reading (reading.py) needs no torch.
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
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.errors import ConfigError, option_error
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_config, read_metrics

STATES = ("running", "completed", "interrupted", "oom", "error")

OF_NO_RUN = "sha256-"
"""Start of the `run_id` of weights that belong to no run."""
DATASET_FILES = "dataset_files.json.gz"
"""Path -> size in bytes of the image files that a run was started with, for messages."""
UNREADABLE_FILE = "unreadable_images.txt"
"""Names of the images that a run left out when it drew them, with the reasons."""
_LEASE_S = 120.0
"""A file server may hold the lock of a lost machine for 90 s."""


def run_path(config: Config) -> Path:
    """Folder of a run."""
    assert config.metrics.experiment_name is not None
    return Path(config.job.dump_folder) / config.metrics.experiment_name


class RunDirectory:
    """The files of one run. Rank 0 is the writer; on other ranks, the paths are valid and writes do nothing."""

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.metrics_path = path / "metrics.jsonl"
        self.status_path = path / "status.json"
        self.is_writer = is_writer
        self._lock: int | None = None
        self._unwritten = b""  # lines, or part of one, that a full disk refused
        self._has_warned = False
        self._is_new = False
        self._created: list[Path] = []  # folders that `open` created, deepest first
        self._replaced: dict[Path, bytes | None] = {}  # original content of files that `open` changed

    def start_mark(self) -> list[str] | None:
        """What identifies the start of the run that opened the folder last; None if this machine sees none."""
        try:
            stored = json.loads(self.config_path.read_bytes())
        except (OSError, ValueError):
            return None
        return [stored["run_id"], stored["started"]]

    def sample_path(self, step: int) -> Path:
        return self.path / "samples" / f"step_{step:08d}.png"

    def open(
        self,
        config: dict[str, Any],
        *,
        trajectory: dict[str, Any],
        class_names: Sequence[str] = (),
        device: str = "cpu",
        world_size: int = 1,
    ) -> None:
        """Lock the folder for this run and write config.json.

        Args:
            config: the resolved configuration, as nested dicts.
            trajectory: the settings that determine the weights.
            class_names: of the training data, by label.
            device, world_size: recorded as the hardware of the run.

        Raises:
            ConfigError: the folder contains a run with another trajectory, or one that is still running. The folder
                is unchanged.
        """
        if not self.is_writer:
            return
        self._refuse_other_trajectory(trajectory)
        self._create_and_lock()
        try:
            # Check again under the lock: another run may have taken the folder in between.
            stored = self._refuse_other_trajectory(trajectory)
        except ConfigError:
            self.close()
            raise
        for left in [*self.path.glob(".*.partial"), *self.path.glob("*/.*.partial")]:  # by killed processes
            left.unlink(missing_ok=True)
        self._is_new = stored is None
        files = (self.config_path, self.status_path)
        self._replaced = {file: file.read_bytes() if file.exists() else None for file in files}
        now = _now()
        hardware = provenance.hardware(device, world_size)
        if (threads := (stored or {}).get("hardware", {}).get("cpu_threads")) is not None:
            # They affect the last bits of results, so later resumes reuse those that the run started with.
            hardware["cpu_threads"] = threads
        content = {
            "run_id": stored["run_id"] if stored else uuid4().hex[:8],
            "created": stored["created"] if stored else now,
            "started": now,
            "config": config,
            "trajectory": trajectory,
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": provenance.git_commit(),
            "hardware": hardware,
            "command": sys.argv,
            "class_names": list(class_names),
            **({"imported": stored["imported"]} if stored and "imported" in stored else {}),
        }
        write_file(self.config_path, to_json(content, indent=2))

    def close(self) -> None:
        """Release the folder."""
        if self._unwritten:
            self._write_metrics()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Undo `open` after a mistake of the user that is found before any step. Keep earlier training results."""
        began = self.metrics_path.exists() or any(self.path.glob("*/step[-_]*"))
        if self._lock is None or (self._is_new and began):
            return
        if self._created:
            shutil.rmtree(self.path)
            with suppress(OSError):  # not empty
                for parent in self._created[1:]:
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

    def write_status(self, state: str, reason: str | None = None, *, step: int | None = None, rank: int = 0) -> None:
        """Write status.json, unless the folder was discarded. Any rank that fails may write it, because its exit ends
        the others before they can."""
        if not self.path.exists():
            return
        assert state in STATES, state
        data = to_json({"state": state, "reason": reason, "step": step, "time": _now(), "rank": rank}, indent=2)
        try:
            try:
                write_file(self.status_path, data)
            except OSError:  # a full disk takes no new file, but the old one has its block
                with open(self.status_path, "r+b", buffering=0) as file:
                    file.write(data.ljust(self.status_path.stat().st_size))
        except OSError as error:  # a full disk must not end a run, nor hide why one ended
            text = f"{self.status_path} cannot be written ({error.strerror}): {state}"
            print(f"warning: {text}{f', {reason}' if reason else ''}", file=sys.stderr)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl; NaN and infinities are written as null.

        Lines that a full disk refuses are kept and written together with a later line.
        """
        if not self.is_writer:
            return
        assert self._lock is not None, "the run directory is not open"
        self._unwritten += to_json(record) + b"\n"
        self._write_metrics()

    def extend_last_metrics(self, numbers: dict[str, Any]) -> None:
        """Add numbers to the last line of metrics.jsonl. On a full disk the line stays, and a warning has them."""
        if not self.is_writer:
            return
        try:
            content = self.metrics_path.read_bytes() + self._unwritten
            write_file(self.metrics_path, content.removesuffix(b"}\n") + b", " + to_json(numbers)[1:] + b"\n")
            self._unwritten = b""
        except OSError as error:
            text = f"{self.metrics_path} cannot be written ({error.strerror}); its last line lacks {numbers}"
            print(f"warning: {text}", file=sys.stderr)

    def _write_metrics(self, *, sync: bool = False) -> None:
        try:
            with open(self.metrics_path, "ab", buffering=0) as file:
                while self._unwritten:
                    written = file.write(self._unwritten)
                    self._unwritten = self._unwritten[written:]
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if not self._has_warned:
                later = "its lines are kept and written when the disk has space"
                print(f"warning: {self.metrics_path} cannot be written ({error.strerror}); {later}", file=sys.stderr)
            self._has_warned = True

    def sync_metrics(self) -> None:
        """Sync metrics.jsonl, so that all appended lines survive a power failure."""
        if self._unwritten or (self._lock is not None and self.metrics_path.exists()):
            self._write_metrics(sync=True)

    def truncate_metrics(self, step: int) -> None:
        """Before a resume from `step`, drop the lines of later steps, and incomplete lines of killed runs.

        If the run starts from step 0, the metrics of an earlier attempt without a checkpoint are kept as
        `metrics.jsonl.1`, `.2` and so on.
        """
        if not self.is_writer or not self.metrics_path.exists():
            return
        if self._unwritten:
            self._write_metrics()
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        if step == 0 and self.metrics_path.stat().st_size:
            names = (self.path / f"metrics.jsonl.{number}" for number in itertools.count(1))
            os.replace(self.metrics_path, next(name for name in names if not name.exists()))
            return
        write_file(self.metrics_path, b"".join(to_json(record) + b"\n" for record in kept))

    def _refuse_other_trajectory(self, trajectory: dict[str, Any]) -> dict[str, Any] | None:
        """The stored config.json; None for a new run. ConfigError if the folder belongs to another run."""
        if not self.config_path.exists():
            if self.metrics_path.exists():
                raise ConfigError(
                    f"{self.path} holds metrics.jsonl but no config.json, so its settings are unknown; "
                    "name this run with --metrics.experiment_name"
                )
            return None
        stored = read_config(self.path)
        if differing := differences(stored.get("trajectory", {}), trajectory):
            raise ConfigError(
                f"{self.path} holds a run with other settings: {'; '.join(differing)}. "
                "To resume it, use its settings; otherwise name a new run with --metrics.experiment_name"
            )
        return stored

    def _create_and_lock(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            right = f"{self.path} is not a writable folder ({error.strerror}); choose another"
            raise option_error("job.dump_folder", str(self.path.parent), right) from None
        self._created = missing
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        remedy = "name this run with --metrics.experiment_name"
        try:
            take_lock(lock, self.path, holder="process", remedy=remedy, patience_s=_LEASE_S if is_restart else 0.0)
        except ConfigError:
            os.close(lock)
            raise
        self._lock = lock
        self._drop_lock_in_forks()

    def _drop_lock_in_forks(self) -> None:
        """A forked data worker would inherit the lock and hold it after its parent is killed."""
        reference = weakref.ref(self)

        def drop() -> None:
            directory = reference()
            if directory is not None and directory._lock is not None:
                os.close(directory._lock)
                directory._lock = None

        os.register_at_fork(after_in_child=drop)


def take_lock(lock: int, folder: Path, *, holder: str, remedy: str, patience_s: float = 0.0) -> None:
    """Lock an open file of `folder` until this process ends, and write the process id and host into it.

    Args:
        lock: file descriptor, open for reading and writing.
        folder: the folder to lock.
        holder: the kind of process that locks such folders, for the message.
        remedy: an alternative to waiting, for the message.
        patience_s: how long to wait for another process to release it.

    Raises:
        ConfigError: another process holds the lock.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                pid = os.pread(lock, 200, 0).decode().strip()
                raise ConfigError(f"{folder} is in use by {holder} {pid}; wait for it, or {remedy}") from None
            time.sleep(0.2)
        except OSError as error:
            # Some cluster file systems are mounted without locks. Training works without one.
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            print(f"warning: {folder} cannot be locked ({error.strerror})", file=sys.stderr)
            break
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"PID {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def to_json(value: Any, indent: int | None = None) -> bytes:
    """UTF-8. Halves of surrogate pairs, which names of files can have, make all of it ASCII with escapes."""
    dump = partial(json.dumps, _finite(value), indent=indent, allow_nan=False, default=str)
    try:
        return dump(ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return dump().encode()


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None (null), because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
