# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One launch of a run in kills.py: how it is started, watched, hit at its moment, and waited for.

Most attempts are forks of a process that has imported torch, with torchrun's agent in one of them: a start takes a
second instead of ten. The others are started by their command line.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked_scripts
from kills_plans import BATCH_SIZE, EVALUATION_FREQ, Kill, Layout, Pace

from torchditan.extras.ablation.launch import TRAIN, Job, processes_of
from torchditan.run.reading import read_metrics, read_status
from torchditan.supervision.parent_death import die_with_parent
from torchditan.supervision.rank_status import read_rank_statuses

if TYPE_CHECKING:
    from torchditan.run.training_progress import Progress

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 20
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
    f"--training.global_batch_size={BATCH_SIZE}",
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
MISSED = "ended already"
PHASES = ("start-up", "step", "save", "clean-up", "evaluation", "grid", "end", MISSED)

_POLL_S = 0.002
_LIMIT_S = 300.0  # of an attempt that nobody kills
_END_LIMIT_S = 60.0  # of what is left after a kill
stopping = threading.Event()
"""Set when kills.py is interrupted: attempts that wait then raise KeyboardInterrupt."""


class RunFailedError(Exception):
    """A run that cannot go on: (the check that failed, what was seen)."""


@dataclass
class Attempt:
    """One launch of a run, and what can be seen of it from outside."""

    run: Path
    layout: Layout
    ranks: Path
    log: Path
    process: subprocess.Popen[bytes] | BaseProcess
    """torchrun, or the one process."""
    flags: Sequence[str]
    started: float
    """Seconds since the epoch."""
    resumed: Progress
    """Of the newest checkpoint at the launch."""

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoint"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while torchrun, or the one process, lives."""
        return self.process.exitcode if isinstance(self.process, BaseProcess) else self.process.poll()

    def first_step_at(self) -> float | None:
        """When the last rank began to train, in seconds since the epoch; None before."""
        begun = [status["first_step_at"] for status in read_rank_statuses(self.ranks) if "first_step_at" in status]
        return max(begun) if len(begun) == self.layout.world_size else None

    def phase(self) -> str:
        """What it is doing, or was doing when it was killed."""
        if self.first_step_at() is None:
            return "start-up"
        if (read_status(self.run) or {}).get("state") == "completed":
            return "end"
        if self.has_new("*.deleted"):
            return "clean-up"
        if self.has_new("*.partial"):
            return "save"
        if "--metrics.enable_sampling=true" in self.flags and self.lacks("sampling", SAMPLE_FREQ):
            return "grid"
        return "evaluation" if self.lacks_evaluation() else "step"

    def has_new(self, pattern: str) -> bool:
        """Whether this attempt left such a folder among the checkpoints."""
        return any(touched_at(path) > self.started for path in self.checkpoints.rglob(pattern))

    def lacks_evaluation(self) -> bool:
        """Whether an evaluation is due and not recorded."""
        return f"--evaluation.freq={EVALUATION_FREQ}" in self.flags and self.lacks("evaluation", EVALUATION_FREQ)

    def lacks(self, task: str, freq: int) -> bool:
        """Whether a task of this frequency is due at the last logged step, and its figures are not there."""
        last = (read_metrics(self.run) or [{"step": 0}])[-1]
        is_due = last["step"] == STEPS or (last["step"] > 0 and last["step"] % freq == 0)
        return is_due and f"{task}_s" not in last

    def processes(self) -> list[int]:
        """Ids of all its processes that live."""
        return sorted({*processes_of(self.ranks), *processes_of_session(self.pid)})

    def targets(self, kill: Kill) -> list[int]:
        """Process ids to hit; none while the rank has not been started."""
        if kill.target == "launcher":
            return [self.pid]
        processes = self.processes()
        if kill.target == "all":
            return processes
        children = [pid for pid in processes if parent_of(pid) == self.pid]  # torchrun starts the ranks in order
        return children[kill.rank : kill.rank + 1]

    def pace(self) -> Pace | None:
        """Of an attempt that ended well; None where it had no step left to do."""
        begun = self.first_step_at()
        num_steps = STEPS - self.resumed.step
        if begun is None or not num_steps:
            return None
        done = max(status["time"] for status in read_rank_statuses(self.ranks))
        return Pace(begun - self.started, (done - begun) / num_steps)


def launch(home: Path, layout: Layout, flags: Sequence[str], *, is_forked: bool = True) -> Attempt:
    """Start or resume the run in folder `home`, in the background."""
    run = home / "run"
    arguments = [*FLAGS, *flags, f"--training.data_parallel_replicate_degree={layout.replicate}"]
    arguments += [f"--job.dump_folder={home}", f"--metrics.experiment_name={run.name}"]
    modules = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # of kills_metric
    job = Job(
        program=(*TRAIN, *arguments),
        folder=home,
        num_ranks=layout.world_size if layout.is_under_torchrun else None,
        variables={"PYTHONPATH": modules, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=home,
        log_name=f"attempt-{len(list(home.glob('attempt-*.log'))) + 1}.log",
    )
    resumed, started = progress_of(run), time.time()
    process: subprocess.Popen[bytes] | BaseProcess
    if is_forked:
        shutil.rmtree(job.ranks, ignore_errors=True)  # of the attempt before
        job.ranks.mkdir(parents=True)
        job.log.touch()
        script = [str(REPOSITORY / "train.py"), *arguments]
        process = multiprocessing.get_context("forkserver").Process(
            target=_run_in_session, args=(script, job.num_ranks, job.environment(), home, [job.log, job.log])
        )
        process.start()
    else:
        process = job.start()
    ranks, log = job.ranks, job.log
    return Attempt(run, layout, ranks, log, process, flags, started, resumed)


def _run_in_session(*arguments: Any) -> None:
    from torchditan.trainer import Trainer

    os.setsid()  # all processes of the attempt are found by this
    die_with_parent()
    gc.freeze()  # a full collection, at the end of a run, would visit the objects of all imported modules
    Trainer.flops_per_image = lambda self: 1.0  # a third of the start-up, for the utilization alone
    forked_scripts.launch(*arguments)


def wait_until(attempt: Attempt, condition: Callable[[], bool], *, poll_s: float = _POLL_S) -> bool:
    """Whether the condition came true before the attempt ended.

    Raises:
        RunFailedError: neither happened in time.
    """
    deadline = attempt.started + _LIMIT_S
    while attempt.exit_code() is None:
        if condition():
            return True
        if time.time() > deadline:
            raise RunFailedError("exit", f"{attempt.log.name}: not done after {_LIMIT_S:g} s")
        if stopping.wait(poll_s):
            raise KeyboardInterrupt
    return False


def wait_for_moment(attempt: Attempt, kill: Kill, pace: Pace) -> bool:
    """Whether the attempt still lives when the moment of its kill has come.

    Steps are counted, not timed: on a busy machine the expected seconds would be over too early.
    """
    if kill.aim == "start-up":
        moment = attempt.started + kill.moment * pace.start_up_s
        return wait_until(attempt, lambda: time.time() > moment)
    # Others than a step happen after some step: not all of them after the last ones.
    steps = kill.moment * (STEPS - attempt.resumed.step) * (1.0 if kill.aim == "step" else 0.7)
    due = attempt.resumed.step + int(steps)
    # Until it trains, the metrics may still hold later steps of the attempt before.
    if not wait_until(attempt, lambda: attempt.first_step_at() is not None and last_step(attempt.run) >= due):
        return False
    if kill.aim == "step":
        rest = time.time() + (steps - int(steps)) * pace.step_s
        return wait_until(attempt, lambda: time.time() > rest)
    known = names_in(attempt.checkpoints)
    has_begun = {
        "save": lambda: not names_in(attempt.checkpoints) <= known,
        "clean-up": lambda: any(name.endswith(".deleted") for name in names_in(attempt.checkpoints)),
        "evaluation": attempt.lacks_evaluation,
        "end": lambda: (read_status(attempt.run) or {}).get("state") == "completed",
    }[kill.aim]
    is_short = kill.aim == "clean-up"  # of a small model: a millisecond
    if not wait_until(attempt, has_begun, poll_s=0.0 if is_short else _POLL_S):
        return False
    time.sleep(0.0 if is_short else kill.delay_s)
    return attempt.exit_code() is None


def strike(attempt: Attempt, kill: Kill, pace: Pace) -> dict[str, Any]:
    """Send the signal at its moment, and wait until nothing of the attempt is left.

    Returns:
        the kill as it happened: phase, step, seconds of work lost, seconds until the last process was gone; only the
        phase `ended already` where the run was faster.

    Raises:
        RunFailedError: the attempt failed before its moment, something of it lives on, or a SIGTERM cost a step.
    """
    # A rank whose moment comes before it was started dies as it starts.
    if not wait_for_moment(attempt, kill, pace) or not wait_until(attempt, lambda: bool(attempt.targets(kill))):
        finish(attempt)
        return {"phase": MISSED}
    pids, phase, begun = attempt.targets(kill), "", attempt.first_step_at()
    is_instant = kill.signal == "SIGKILL" and (kill.target != "rank" or attempt.layout.world_size == 1)
    if not is_instant:  # the other processes may still change what can be seen
        phase = attempt.phase()
    killed_at = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[kill.signal])
    wait_for_end(attempt, limit_s=_END_LIMIT_S, after=f"{kill.signal} to {kill.target}")
    ended_s = time.time() - killed_at
    phase = phase or attempt.phase()
    saved, step = progress_of(attempt.run), last_step(attempt.run)
    if kill.signal == "SIGTERM" and phase not in ("start-up", "end") and saved.step != step:
        raise RunFailedError("stop", f"{attempt.log.name}: SIGTERM after step {step}, and {saved.step} is saved")
    lost_s = 0.0
    if begun is not None and saved.step < STEPS:
        lost_s = max(0.0, attempt.resumed.elapsed_s + killed_at - begun - saved.elapsed_s)
    return {"phase": phase, "step": step, "saved_step": saved.step, "lost_s": lost_s, "ended_s": ended_s}


def finish(attempt: Attempt) -> None:
    """Leave the attempt alone until it is done.

    Raises:
        RunFailedError: it failed, or something of it lives on.
    """
    wait_until(attempt, lambda: False)
    if code := attempt.exit_code():
        raise RunFailedError("exit", f"{attempt.log.name}: exit {code}: {reason_of(attempt)}")
    wait_for_end(attempt, limit_s=_END_LIMIT_S, after="torchrun or the one process ended")


def wait_for_end(attempt: Attempt, *, limit_s: float, after: str) -> None:
    """Wait until no process of the attempt remains; RunFailedError where one does."""
    deadline = time.time() + limit_s
    while True:
        left = attempt.processes()
        if not left and attempt.exit_code() is not None:
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
    from torchditan.checkpoint.files import latest_checkpoint
    from torchditan.checkpoint.loading import read_progress
    from torchditan.run.training_progress import Progress

    newest = latest_checkpoint(run / "checkpoint")
    return Progress() if newest is None else read_progress(newest)


def last_step(run: Path) -> int:
    """The newest step in a run's metrics."""
    return max((record["step"] for record in read_metrics(run)), default=0)


def names_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def touched_at(path: Path) -> float:
    """When the content or the name last changed, in seconds since the epoch; 0 where there is nothing."""
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0


def command_of(pid: int) -> str:
    return _read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:100]


def processes_of_session(leader: int) -> list[int]:
    """Ids of the processes of a session, without zombies: a container may have no process that collects orphans."""
    stats = {int(name): _stat_of(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    return [pid for pid, fields in stats.items() if fields and fields[0] != "Z" and int(fields[3]) == leader]


def parent_of(pid: int) -> int | None:
    fields = _stat_of(pid)
    return int(fields[1]) if fields else None


def _stat_of(pid: int) -> list[str]:
    """State, parent, group, session and so on; empty where it has ended."""
    return _read_proc(pid, "stat").rpartition(b")")[2].decode().split()  # the name, in parentheses, may hold anything


def _read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
