# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The launcher of child jobs: a program in one process or under torchrun, from its start to its verdict.

Notable:
- the verdict comes from the file that every rank writes (`write_rank_status`), never from the exit code of torchrun,
  which is 1 for every failure. Out of memory on any rank gives `oom`. Otherwise the first failed rank gives the reason;
- every process of a job has the folder of the job in its environment. On a timeout this identifies the ranks, their
  loader workers and torchrun, which are then ended. Other processes that reuse a process id are never touched;
- the kernel ends the job when its launcher exits, and the ranks when torchrun exits;
- a grid gives its runs to a class of `registry.LAUNCHERS`: one after another on this machine, or as Slurm jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchditan.errors import ConfigError
from torchditan.run.provenance import importable
from torchditan.run.reading import read_metrics
from torchditan.supervision.exit_status import judge_ranks
from torchditan.supervision.parent_death import die_with_parent
from torchditan.supervision.rank_status import RANKS_VARIABLE, read_rank_statuses

TRAIN = ("-m", "torchditan", "train")
"""The program of most jobs, in the words that follow `python` or `torchrun`."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

_POLL_S = 0.1
_GRACE_S = 10.0
_TORCHRUN_VARIABLES = re.compile(r"((LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$|GROUP_|ROLE_|TORCHELASTIC_")

Tick = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """A program to launch on this machine."""

    program: Sequence[str]
    """Words that follow `python` or `torchrun`: TRAIN, or a script, and its arguments."""
    folder: Path
    """Gets the output, and what the ranks report in `ranks/`. The run directory, for a training."""
    num_ranks: int | None = None
    """Ranks under torchrun; None: one process without it."""
    timeout_s: float = float("inf")
    memory_limit_gib: float | None = None
    """Memory limit of a process on a CPU (RLIMIT_DATA)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, besides those of this process."""
    cwd: Path | None = None
    executable: str = sys.executable
    """Of a job without torchrun."""
    log_name: str = "launcher.log"

    @property
    def ranks(self) -> Path:
        return self.folder / "ranks"

    @property
    def log(self) -> Path:
        return self.folder / self.log_name

    def command(self) -> list[str]:
        if self.num_ranks is None:
            return [self.executable, *self.program]
        ranks = [f"--nproc_per_node={self.num_ranks}", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        return [*TORCHRUN, *ranks, *self.program]

    def environment(self) -> dict[str, str]:
        """Without the variables that an outer torchrun set for its own ranks.

        A checkout that is not installed is importable from any folder.
        """
        kept = {name: value for name, value in importable().items() if not _TORCHRUN_VARIABLES.match(name)}
        kept.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        return {**kept, **self.variables, RANKS_VARIABLE: str(self.ranks.resolve())}

    def start(self) -> subprocess.Popen[bytes]:
        """Launch it in the background. Its output is appended to the log."""
        shutil.rmtree(self.ranks, ignore_errors=True)  # of an earlier attempt
        self.ranks.mkdir(parents=True)
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command(),
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=self.num_ranks is not None,  # a single process stops by itself on Ctrl-C
                preexec_fn=self._prepare_child,
            )

    def _prepare_child(self) -> None:
        """It ends with this process, and has its memory limit."""
        # torchrun forwards SIGTERM to the ranks. After SIGKILL, ranks that have not started yet would survive.
        die_with_parent(signal.SIGTERM)
        if self.memory_limit_gib is not None:
            limit = int(self.memory_limit_gib * 1024**3)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


@dataclass(frozen=True)
class Outcome:
    """Result of a job."""

    status: str
    """completed, oom, error, timeout or interrupted."""
    reason: str | None
    started: float
    """Start time in seconds since the epoch."""
    elapsed_s: float
    ranks: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    """Of the process or torchrun; None after a timeout."""
    log: str = ""

    @property
    def start_up_s(self) -> float | None:
        """Seconds from the launch until the last rank started its first step."""
        begun = [rank["first_step_at"] for rank in self.ranks if "first_step_at" in rank]
        return max(begun) - self.started if begun and len(begun) == len(self.ranks) else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Maximum over ranks."""
        return max((rank["peak_memory_gib"] for rank in self.ranks if rank.get("peak_memory_gib")), default=None)


def execute(job: Job, *, on_tick: Tick | None = None) -> Outcome:
    """Launch a job, wait for it and determine its status. No process of it remains when this returns or raises."""
    started, clock = time.time(), time.monotonic()
    process = job.start()
    exit_code = None
    try:
        while exit_code is None and time.monotonic() < clock + job.timeout_s:
            if on_tick is not None:
                on_tick()
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(_POLL_S)
    finally:
        end_processes(job.ranks, process)
    ranks, log = read_rank_statuses(job.ranks), job.log.read_text(encoding="utf-8", errors="replace")
    status, reason = judge(job, ranks, exit_code=exit_code, log=log)
    return Outcome(status, reason, started, time.monotonic() - clock, ranks, exit_code, log)


def judge(job: Job, ranks: Sequence[Mapping[str, Any]], *, exit_code: int | None, log: str) -> tuple[str, str | None]:
    """(status, reason) of a job whose processes have all ended.

    Args:
        job: that was launched.
        ranks: status files of the ranks; a rank that never started, or another program, has none.
        exit_code: of the process or torchrun; None if the time limit was exceeded.
        log: output of the launcher and the ranks.
    """
    num_ranks, killed = job.num_ranks or 1, _killed_rank(log, ranks)
    verdict = judge_ranks(ranks, num_ranks=num_ranks, killed=killed)
    if verdict.status == "completed" or (not ranks and exit_code == 0):
        return "completed", None
    if verdict.status != "error" or any(rank["state"] == "error" for rank in ranks):
        return verdict.status, verdict.reason
    unfinished = sorted(set(range(num_ranks)) - {rank["rank"] for rank in ranks if rank["state"] == "completed"})
    names = ", ".join(map(str, unfinished))
    if exit_code is None:
        where = f"{last_step(job.folder)} step(s) done, rank(s) {names} unfinished"
        return "timeout", f"not finished after {job.timeout_s:g} s: {where}"
    if job.num_ranks is None:
        how = f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
        return "error", f"{how}: {last_line(log)}"
    return "error", killed or f"rank(s) {names} exited without reporting an error: {last_line(log)}"


def _killed_rank(log: str, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe a rank that a signal killed before it could report. The other ranks only lost their connection to it."""
    for number, name, pid in re.findall(r"Signal (\d+) \((SIG\w+)\) received by PID (\d+)", log):
        rank = next((rank for rank in ranks if rank["pid"] == int(pid) and rank["state"] == "running"), None)
        if rank is not None and name != "SIGTERM":  # torchrun itself sends SIGTERM to the remaining ranks
            why = ", as by the system when memory ran out" if int(number) == signal.SIGKILL else ""
            return f"rank {rank['rank']}: ended by {name}{why}"
    return None


def last_step(folder: Path) -> int:
    """The last logged step of a run; 0 before the first."""
    records = read_metrics(folder)
    return records[-1]["step"] if records else 0


def last_line(log: str) -> str:
    """The last line that mentions an error, or else the last one."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|error)\b", line)]
    return (errors or lines or ["no output"])[-1].strip()


def end_processes(ranks: Path, launcher: subprocess.Popen[bytes] | None = None) -> None:
    """End all processes on this machine that belong to the job whose ranks write into the folder `ranks`."""
    for pid in processes_of(ranks):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    if launcher is not None:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + _GRACE_S
    while processes_of(ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def processes_of(ranks: Path) -> list[int]:
    """Ids of the processes that have the folder of the job in their environment, without zombies.

    Without /proc: the process ids that the ranks recorded, except for ranks that reported their end.
    """
    if not Path("/proc/self/environ").exists():
        return [status["pid"] for status in read_rank_statuses(ranks) if status["state"] == "running"]
    mark = f"{RANKS_VARIABLE}={ranks.resolve()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        # Unreadable environments are those of other users or of ended processes, which do not belong to the job.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


class Pending(Protocol):
    """Submitted work, as a `concurrent.futures.Future` or a job of submitit."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Launcher:
    """Where a grid makes its runs. A subclass and a line in `registry.LAUNCHERS` add another place."""

    is_here = False
    """Whether runs use the devices of this machine."""
    log_folder = ""
    """Name of the folder that it makes for itself in that of the grid."""

    def __init__(self, folder: Path, *, parameters: Mapping[str, Any], max_parallel: int) -> None:
        """`folder`: of the grid. `parameters`: the `--slurm.` flags. `max_parallel`: runs submitted at once."""
        self.folder, self.parameters, self.max_parallel = folder, parameters, max_parallel

    def submit(self, work: Callable[[], Any], *, name: str, num_devices: int, timeout_s: float) -> Pending:
        """Start picklable work that launches one run after another on `num_devices`, within this time each."""
        raise NotImplementedError


class LocalLauncher(Launcher):
    """On this machine, one after another."""

    is_here = True

    def __init__(self, folder: Path, *, parameters: Mapping[str, Any] = {}, max_parallel: int = 1) -> None:
        super().__init__(folder, parameters={}, max_parallel=1)

    def submit(self, work: Callable[[], Any], **_resources: Any) -> Pending:
        done: Future[Any] = Future()
        done.set_result(work())
        return done


class SlurmLauncher(Launcher):
    """Each run as a Slurm job, by submitit; its logs are in `<grid>/slurm/`."""

    log_folder = "slurm"

    def __init__(self, folder: Path, *, parameters: Mapping[str, Any], max_parallel: int) -> None:
        super().__init__(folder, parameters=parameters, max_parallel=max_parallel)
        try:
            import submitit

            self.executor = submitit.AutoExecutor(folder=folder / self.log_folder, cluster="slurm")
        except ImportError:
            raise ConfigError("--launcher slurm needs submitit; pip install 'torchditan[slurm]'") from None
        except RuntimeError as error:  # this machine is not a login node of a cluster
            raise ConfigError(f"--launcher slurm: {error}") from None

    def submit(self, work: Callable[[], Any], *, name: str, num_devices: int, timeout_s: float) -> Pending:
        minutes = -(-int(timeout_s) // 60) + 5
        resources = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": num_devices, "timeout_min": minutes}
        self.executor.update_parameters(**{"name": name, **resources, **self.parameters})
        try:
            job: Pending = self.executor.submit(work)
            return job
        except Exception as error:  # of sbatch, for example when the queue takes no more jobs
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused
