#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Kill small runs at random times and restart them. Checks bitwise equality and measures the cost of a kill.

python tests/faults/chaos.py --num_runs 200 --seed 0 --folder outputs/chaos

Each run is killed one to five times by SIGKILL (only torchrun, only one rank, or every process) and restarted each time
with the same command. Then it is compared with a run that was never stopped. In a third of the runs the mode and the
number of ranks change after every kill. Notable:
- the plan of a run is a function of (seed, number); the speed of the machine affects only the times;
- half of the moments are uniform over the lifetime of an attempt, which is mostly start-up for steps this small. The
  others are uniform over its training, or up to 50 ms after a checkpoint started to be written or was published;
- a repeated call continues after the runs in `results.jsonl`. After a change of the code, choose another folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torchditan.ablation.launch import TRAIN_SCRIPT, Job, end_processes, environment, processes_of
from torchditan.config.command_line import ScriptParser, count
from torchditan.config.errors import ConfigError, option_error
from torchditan.evaluation.validation import BIN_KEYS
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.rank_status import read_rank_statuses
from torchditan.run.reading import read_metrics, read_status

if TYPE_CHECKING:
    from torch import Tensor

    from torchditan.run.training_progress import Progress

STEPS = 20
GLOBAL_BATCH_SIZE = 12  # divides by 1, 2, 3 and 4 ranks
KEEP_LATEST_K = 2
SAMPLE_FREQ = 7
ELASTIC_TOLERANCE = 1e-5
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
TARGETS = ("torchrun", "rank", "all")
PHASES = ("start-up", "training", "checkpoint writing", "sampling", "shut-down", "ended already")
_EXACT = ("images_seen", "lr", "loss", "grad_norm", "validation_loss", *BIN_KEYS)

_POLL_S = 0.003
_LIMIT_S = 600.0  # of an attempt that nobody kills
_END_LIMIT_S = 60.0  # of what is left after a kill
_stopping = threading.Event()


class RunFailedError(Exception):
    """A run that cannot go on: (the check that failed, what was seen)."""


@dataclass(frozen=True)
class Layout:
    """How the ranks of an attempt share the work; one process comes with and without torchrun."""

    world_size: int
    replicate: int
    is_under_torchrun: bool = True


LAYOUTS = {
    "one": Layout(1, 1, is_under_torchrun=False),
    "torchrun1": Layout(1, 1),
    "ddp2": Layout(2, 2),
    "fsdp2": Layout(2, 1),
    "ddp3": Layout(3, 3),
    "fsdp3": Layout(3, 1),
    "ddp4": Layout(4, 4),
    "fsdp4": Layout(4, 1),
    "hsdp4": Layout(4, 2),
}
_WEIGHTS = {"one": 30, "torchrun1": 15, "ddp2": 15, "fsdp2": 15, "hsdp4": 8}  # 5 for the others: ranks cost seconds


@dataclass(frozen=True)
class Kill:
    """One SIGKILL to come."""

    target: str
    """torchrun, rank or all."""
    rank: int
    """The one that dies where the target is a rank."""
    aim: str
    """What the moment is drawn over: its life, its training, or the training with the next save after it."""
    moment: float
    """0 to 1."""
    delay_s: float
    """After a save was seen."""


@dataclass(frozen=True)
class Plan:
    """A run to come: `kills[i]` ends the attempt in `layouts[i]`; the attempt in the last layout is left alone."""

    number: int
    layouts: tuple[str, ...]
    kills: tuple[Kill, ...]
    flags: tuple[str, ...]

    @property
    def is_elastic(self) -> bool:
        return len({mesh_of(layout) for layout in self.layouts}) > 1

    @property
    def reference(self) -> str:
        """The layout of the run to compare with."""
        return "one" if self.is_elastic else self.layouts[0]


@dataclass(frozen=True)
class Pace:
    """How long the parts of an attempt take, in seconds."""

    start_up_s: float
    step_s: float
    """Per step, with its share of saving, validation and sampling."""
    ending_s: float

    def life_s(self, num_steps: int) -> float:
        return self.start_up_s + num_steps * self.step_s + self.ending_s


def mesh_of(layout: str) -> tuple[int, int]:
    """What decides the numbers to the bit: (world size, replicas)."""
    return LAYOUTS[layout].world_size, LAYOUTS[layout].replicate


def plan_of(seed: int, number: int) -> Plan:
    """The plan of a run, always the same."""
    draw = random.Random(f"{seed} {number}")
    num_kills = draw.choices((1, 2, 3, 4, 5), (35, 30, 20, 10, 5))[0]
    layouts = [draw_layout(draw, LAYOUTS)]
    is_elastic = draw.random() < 1 / 3
    for _ in range(num_kills):
        others = [name for name in LAYOUTS if mesh_of(name) != mesh_of(layouts[-1])]
        layouts.append(draw_layout(draw, others) if is_elastic else layouts[-1])
    return Plan(
        number=number,
        layouts=tuple(layouts),
        kills=tuple(draw_kill(draw, LAYOUTS[layout]) for layout in layouts[:-1]),
        flags=(
            f"--checkpoint.interval={draw.randint(2, 6)}",
            f"--checkpoint.async_mode={draw.choice(('disabled', 'async'))}",
            f"--dataset.num_workers={draw.choice((0, 0, 0, 0, 2))}",
            f"--validation.freq={draw.choice((0, 0, 5))}",
            f"--metrics.enable_sampling={draw.choice(('true', 'false', 'false'))}",
            f"--metrics.enable_tensorboard={draw.choice(('true', 'false', 'false'))}",
        ),
    )


def draw_layout(draw: random.Random, names: Iterable[str]) -> str:
    names = list(names)
    return draw.choices(names, [_WEIGHTS.get(name, 5) for name in names])[0]


def draw_kill(draw: random.Random, layout: Layout) -> Kill:
    target = draw.choice(TARGETS)
    return Kill(
        target=target if layout.is_under_torchrun else "all",
        rank=draw.randrange(layout.world_size),
        aim=draw.choice(("life", "life", "training", "save")),
        moment=draw.random(),
        delay_s=draw.uniform(0, 0.05),
    )


# One launch


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
    """Start the run of folder `home`, or continue it; it goes on in the background."""
    run, ranks = home / "run", home / "ranks"
    shutil.rmtree(ranks, ignore_errors=True)  # of the attempt before
    ranks.mkdir(parents=True)
    arguments = [*FLAGS, *flags, f"--training.data_parallel_replicate_degree={layout.replicate}"]
    arguments += [f"--job.dump_folder={home}", f"--metrics.experiment_name={run.name}"]
    command = [sys.executable, str(TRAIN_SCRIPT), *arguments]
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
        if _stopping.wait(_POLL_S):
            raise KeyboardInterrupt
    return False


def moment_of(kill: Kill, pace: Pace, num_steps: int) -> tuple[float | None, int, float]:
    """When to kill: (seconds after the launch, None once it trains; steps done since; seconds after that).

    Steps are counted, not timed: on a busy machine the expected seconds would be over too early.
    """
    seconds = kill.moment * num_steps * pace.step_s
    if kill.aim == "life":
        seconds = kill.moment * pace.life_s(num_steps) - pace.start_up_s
        if seconds < 0:
            return seconds + pace.start_up_s, 0, 0.0
    steps = min(int(seconds / pace.step_s), num_steps)
    return None, steps, seconds - steps * pace.step_s


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
        if _stopping.wait(0.05):
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


# What is promised of a run that was killed


def problems_of(run: Path, reference: Path, plan: Plan) -> dict[str, str]:
    """Each check that the finished run fails, with what was seen; none where all is as if never stopped."""
    from torchditan.checkpoint.loading import latest_checkpoint, read_numbers, read_state

    found: dict[str, str | None] = {}
    records, expected = read_metrics(run), read_metrics(reference)
    found["steps"] = wrong_steps([record["step"] for record in records])
    status = read_status(run) or {}
    if status.get("state") != "completed" or status.get("step") != STEPS:
        found["status"] = f"{status}"
    found["debris"] = "; ".join(debris(run)) or None
    found["samples"] = missing_samples(run) if "--metrics.enable_sampling=true" in plan.flags else None
    if "--metrics.enable_tensorboard=true" in plan.flags:
        steps = wrong_steps(tensorboard_steps(run / "tensorboard"))
        found["tensorboard"] = steps and f"steps {steps}"
    last, right = latest_checkpoint(run / "checkpoint"), latest_checkpoint(reference / "checkpoint")
    if last is None or right is None:
        return {"checkpoint": "there is none", **without_none(found)}
    progress, expected_progress = (read_numbers(path) for path in (last, right))
    keys = progress.keys() | expected_progress.keys()
    differing = {key for key in keys if progress.get(key) != expected_progress.get(key)} - {"elapsed_s"}
    # On other meshes the counts stay, and means of the loss differ like the losses.
    differing -= {key for key in differing if plan.is_elastic and isinstance(progress.get(key), float)}
    if differing:
        found["progress"] = f"{progress}, not {expected_progress}"
    if plan.is_elastic:
        difference = largest_difference(records, expected)
        if not difference <= ELASTIC_TOLERANCE:
            found["elastic"] = f"the loss is off by {difference:.1e}"
    else:
        found["curve"] = first_difference(records, expected)
        names = differing_tensors(read_state(last), read_state(right))
        found["tensors"] = f"{len(names)} differ, {names[0]} first" if names else None
    return without_none(found)


def without_none(found: Mapping[str, str | None]) -> dict[str, str]:
    return {name: what for name, what in found.items() if what is not None}


def wrong_steps(steps: Sequence[int]) -> str | None:
    """What is wrong with logged steps that should be 1, 2, ... STEPS."""
    counts = Counter(steps)
    missing = [step for step in range(1, STEPS + 1) if step not in counts]
    doubled = [step for step, count in counts.items() if count > 1]
    if missing or doubled:
        return f"missing {missing}, doubled {doubled}"
    return None if list(steps) == list(range(1, STEPS + 1)) else f"in another order: {list(steps)}"


def first_difference(records: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> str | None:
    """The first number of a curve that is another one, to the bit."""
    reference = {record["step"]: record for record in expected}
    for record in records:
        for key in _EXACT:
            if key in record and record[key] != reference.get(record["step"], {}).get(key):
                other = reference.get(record["step"], {}).get(key)
                return f"{key} of step {record['step']} is {record[key]!r}, not {other!r}"
    return None


def largest_difference(records: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> float:
    """Of the losses, relative; infinite where a step is missing."""
    losses = {record["step"]: record["loss"] for record in records}
    pairs = [(losses.get(record["step"]), record["loss"]) for record in expected]
    return max((abs(a - b) / abs(b) if a is not None else float("inf") for a, b in pairs), default=float("inf"))


def differing_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bytes, or that only one of the two has."""

    def same(name: str) -> bool:
        a, b = left.get(name), right.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()

    return [name for name in sorted({*left, *right}) if not same(name)]


def tensorboard_steps(folder: Path) -> list[int]:
    """Steps at which TensorBoard shows a loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return []
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resume
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []


def missing_samples(run: Path) -> str | None:
    due = [step for step in range(1, STEPS + 1) if step % SAMPLE_FREQ == 0 or step == STEPS]
    missing = [step for step in due if not (run / "samples" / f"step_{step:08d}.png").exists()]
    return f"no grid of step {missing}" if missing else None


def debris(run: Path) -> list[str]:
    """Files and folders that a finished run should not hold."""
    from torchditan.checkpoint.manager import list_checkpoints

    found = {path.relative_to(run).as_posix() for path in run.rglob("*.partial")}
    checkpoints = list_checkpoints(run / "checkpoint")
    strangers = names_in(run / "checkpoint") - {path.name for path in checkpoints}
    found |= {f"checkpoint/{name}" for name in strangers}
    if len(checkpoints) > KEEP_LATEST_K:
        found.add(f"{len(checkpoints)} checkpoints")
    return sorted(found)


# Runs


def make_reference(folder: Path, layout: str) -> Pace:
    """The run of this layout that nobody stops, made once; how long it took."""
    home = folder / "references" / layout
    pace_path = home / "pace.json"
    if not pace_path.exists():
        clear(home)
        attempt = launch(home, LAYOUTS[layout], REFERENCE_FLAGS)
        try:
            finish(attempt)
        finally:
            end(attempt)
        pace = attempt.pace()
        assert pace is not None
        write_file(pace_path, json.dumps(asdict(pace)).encode())
    return Pace(**json.loads(pace_path.read_bytes()))


def execute(plan: Plan, folder: Path, paces: dict[str, Pace], *, keep: bool) -> dict[str, Any]:
    """Do what the plan says, and check what came of it.

    Args:
        plan: of the run.
        folder: of all runs; this one's is deleted where nothing failed.
        paces: of every layout in the plan; those seen here are written back.
        keep: leave the run's folder also where nothing failed.
    """
    home, reference = folder / f"run-{plan.number:04d}", folder / "references" / plan.reference / "run"
    clear(home)
    kills: list[dict[str, Any]] = []
    resumes: list[float] = []
    problems: dict[str, str] = {}
    clock, difference = time.monotonic(), None
    try:
        for index, layout in enumerate(plan.layouts):
            attempt = launch(home, LAYOUTS[layout], plan.flags)
            try:
                if index < len(plan.kills):
                    kills.append(strike(attempt, plan.kills[index], paces[layout]))
                else:
                    finish(attempt)
                    paces[layout] = attempt.pace() or paces[layout]
            finally:
                end(attempt)
            begun = attempt.first_step_at()
            if begun is not None and attempt.resumed.step:
                resumes.append(begun - attempt.started)
        problems = problems_of(home / "run", reference, plan)
        difference = largest_difference(read_metrics(home / "run"), read_metrics(reference))
    except RunFailedError as error:
        check, what = error.args
        problems[check] = what
    except Exception as error:  # of a run that nobody can read any more, and 199 others wait
        problems["unreadable"] = f"{type(error).__name__}: {error}"
    if not problems and not keep:
        shutil.rmtree(home)
    return {
        **asdict(plan),
        "is_elastic": plan.is_elastic,
        "problems": problems,
        "folder": str(home) if problems or keep else None,
        "loss_difference": difference,
        "kills": [{**asdict(kill), **seen} for kill, seen in zip(plan.kills, kills, strict=False)],
        "resumes_s": resumes,
        "elapsed_s": time.monotonic() - clock,
    }


def clear(home: Path) -> None:
    """Nothing is left of what an earlier call of this script did not finish."""
    end_processes(home / "ranks")
    shutil.rmtree(home, ignore_errors=True)


def end(attempt: Attempt) -> None:
    end_processes(attempt.ranks, attempt.process)


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all runs; seconds as {median, max} over the kills that met a living run."""
    elastic = [result for result in results if result["is_elastic"]]
    bitwise = [result for result in results if not result["is_elastic"]]
    kills = [kill for result in results for kill in result["kills"]]
    hits = [kill for kill in kills if kill["phase"] != "ended already"]
    differences = [result["loss_difference"] for result in elastic if result["loss_difference"] is not None]
    return {
        "num_runs": len(results),
        "passed": sum(not result["problems"] for result in results),
        "survived": sum(not {"exit", "processes", "unreadable"} & result["problems"].keys() for result in results),
        "bitwise_runs": len(bitwise),
        "bitwise_equal": sum(is_equal(result, "curve", "tensors") for result in bitwise),
        "elastic_runs": len(elastic),
        "elastic_within_tolerance": sum(is_equal(result, "elastic") for result in elastic),
        "largest_elastic_difference": max(differences, default=None),
        "num_kills": len(kills),
        "kills_by_target": {name: sum(kill["target"] == name for kill in hits) for name in TARGETS},
        "kills_by_phase": {name: sum(kill["phase"] == name for kill in kills) for name in PHASES},
        "lost_s": spread(kill["lost_s"] for kill in hits),
        "lost_after_start_up_s": spread(kill["lost_s"] for kill in hits if kill["phase"] != "start-up"),
        "until_nothing_is_left_s": spread(kill["ended_s"] for kill in hits),
        "resume_to_first_step_s": spread(seconds for result in results for seconds in result["resumes_s"]),
        "elapsed_s": sum(result["elapsed_s"] for result in results),
    }


def is_equal(result: Mapping[str, Any], *checks: str) -> bool:
    """Whether a run reached its end, with every step once and the numbers that it should have."""
    needed = {*checks, "steps", "progress", "checkpoint", "exit", "processes", "unreadable"}
    return not needed & result["problems"].keys()


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    values = list(seconds)
    return {"median": statistics.median(values), "max": max(values)} if values else None


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people."""

    def counts(key: str) -> str:
        return ", ".join(f"{name} {number}" for name, number in summary[key].items())

    def seconds(key: str) -> str:
        value = summary[key]
        return "-" if value is None else f"{value['median']:.1f} median, {value['max']:.1f} at most"

    difference = summary["largest_elastic_difference"]
    furthest = "" if difference is None else f", {difference:.1e} at most"
    rows = {
        "runs that passed every check": f"{summary['passed']} of {summary['num_runs']}",
        "survived": f"{summary['survived']} of {summary['num_runs']}",
        "bitwise equal": f"{summary['bitwise_equal']} of {summary['bitwise_runs']}",
        f"elastic within {ELASTIC_TOLERANCE:g}": (
            f"{summary['elastic_within_tolerance']} of {summary['elastic_runs']}{furthest}"
        ),
        "kills": f"{summary['num_kills']} ({counts('kills_by_target')})",
        "kills by phase": counts("kills_by_phase"),
        "seconds lost per kill": seconds("lost_s"),
        "  after start-up": seconds("lost_after_start_up_s"),
        "seconds until all had ended": seconds("until_nothing_is_left_s"),
        "seconds to resume": seconds("resume_to_first_step_s"),
    }
    return "\n".join(f"{name:<30}{text}" for name, text in rows.items())


def line(result: Mapping[str, Any]) -> str:
    """A run in one line, and one for each check it failed."""
    kills = ", ".join(f"{kill['target']} in {kill['phase']}" for kill in result["kills"])
    layouts = dict.fromkeys(result["layouts"]) if not result["is_elastic"] else result["layouts"]
    passed = "elastic within tolerance" if result["is_elastic"] else "bitwise equal"
    text = f"run {result['number']}  {' > '.join(layouts)}  killed {kills or '-'}  "
    text += f"{'FAILED' if result['problems'] else passed}  {result['elapsed_s']:.0f} s"
    for check, what in result["problems"].items():
        text += f"\n    {check}: {what}"
    return text + (f"\n    kept in {result['folder']}" if result["problems"] else "")


class Results:
    """`results.jsonl` and `summary.json` of a folder; both are replaced as a whole."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        path = folder / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_number = {result["number"]: result for result in map(json.loads, lines)}
        seeds = {result["seed"] for result in self.by_number.values()} - {seed}
        if seeds:
            right = f"{folder} holds runs of seed {min(seeds)}; name another folder"
            raise option_error("--seed", seed, right)

    def add(self, result: Mapping[str, Any]) -> None:
        self.by_number[result["number"]] = {**result, "seed": self.seed}
        lines = (json.dumps(each) + "\n" for each in self.by_number.values())
        write_file(self.folder / "results.jsonl", "".join(lines).encode())

    def write_summary(self, numbers: Iterable[int]) -> dict[str, Any]:
        summary = summarize([self.by_number[number] for number in numbers])
        where = {
            "command": sys.argv,
            "seed": self.seed,
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": provenance.git_commit(),
        }
        write_file(self.folder / "summary.json", json.dumps({**where, **summary}, indent=2).encode())
        return summary


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ScriptParser(__doc__, options=())
    parser.epilog = None
    parser.add_argument("--num_runs", type=count, default=10, help="runs, numbered from 0 (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans (default: 0)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/chaos"), help="default: outputs/chaos")
    parser.add_argument("--jobs", type=count, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that passed")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"{rest[0]} belongs to no option of this script")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    folder = args.folder.resolve()
    results = Results(folder, seed=args.seed)
    if sys.platform != "linux":
        raise option_error("--folder", str(folder), "processes are found through /proc, which only Linux has")
    plans = [plan_of(args.seed, number) for number in range(args.num_runs)]
    todo = [plan for plan in plans if plan.number not in results.by_number]
    layouts = {layout for plan in todo for layout in (*plan.layouts, plan.reference)}
    paces = {layout: make_reference(folder, layout) for layout in LAYOUTS if layout in layouts}
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(execute, plan, folder, paces, keep=args.keep) for plan in todo]
        try:
            for future in as_completed(futures):
                results.add(future.result())
                print(line(future.result()), flush=True)
        except BaseException:
            _stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    summary = results.write_summary(plan.number for plan in plans)
    print(f"\n{table(summary)}\n\n{folder / 'results.jsonl'}")
    failed = [str(plan.number) for plan in plans if results.by_number[plan.number]["problems"]]
    if failed:
        print(f"error: run {', '.join(failed)} failed: see above, and the folders named there", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
