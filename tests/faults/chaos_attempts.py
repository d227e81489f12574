# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One launch of a run in chaos.py: how it is started, watched, killed at its moment, and waited for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos_plans import Kill, Layout, Pace, moment_of

from torchditan.ablation.launch import TRAIN, Job, environment, processes_of
from torchditan.run.rank_status import read_rank_statuses
from torchditan.run.reading import read_metrics, read_status

if TYPE_CHECKING:
    from torchditan.run.training_progress import Progress

STEPS = 20
GLOBAL_BATCH_SIZE = 12  # divides by 1, 2, 3 and 4 ranks
KEEP_LATEST_K = 2
SAMPLE_FREQ = 7
FLAGS = (
    "--model.flavor=debugmodel",
    "--model.input_channels=1",
    # Random images: the digits cost every start the import of scikit-learn.
    "--dataset.dataset_name=dummy",
    "--dataset.image_size=8",
    "--dataset.num_classes=10",
    "--model.patch_size=2",
    "--training.mixed_precision_param=float32",
    "--training.deterministic",
    f"--training.steps={STEPS}",
    f"--training.global_batch_size={GLOBAL_BATCH_SIZE}",
    "--optimizer.lr=1e-3",
    "--metrics.log_freq=1",
    f"--metrics.sample_freq={SAMPLE_FREQ}",
    "--sampling.num_steps=1",
    "--sampling.max_classes=1",
    "--sampling.images_per_class=1",
    "--validation.num_images=12",
    "--checkpoint.enable_checkpoint",
    f"--checkpoint.keep_latest_k={KEEP_LATEST_K}",
)
# A reference validates too: a validation that left a trace in the numbers would show as well.
REFERENCE_FLAGS = (f"--checkpoint.interval={STEPS}", "--validation.freq=5", "--metrics.enable_sampling=false")
PHASES = ("start-up", "training", "checkpoint writing", "sampling", "shut-down", "ended already")

_POLL_S = 0.003
_LIMIT_S = 600.0  # of an attempt that nobody kills
_END_LIMIT_S = 60.0  # of what is left after a kill
stopping = threading.Event()
"""Set when chaos.py is interrupted: attempts that wait then raise KeyboardInterrupt."""


class RunFailedError(Exception):
    """A run that cannot go on: (the check that failed, what was seen)."""


@dataclass
class Attempt:
    """One launch of a run, and what can be seen of it from outside."""

    run: Path
    layout: Layout
    ranks: Path
    log: Path
    process: subprocess.Popen[bytes]
    started: float
    """Seconds since the epoch."""
    resumed: Progress
    """Of the newest checkpoint at the launch."""

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoint"

    def first_step_at(self) -> float | None:
        """When the last rank began to train, in seconds since the epoch; None before."""
        begun = [status["first_step_at"] for status in read_rank_statuses(self.ranks) if "first_step_at" in status]
        return max(begun) if len(begun) == self.layout.world_size else None

    def phase(self) -> str:
        """What it is doing now."""
        if self.first_step_at() is None:
            return "start-up"
        if (read_status(self.run) or {}).get("state") == "completed":
            return "shut-down"
        if any(changed_at(path) > self.started for path in self.checkpoints.glob("*.partial")):
            return "checkpoint writing"
        step = last_step(self.run)
        is_due = step % SAMPLE_FREQ == 0 or step == STEPS
        grid = self.run / "samples" / f"step_{step:08d}.png"
        samples = "--metrics.enable_sampling=true" in self.process.args  # type: ignore[operator]
        if samples and step > self.resumed.step and is_due and changed_at(grid) < self.started:
            return "sampling"
        return "training"

    def targets(self, kill: Kill) -> list[int]:
        """Process ids to kill; none while the rank has not been started."""
        if kill.target == "torchrun":
            return [self.process.pid]
        processes = processes_of(self.ranks)
        if kill.target == "all":
            return processes
        mark = f"RANK={kill.rank}".encode()
        # A rank's data workers have its environment, but another parent.
        return [pid for pid in processes if parent_of(pid) == self.process.pid and mark in environment_of(pid)]

    def pace(self) -> Pace | None:
        """Of an attempt that ended well; None where it had no step left to do."""
        begun, ended = self.first_step_at(), time.time()
        num_steps = STEPS - self.resumed.step
        if begun is None or not num_steps:
            return None
        done = max(status["time"] for status in read_rank_statuses(self.ranks))
        return Pace(begun - self.started, (done - begun) / num_steps, ended - done)


def launch(home: Path, layout: Layout, flags: Sequence[str]) -> Attempt:
    """Start or resume the run in folder `home`, in the background."""
    run, ranks = home / "run", home / "ranks"
    shutil.rmtree(ranks, ignore_errors=True)  # of the attempt before
    ranks.mkdir(parents=True)
    arguments = [*FLAGS, *flags, f"--training.data_parallel_replicate_degree={layout.replicate}"]
    arguments += [f"--job.dump_folder={home}", f"--metrics.experiment_name={run.name}"]
    command = [sys.executable, *TRAIN, *arguments]
    if layout.is_under_torchrun:
        command = Job(run, tuple(arguments), num_devices=layout.world_size, timeout_s=_LIMIT_S).command()
    log = home / f"attempt-{len(list(home.glob('attempt-*.log'))) + 1}.log"
    resumed, started = progress_of(run), time.time()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment(ranks), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return Attempt(run, layout, ranks, log, process, started, resumed)


def wait_until(attempt: Attempt, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the attempt ended.

    Raises:
        RunFailedError: neither happened in time.
    """
    deadline = attempt.started + _LIMIT_S
    while attempt.process.poll() is None:
        if condition():
            return True
        if time.time() > deadline:
            raise RunFailedError("exit", f"{attempt.log.name}: not done after {_LIMIT_S:g} s")
        if stopping.wait(_POLL_S):
            raise KeyboardInterrupt
    return False


def wait_for_moment(attempt: Attempt, kill: Kill, pace: Pace) -> bool:
    """Whether the attempt still lives when the moment of its kill has come."""
    start_up_s, steps, rest_s = moment_of(kill, pace, STEPS - attempt.resumed.step)
    if start_up_s is not None:
        return wait_until(attempt, lambda: time.time() > attempt.started + start_up_s)
    step = attempt.resumed.step + steps
    # Until it trains, the metrics may still hold later steps of the attempt before.
    if not wait_until(attempt, lambda: attempt.first_step_at() is not None and last_step(attempt.run) >= step):
        return False
    if kill.aim != "save":
        moment = time.time() + rest_s
        return wait_until(attempt, lambda: time.time() > moment)
    known = names_in(attempt.checkpoints)
    if not wait_until(attempt, lambda: not names_in(attempt.checkpoints) <= known):
        return False
    time.sleep(kill.delay_s)
    return attempt.process.poll() is None


def strike(attempt: Attempt, kill: Kill, pace: Pace) -> dict[str, Any]:
    """Kill the attempt at its moment, and wait until nothing of it is left.

    Returns:
        the kill as it happened: phase, step, seconds of work lost, seconds until the last process was gone; only the
        phase `ended already` where the run was faster.

    Raises:
        RunFailedError: the attempt failed before its moment, or something of it lives on.
    """
    # A rank whose moment comes before it was started dies as it starts.
    if not wait_for_moment(attempt, kill, pace) or not wait_until(attempt, lambda: bool(attempt.targets(kill))):
        finish(attempt)
        return {"phase": "ended already"}
    pids, phase, begun = attempt.targets(kill), attempt.phase(), attempt.first_step_at()
    killed_at = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for_end(attempt, limit_s=_END_LIMIT_S, after=f"{kill.target} was killed in {phase}")
    ended_s = time.time() - killed_at
    saved = progress_of(attempt.run)
    lost_s = 0.0
    if begun is not None and saved.step < STEPS:
        lost_s = max(0.0, attempt.resumed.elapsed_s + killed_at - begun - saved.elapsed_s)
    step = last_step(attempt.run)
    return {"phase": phase, "step": step, "saved_step": saved.step, "lost_s": lost_s, "ended_s": ended_s}


def finish(attempt: Attempt) -> None:
    """Leave the attempt alone until it is done.

    Raises:
        RunFailedError: it failed, or something of it lives on.
    """
    wait_until(attempt, lambda: False)
    if attempt.process.returncode:
        raise RunFailedError("exit", f"{attempt.log.name}: exit {attempt.process.returncode}: {reason_of(attempt)}")
    wait_for_end(attempt, limit_s=_END_LIMIT_S, after="torchrun or the one process ended")


def wait_for_end(attempt: Attempt, *, limit_s: float, after: str) -> None:
    """Wait until no process of the attempt remains; RunFailedError where one does."""
    deadline = time.time() + limit_s
    while True:
        attempt.process.poll()  # a zombie has no environment: collect it first
        left = processes_of(attempt.ranks)
        if not left and attempt.process.returncode is not None:
            return
        if time.time() > deadline:
            names = "; ".join(f"{pid}: {command_of(pid)}" for pid in left)
            raise RunFailedError("processes", f"{attempt.log.name}: left {limit_s:g} s after {after}: {names}")
        if stopping.wait(0.05):
            raise KeyboardInterrupt


def reason_of(attempt: Attempt) -> str:
    """Why an attempt failed: what its ranks said first, else the end of its log."""
    failed = [status for status in read_rank_statuses(attempt.ranks) if status["reason"]]
    if failed:
        first = min(failed, key=lambda status: status["time"])
        return f"rank {first['rank']}: {first['reason']}"
    return (attempt.log.read_text(errors="replace").strip() or "nothing was printed").splitlines()[-1]


def progress_of(run: Path) -> Progress:
    """How far the newest checkpoint of a run is."""
    from torchditan.checkpoint.loading import latest_checkpoint, read_progress
    from torchditan.run.training_progress import Progress

    newest = latest_checkpoint(run / "checkpoint")
    return Progress() if newest is None else read_progress(newest)


def last_step(run: Path) -> int:
    """The newest step in a run's metrics."""
    return max((record["step"] for record in read_metrics(run)), default=0)


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def changed_at(path: Path) -> float:
    """Seconds since the epoch; 0 where there is nothing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def environment_of(pid: int) -> list[bytes]:
    return _read_proc(pid, "environ").split(b"\0")


def command_of(pid: int) -> str:
    return _read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:100]


def parent_of(pid: int) -> int | None:
    fields = _read_proc(pid, "stat").rpartition(b")")[2].split()  # the name, in parentheses, may hold anything
    return int(fields[1]) if fields else None


def _read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
