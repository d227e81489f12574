# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`training.batch_size = "auto"`: the largest batch per rank that fits, or the fastest of those tried.

Notable:
- a trial is a run of a few steps in separate processes. No cache, memory fragment or compiled graph carries over to the
  next trial, so each trial measures a real run of that batch;
- a batch fits if every rank completed, no allocator had to retry, and the memory margin stayed free on every device.
  After any other error the search stops and reports it;
- the search is the planner's (extras/planner/batch_size.py) and starts from its estimate;
- every trial is stored in `autotune.json` of the dump folder, under everything that determines its outcome. A grid or
  train.py reuses stored trials, and a killed search continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchditan.config.loader import to_toml
from torchditan.config.options import Config, flatten
from torchditan.errors import ConfigError, option_error
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import BATCH_SIZE, FORCED, OFF, RUNNER_SETS, SEED
from torchditan.extras.ablation.launch import TRAIN, Job, Outcome, Tick, execute
from torchditan.extras.ablation.ledger import measure
from torchditan.extras.planner.batch_size import allowed_batch_sizes, largest_that_fits
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from torchditan.distributed.process_group import Rank

STORE_NAME, TRIALS_FOLDER = "autotune.json", "autotune"
TRIAL_STEPS = 6
MEMORY_MARGIN = 0.05
"""Share of the memory that stays free."""
_LARGEST = 4096
"""Batch size per rank."""
_SCHEMA_VERSION = 1
_TRIAL_TIMEOUT_S = 1800.0
_AS_FAST = 0.98
_UNRELATED = {*RUNNER_SETS, "lr_scheduler", "comm", "cache", SEED, BATCH_SIZE}
"""Sections and options that do not change the outcome of a trial, or that every trial sets."""


class TrialFailed(RuntimeError):
    """A trial failed for a reason unrelated to its batch size."""


class NothingFits(ConfigError):
    """Even the smallest batch size does not fit."""


@dataclass(frozen=True)
class Trial:
    """Result of one batch size."""

    batch_size: int
    status: str
    """completed or oom."""
    images_per_second: float | None
    peak_memory_share: float | None
    """Peak memory share of the device that came closest to its limit."""
    alloc_retries: int
    """Maximum over ranks. After a retry of the allocator, timings do not represent the batch size."""

    @property
    def fits(self) -> bool:
        is_free = self.peak_memory_share is None or self.peak_memory_share <= 1 - MEMORY_MARGIN
        return self.status == "completed" and self.alloc_retries == 0 and is_free

    def __str__(self) -> str:
        if self.status != "completed":
            return f"batch {self.batch_size}: out of memory"
        share = "" if self.peak_memory_share is None else f", {100 * self.peak_memory_share:.1f}% of the memory"
        retries = f", {self.alloc_retries} allocator retries" if self.alloc_retries else ""
        return f"batch {self.batch_size}: {self.images_per_second or 0:.1f} images/s{share}{retries}"


def search(
    run_trial: Callable[[int], Trial], *, candidates: Sequence[int], goal: str, guess: int | None
) -> Trial | None:
    """The trial of the best of the ascending `candidates`; None if none fits. `guess` is the planner's estimate.

    The goal is largest, or fastest: that also tries halves of the largest as long as they are about as fast.
    """
    trials: dict[int, Trial] = {}

    def trial_of(batch_size: int) -> Trial:
        if batch_size not in trials:
            trials[batch_size] = run_trial(batch_size)
        return trials[batch_size]

    largest = largest_that_fits(lambda size: trial_of(size).fits, candidates, guess=guess)
    if largest is None:
        return None
    best = trial_of(largest)
    if goal == "largest":
        return best
    size = largest
    while size > candidates[0]:
        size = max([candidates[0], *(candidate for candidate in candidates if candidate <= size / 2)])
        smaller = trial_of(size)
        if not smaller.fits or _speed(smaller) < _AS_FAST * _speed(best):
            break
        best = max(best, smaller, key=_speed)
    return max((trial for trial in trials.values() if trial.fits), key=_speed)


def _speed(trial: Trial) -> float:
    return trial.images_per_second or 0.0


def candidate_batches(config: Config, *, num_devices: int) -> Sequence[int]:
    """Allowed batch sizes, ascending; ConfigError if there is none."""
    multiple = config.autotune.batch_size_multiple
    found = allowed_batch_sizes(config, num_devices=num_devices, multiple=multiple, largest=_LARGEST)
    if not found:
        right = f"no batch size divides the share of {num_devices} rank(s); must be a multiple of the number of ranks"
        raise option_error("training.global_batch_size", config.training.global_batch_size, right)
    return found


class TrialStore:
    """Trials of one question in `autotune.json`. Many questions and processes share the file."""

    def __init__(self, path: Path, question: dict[str, Any]) -> None:
        self.path = path
        self.question = question
        self.key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]

    def trials(self) -> dict[int, Trial]:
        stored = self._read()["questions"].get(self.key, {"trials": []})["trials"]
        return {trial["batch_size"]: Trial(**trial) for trial in stored}

    def add(self, trial: Trial) -> None:
        """Store a trial. Other processes may write at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self._read()
            entry = content["questions"].setdefault(self.key, {"question": self.question, "trials": []})
            others = [stored for stored in entry["trials"] if stored["batch_size"] != trial.batch_size]
            entry["trials"] = sorted([*others, asdict(trial)], key=lambda stored: stored["batch_size"])
            write_file(self.path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"schema_version": _SCHEMA_VERSION, "questions": {}}
        with suppress(ValueError, TypeError, KeyError):
            content: dict[str, Any] = json.loads(self.path.read_bytes())
            if content["schema_version"] == _SCHEMA_VERSION:
                return content
        raise ConfigError(f"{self.path} is not a trial store of this version; move it away to repeat the trials")


def question_of(config: Config, *, device: Device, num_devices: int) -> dict[str, Any]:
    """Everything that determines the outcome of a trial, except its batch size."""
    values = flatten(_trial_config(config))
    chosen = {name: values[name] for name in values if not {name, name.split(".")[0]} & _UNRELATED}
    chosen["autotune.memory_limit_gib"] = config.autotune.memory_limit_gib
    chosen["training.data_parallel_shard_degree"] = num_devices // config.training.data_parallel_replicate_degree
    machine = {"device": device.name, "memory_gib": round(device.memory_gib, 2), "num_devices": num_devices}
    return {**chosen, **machine, **provenance.versions("torchditan", "torch")}


def find_batch_size(
    config: Config,
    *,
    device: Device,
    num_devices: int,
    folder: Path,
    store: Path,
    program: tuple[str, ...] = TRAIN,
    timeout_s: float = _TRIAL_TIMEOUT_S,
    on_tick: Tick | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> int:
    """Find the batch size for a `config` with "auto" on this machine.

    Trials run in `<folder>/<experiment_name>_bs16` and so on. `on_trial` is called after each new one.

    Raises:
        NothingFits: even the smallest batch does not fit.
        ConfigError: no batch size is allowed.
        TrialFailed: a trial ended in an error or ran into the time limit.
    """
    known_trials = TrialStore(store, question_of(config, device=device, num_devices=num_devices))
    known = known_trials.trials()
    candidates = candidate_batches(config, num_devices=num_devices)

    def run_trial(batch_size: int) -> Trial:
        if batch_size in known:
            return known[batch_size]
        path = folder / f"{config.metrics.experiment_name}_bs{batch_size}"
        shutil.rmtree(path, ignore_errors=True)  # of an earlier attempt
        own = {"job.dump_folder": str(folder), "metrics.experiment_name": path.name, BATCH_SIZE: batch_size}
        file = path / "trial.toml"
        write_file(file, to_toml(_trial_config(config).replace(own)).encode())
        job = Job(
            program=(*program, f"--job.config_file={file}"),
            folder=path,
            num_ranks=num_devices,
            timeout_s=timeout_s,
            memory_limit_gib=config.autotune.memory_limit_gib,
        )
        trial = _judge_trial(job, batch_size, execute(job, on_tick=on_tick), config=config, device=device)
        known_trials.add(trial)
        if on_trial is not None:
            on_trial(trial)
        return trial

    answer = search(
        run_trial,
        candidates=candidates,
        goal=config.autotune.goal,
        guess=_planned(config, device=device, num_devices=num_devices),
    )
    if answer is None:
        right = f"even {candidates[0]} does not fit on {device.name}; checkpoint activations or shard over more devices"
        raise NothingFits(str(option_error("training.batch_size", "auto", right)))
    return answer.batch_size


def _trial_config(config: Config) -> Config:
    """A few steps of the job that write nothing else, on random samples of the same shape: the same memory."""
    values = {**OFF, **FORCED, "job.config_file": None, "training.steps": TRIAL_STEPS}
    is_known = None not in (config.dataset.image_size, config.dataset.num_classes, config.model.input_channels)
    if not is_known or config.autoencoder.online:  # the channels of images to encode come from the dataset
        return config.replace(values)
    samples: dict[str, Any] = {"dataset_name": "dummy", "root_dir": None, "hub_name": None, "streaming": False}
    samples |= {"horizontal_flip": None, "fingerprint": None}
    if config.model.sample_size is not None:  # for encoded captioned images, image_size is in pixels
        *frames, height, width = config.model.sample_size
        samples |= {"image_size": [height, width], "num_frames": frames[0] if frames else None}
    return config.replace({**values, **{f"dataset.{key}": value for key, value in samples.items()}})


def _judge_trial(job: Job, batch_size: int, outcome: Outcome, *, config: Config, device: Device) -> Trial:
    if outcome.status not in ("completed", "oom"):
        reason = f"{outcome.status}: {outcome.reason}"
        raise TrialFailed(f"the trial of batch size {batch_size} failed, but not for memory ({job.folder}): {reason}")
    num_devices = job.num_ranks or 1
    host_share = config.autotune.memory_limit_gib or device.memory_gib / num_devices
    shares = [
        rank["peak_memory_gib"] / rank.get("capacity_gib", host_share)
        for rank in outcome.ranks
        if rank.get("peak_memory_gib") is not None
    ]
    measured = measure(read_metrics(job.folder), window=TRIAL_STEPS // 2, num_devices=num_devices)
    return Trial(
        batch_size=batch_size,
        status=outcome.status,
        images_per_second=measured.get("images_per_second_mean"),
        peak_memory_share=max(shares, default=None),
        alloc_retries=max((rank.get("alloc_retries", 0) for rank in outcome.ranks), default=0),
    )


def _planned(config: Config, *, device: Device, num_devices: int) -> int | None:
    """The planner's estimate of the largest batch; None if the device is unknown to the planner."""
    from torchditan.extras.planner.plan import largest_batch

    try:
        return largest_batch(config, device=device.name, num_devices=num_devices) or None
    except ConfigError:
        return None


def resolve_batch_size(config: Config, rank: Rank) -> int:
    """Resolve "auto" to a batch size, the same on every rank. All ranks must call it before they use device memory.

    Rank 0 searches with trials that have as many ranks as the job, on the same devices. The other ranks wait.
    """
    if rank.world_size == 1:
        return _search_for_job(config, num_devices=1)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != rank.world_size:
        right = "works only on one machine and under torchrun, unlike this job; must be an integer"
        raise option_error("training.batch_size", "auto", right)

    from torch.distributed import TCPStore

    # The store of torchrun: a process group would take memory on the devices of the trials.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(days=7))
    key = f"torchditan/autotune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if rank.rank == 0:
        try:
            found: dict[str, Any] = {"batch_size": _search_for_job(config, num_devices=rank.world_size)}
        except (ConfigError, TrialFailed) as error:
            found = {"is_mistake": isinstance(error, ConfigError), "reason": str(error)}
        store.set(key, json.dumps(found))
    answer = json.loads(store.get(key))
    if "batch_size" in answer:
        return int(answer["batch_size"])
    raise (ConfigError if answer["is_mistake"] else TrialFailed)(answer["reason"])


def _search_for_job(config: Config, *, num_devices: int) -> int:
    dump_folder = Path(config.job.dump_folder)
    found = find_batch_size(
        config,
        device=Device.here(),
        num_devices=num_devices,
        folder=dump_folder / TRIALS_FOLDER,
        store=dump_folder / STORE_NAME,
        on_trial=lambda trial: print(f"autotune: {trial}", flush=True),
    )
    print(f"autotune: training.batch_size = {found}", flush=True)
    return found
