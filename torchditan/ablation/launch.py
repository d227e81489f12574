# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One run under torchrun, from its launch to its status.

Notable:
- the status comes from the file that every rank writes (`write_rank_status`), never from the exit code of torchrun,
  which is 1 for every failure. Out of memory on any rank gives `oom`. Otherwise the first failed rank gives the reason;
- every process of a run has the folder of the run in its environment. On a timeout this identifies the ranks, their
  loader workers and torchrun, which are then ended. Other processes that reuse a process id are never touched;
- the kernel ends torchrun when the runner exits, and the ranks when torchrun exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchditan.run.provenance import importable
from torchditan.run.rank_status import RANKS_VARIABLE, read_rank_statuses
from torchditan.run.reading import read_metrics
from torchditan.supervision.exit_status import judge_ranks

TRAIN = ("-m", "torchditan", "train")
"""Program of a rank, in the words that follow `python` or `torchrun`."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RANKS_FOLDER, LOG_NAME = "ranks", "launcher.log"

_LIBC = ctypes.CDLL(None)  # loaded here, because a forked child should not load libraries
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_GRACE_S = 10.0
_TORCHRUN_VARIABLES = re.compile(r"((LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$|GROUP_|ROLE_|TORCHELASTIC_")

_NOT_ON_THIS_MACHINE = ("float8.enable_float8_linear = ", "--nproc_per_node = ")
"""Prefixes of trainer errors that mean that the cell needs another machine, not that the grid is wrong."""

Tick = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """A run to launch and its limits."""

    folder: Path
    """The run directory."""
    flags: tuple[str, ...]
    """Options of train.py; they set `folder` as the run directory."""
    num_devices: int
    timeout_s: float
    memory_limit_gib: float | None = None
    """Memory limit of a process on a CPU (RLIMIT_DATA)."""
    program: tuple[str, ...] = TRAIN

    def command(self) -> list[str]:
        """The command line. It uses torchrun also for one device, so that every run starts alike."""
        return torchrun_command(self.program, self.flags, num_ranks=self.num_devices)


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    status: str
    """completed, oom, error, timeout or skipped."""
    reason: str | None
    started: float
    """Start time in seconds since the epoch."""
    elapsed_s: float
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def start_up_s(self) -> float | None:
        """Seconds from the launch until the last rank started its first step."""
        begun = [rank["first_step_at"] for rank in self.ranks if "first_step_at" in rank]
        return max(begun) - self.started if begun and len(begun) == len(self.ranks) else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Maximum over ranks."""
        return max((rank["peak_memory_gib"] for rank in self.ranks if rank.get("peak_memory_gib")), default=None)


def torchrun_command(program: Sequence[str], flags: Sequence[str], *, num_ranks: int) -> list[str]:
    """The command line that runs a program on ranks of this machine."""
    ranks = [f"--nproc_per_node={num_ranks}", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    return [*TORCHRUN, *ranks, *program, *flags]


def execute(job: Job, *, on_tick: Tick | None = None) -> Outcome:
    """Launch a job, wait for it and determine its status. No process of the run remains when this returns or raises."""
    ranks = job.folder / RANKS_FOLDER
    ranks.mkdir(parents=True, exist_ok=True)
    started, clock = time.time(), time.monotonic()
    with open(job.folder / LOG_NAME, "wb") as log:
        process = subprocess.Popen(
            job.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(ranks),
            start_new_session=True,
            preexec_fn=lambda: prepare_child(job.memory_limit_gib),
        )
        try:
            timed_out = not _wait(process, clock + job.timeout_s, on_tick)
        finally:
            end_processes(ranks, process)
    found = read_rank_statuses(ranks)
    status, reason = judge(
        found,
        num_ranks=job.num_devices,
        timeout_s=job.timeout_s if timed_out else None,
        num_steps=last_step(job.folder),
        log=(job.folder / LOG_NAME).read_text(encoding="utf-8", errors="replace"),
    )
    return Outcome(status, reason, started, time.monotonic() - clock, found)


def environment(ranks: Path) -> dict[str, str]:
    """Environment of a launch, without the variables that an outer torchrun set for its own ranks.

    A checkout that is not installed is importable from any folder.
    """
    kept = {name: value for name, value in importable().items() if not _TORCHRUN_VARIABLES.match(name)}
    kept.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {**kept, RANKS_VARIABLE: str(ranks.resolve())}


def prepare_child(memory_limit_gib: float | None = None) -> None:
    """Prepare a new process before its program starts: it ends with this process, and has this memory limit."""
    if sys.platform == "linux":
        # torchrun forwards SIGTERM to the ranks. After SIGKILL, ranks that have not started yet would survive.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if memory_limit_gib is not None:
        limit = int(memory_limit_gib * 1024**3)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _wait(process: subprocess.Popen[bytes], deadline: float, on_tick: Tick | None) -> bool:
    """Wait for the launcher. Returns whether it ended before the deadline."""
    while time.monotonic() < deadline:
        if on_tick is not None:
            on_tick()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return True
    return False


def end_processes(ranks: Path, launcher: subprocess.Popen[bytes] | None = None) -> None:
    """End all processes on this machine that belong to the run whose ranks write into the folder `ranks`."""
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
    """Ids of the processes that have the folder of the run in their environment, without zombies.

    Without /proc: the process ids that the ranks recorded, except for ranks that reported their end.
    """
    if not Path("/proc/self/environ").exists():
        return [status["pid"] for status in read_rank_statuses(ranks) if status["state"] == "running"]
    mark = f"{RANKS_VARIABLE}={ranks.resolve()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        # Unreadable environments are those of other users or of ended processes, which do not belong to the run.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def judge(
    ranks: Sequence[Mapping[str, Any]], *, num_ranks: int, timeout_s: float | None, num_steps: int, log: str
) -> tuple[str, str | None]:
    """(status, reason) of a run whose processes have all ended.

    Args:
        ranks: status files of the ranks; a rank that never started has none.
        num_ranks: expected number of ranks.
        timeout_s: the time limit, if it was exceeded; else None.
        num_steps: number of logged steps.
        log: output of the launcher and the ranks.
    """
    killed = _killed_rank(log, ranks)
    verdict = judge_ranks(ranks, num_ranks=num_ranks, killed=killed)
    if verdict.status in ("completed", "oom"):
        return verdict.status, verdict.reason if verdict.status == "oom" else None
    failed = [str(rank["reason"]) for rank in ranks if rank["state"] == "error"]
    if failed:
        elsewhere = next((reason for reason in failed if reason.startswith(_NOT_ON_THIS_MACHINE)), None)
        return ("skipped", elsewhere) if elsewhere else ("error", verdict.reason)
    unfinished = sorted(set(range(num_ranks)) - {rank["rank"] for rank in ranks if rank["state"] == "completed"})
    if timeout_s is not None:
        where = f"{num_steps} step(s) done, rank(s) {', '.join(map(str, unfinished))} unfinished"
        return "timeout", f"not finished after {timeout_s:g} s: {where}"
    names = ", ".join(map(str, unfinished))
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
