# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One run under torchrun, from its launch to its verdict.

Notable:
- the verdict comes from the file that every rank keeps (run/rank_status.py), never from torchrun's exit
  code, which is 1 whatever happened. Out of memory on any rank is `oom`; else the first rank that failed says why;
- every process of a run carries the run's folder in its environment. On a timeout the ranks, their loader workers and
  torchrun are found by it and ended; a process id that the system gave to someone else in between is never touched;
- the kernel ends torchrun when the runner dies, and the ranks when torchrun does.
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

from torchditan.run.rank_status import RANKS_VARIABLE, read_rank_statuses
from torchditan.run.reading import read_metrics
from torchditan.supervision.exit_status import judge_ranks

TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
RANKS_FOLDER, LOG_NAME = "ranks", "launcher.log"

_LIBC = ctypes.CDLL(None)  # loaded here: a forked child should not have to
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_GRACE_S = 10.0
_TORCHRUN_VARIABLES = re.compile(r"((LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT))$|GROUP_|ROLE_|TORCHELASTIC_")

_NOT_ON_THIS_MACHINE = ("float8.enable_float8_linear = ", "--nproc_per_node = ")
"""Beginnings of the trainer's refusals that are no mistake in a grid: the cell needs another machine."""

Tick = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """What to launch, and how long it may take."""

    folder: Path
    """The run directory."""
    flags: tuple[str, ...]
    """Options of train.py; they name `folder` as the run's."""
    num_devices: int
    timeout_s: float
    memory_limit_gib: float | None = None
    """Memory a process may take from the system (RLIMIT_DATA), for a CPU."""
    script: Path = TRAIN_SCRIPT

    def command(self) -> list[str]:
        """Under torchrun also on one device, so that every run starts alike."""
        ranks = [f"--nproc_per_node={self.num_devices}", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        return [*TORCHRUN, *ranks, str(self.script), *self.flags]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """completed, oom, error, timeout or skipped."""
    reason: str | None
    started: float
    """Seconds since the epoch."""
    elapsed_s: float
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def start_up_s(self) -> float | None:
        """From the launch until the last rank began its first step."""
        begun = [rank["first_step_at"] for rank in self.ranks if "first_step_at" in rank]
        return max(begun) - self.started if begun and len(begun) == len(self.ranks) else None

    @property
    def peak_memory_gib(self) -> float | None:
        """The highest of any rank."""
        return max((rank["peak_memory_gib"] for rank in self.ranks if rank.get("peak_memory_gib")), default=None)


def execute(job: Job, *, on_tick: Tick | None = None) -> Outcome:
    """Launch, wait, judge. No process of the run is left when this returns or raises."""
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
            preexec_fn=lambda: _prepare_child(job.memory_limit_gib),
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
        num_steps=_last_step(job.folder),
        log=(job.folder / LOG_NAME).read_text(encoding="utf-8", errors="replace"),
    )
    return Outcome(status, reason, started, time.monotonic() - clock, found)


def environment(ranks: Path) -> dict[str, str]:
    """That of a launch: what an outer torchrun set for its own ranks is none of theirs."""
    kept = {name: value for name, value in os.environ.items() if not _TORCHRUN_VARIABLES.match(name)}
    kept.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {**kept, RANKS_VARIABLE: str(ranks.resolve())}


def _prepare_child(memory_limit_gib: float | None) -> None:
    if sys.platform == "linux":
        # SIGTERM, which torchrun passes on to the ranks: SIGKILL would leave those that have not begun alone.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if memory_limit_gib is not None:
        limit = int(memory_limit_gib * 1024**3)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _wait(process: subprocess.Popen[bytes], deadline: float, on_tick: Tick | None) -> bool:
    """Whether the launcher ended in time."""
    while time.monotonic() < deadline:
        if on_tick is not None:
            on_tick()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return True
    return False


def end_processes(ranks: Path, launcher: subprocess.Popen[bytes] | None = None) -> None:
    """End what is left of the run whose ranks write into the folder `ranks`, on this machine."""
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
    """Processes that belong to the run: those with its folder in their environment, zombies apart.

    Where there is no /proc to ask, the ids that the ranks recorded, as far as they did not end by their own word.
    """
    if not Path("/proc/self/environ").exists():
        return [status["pid"] for status in read_rank_statuses(ranks) if status["state"] == "running"]
    mark = f"{RANKS_VARIABLE}={ranks.resolve()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        # A process of another user, or one that ended meanwhile, cannot be read and is none of ours.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def judge(
    ranks: Sequence[Mapping[str, Any]], *, num_ranks: int, timeout_s: float | None, num_steps: int, log: str
) -> tuple[str, str | None]:
    """(status, reason) of a run whose processes have all ended.

    Args:
        ranks: what each rank wrote; a rank that never began wrote nothing.
        num_ranks: how many there should be.
        timeout_s: the time it was given, where that ran out.
        num_steps: steps it logged.
        log: what the launcher and the ranks printed.
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
        where = f"{num_steps} step(s) done, rank(s) {', '.join(map(str, unfinished))} not at their end"
        return "timeout", f"not done after {timeout_s:g} s: {where}"
    return "error", killed or f"rank(s) {', '.join(map(str, unfinished))} ended without a word: {_last_line(log)}"


def _killed_rank(log: str, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """A rank that a signal ended before it could write: the others only lost their connection to it."""
    for number, name, pid in re.findall(r"Signal (\d+) \((SIG\w+)\) received by PID (\d+)", log):
        rank = next((rank for rank in ranks if rank["pid"] == int(pid) and rank["state"] == "running"), None)
        if rank is not None and name != "SIGTERM":  # SIGTERM is torchrun's own, to those that are left
            why = ", as by the system when memory ran out" if int(number) == signal.SIGKILL else ""
            return f"rank {rank['rank']}: ended by {name}{why}"
    return None


def _last_step(folder: Path) -> int:
    records = read_metrics(folder)
    return records[-1]["step"] if records else 0


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|error)\b", line)]
    return (errors or lines or ["nothing was printed"])[-1].strip()
