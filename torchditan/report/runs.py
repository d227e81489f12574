# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads run directories: the values that a page of runs shows, and the settings in which runs differ.

Notable:
- All data comes from the files of the run directories. Missing data is None, never 0.
- Reading needs neither torch nor pandas.
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

from torchditan.ablation.ledger import CSV_NAME
from torchditan.ablation.maker import RUNS_FOLDER
from torchditan.config.errors import option_error
from torchditan.report.grid_results import distinct_names, parallel_mode
from torchditan.run.reading import count_metrics_lines, read_config, read_metrics, read_status

# A path cannot show whether moved weights are the same weights.
_PATHS = ("model.path", "checkpoint.initial_load_path", "text_encoder.path", "lora.assistant_path")
_NAMES_AND_PLACES = ("job", "profiling", "comm", "cache", "metrics")
_EVENTS = ("metrics.enable_sampling", "metrics.sample_freq")  # drawing samples takes time
_PLACES = ("dataset.root_dir", "autoencoder.path", "checkpoint.folder")
_JOB, _PATH, _DRAWING, _RUNNING = _KINDS = ("training", "a path; contents may be equal", "sampling", "execution")
_STATES = {"oom": "out of memory", "running": "running, or killed", "error": "failed"}


@dataclass(frozen=True)
class Run:
    """One run directory.

    `content` is its config.json, `status` its status.json (empty without that file), `records` its metrics by
    ascending step, and `pictures` its sample grids by step. Unreadable lines of metrics.jsonl are counted.
    """

    label: str
    path: Path
    content: dict[str, Any]
    status: dict[str, Any]
    records: list[dict[str, Any]]
    pictures: dict[int, Path]
    num_unreadable_lines: int = 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """The resolved configuration by full option names."""
        sections = self.content["config"].items()
        return {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}

    @property
    def trajectory(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content.get("trajectory", {})
        return found

    @property
    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content.get("hardware", {})
        return found

    @property
    def world_size(self) -> int | None:
        return _integer(self.machine.get("device_count"))

    @property
    def is_cpu(self) -> bool:
        return self.machine.get("device") == "cpu"

    @property
    def hardware(self) -> str:
        """`4 x NVIDIA A40`; on a CPU the number of processes."""
        size = self.world_size
        if self.is_cpu:
            return f"CPU, {size or '?'} {'process' if size == 1 else 'processes'}"
        name = self.machine.get("device_name") or "unknown device"
        return name if size in (None, 1) else f"{size} x {name}"

    @property
    def parallel_mode(self) -> str | None:
        replicate = _integer(self.options.get("training.data_parallel_replicate_degree"))
        shard = self.options.get("training.data_parallel_shard_degree")
        if not (self.world_size and replicate and shard):
            return None
        mode = parallel_mode(f"{replicate},{self.world_size // replicate}")
        context = _integer(self.options.get("training.context_parallel_degree")) or 1
        tokens = f", context parallelism over {context}" if context > 1 else ""
        return "one process" if mode == "one device" else f"{mode}{tokens}"

    @property
    def global_batch_size(self) -> int | None:
        return self.options.get("training.global_batch_size")

    @property
    def precision(self) -> str | None:
        precision = self.options.get("training.mixed_precision_param")
        return f"{precision}, float8" if precision and self.options.get("float8.enable_float8_linear") else precision

    @property
    def planned_steps(self) -> int | None:
        return _integer(self.options.get("training.steps"))

    @property
    def steps(self) -> int | None:
        return self.records[-1]["step"] if self.records else None

    @property
    def steps_text(self) -> str:
        """`100`, or `15 of 100` if the run has not done all."""
        if self.steps is None:
            return "none"
        planned = "?" if self.planned_steps is None else f"{self.planned_steps:,}"
        return f"{self.steps:,}" if self.steps == self.planned_steps else f"{self.steps:,} of {planned}"

    @property
    def state(self) -> str:
        return str(self.status.get("state") or "unknown")

    @property
    def state_name(self) -> str:
        return _STATES.get(self.state, self.state)

    @property
    def state_text(self) -> str:
        return self.state_name + (", resumed" if self.was_resumed else "")

    @property
    def was_resumed(self) -> bool:
        """Whether the run was started more than once. config.json has the hardware of the last start."""
        return self.content.get("created") != self.content.get("started")

    @cached_property
    def elapsed_s(self) -> float | None:
        return self.last("elapsed_s")

    @property
    def loss(self) -> float | None:
        return self.last("loss")

    @property
    def validation_loss(self) -> float | None:
        return self.last("validation_loss")

    @cached_property
    def steps_per_second(self) -> float | None:
        """Median over the steps after the first line, whose steps warm up; None if only that line exists."""
        seconds = self._median_over_steps("step_time_s")
        return 1 / seconds if seconds else None

    @cached_property
    def images_per_second(self) -> float | None:
        return self._median_over_steps("images_per_second")

    @property
    def peak_memory_gib(self) -> float | None:
        return max((value for _, value in self.curve("peak_memory_gib")), default=None)

    @property
    def seconds_per_image(self) -> float | None:
        known = [value for _, value in self.curve("seconds_per_image")]
        return statistics.median(known) if known else None

    @cached_property
    def scored_against(self) -> str | None:
        """Reference of PSNR and SSIM: held-out `images`, samples of the `original` model, or None."""
        keys = {key for record in self.records for key in record}
        if "psnr" in keys:
            return "images"
        return "original" if "psnr_to_original" in keys else None

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line that has the key."""
        known = ((record["step"], _number(record, key)) for record in self.records)
        return [(step, value) for step, value in known if value is not None]

    def scores(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of `psnr` or `ssim` of the samples."""
        return self.curve(f"{key}_to_original" if self.scored_against == "original" else key)

    def last(self, key: str) -> float | None:
        known = self.curve(key)
        return known[-1][1] if known else None

    def reached_at(self, step: int) -> float | None:
        """Seconds until the weights of a step were reached: the time of the first line at or after the step."""
        if step == 0:
            return 0.0
        index = bisect_left(self._clock, step, key=lambda line: line[0])
        return self._clock[index][1] if index < len(self._clock) else None

    @cached_property
    def _clock(self) -> list[tuple[int, float]]:
        return self.curve("elapsed_s")

    def _median_over_steps(self, key: str) -> float | None:
        """Median over steps. Each step counts once, with the mean of its logging window."""
        windows = [
            (value, record["step"] - before["step"])
            for before, record in pairwise(self.records)
            if (value := _number(record, key)) is not None
        ]
        if not windows:
            return None
        values, counts = zip(*sorted(windows), strict=True)
        ends = list(accumulate(counts))
        middle = (values[bisect_right(ends, index)] for index in ((ends[-1] - 1) // 2, ends[-1] // 2))
        return statistics.mean(middle)


@dataclass(frozen=True)
class Setting:
    """An option that differs between runs. `kind` is what it decides: one of `_KINDS`."""

    name: str
    kind: str
    values: list[Any]

    @property
    def is_of_job(self) -> bool:
        """Whether it decides what is learned. Runs that differ in no such setting are one job."""
        return self.kind == _JOB


def read_runs(folders: Sequence[Path], labels: Sequence[str] | None, *, option: str) -> list[Run]:
    """Read run directories and name them. `option` is what the user named them with, for messages.

    Raises:
        ConfigError: a duplicate run, a folder that is not a run, or wrong labels.
    """
    twice = _repeated(folder.resolve() for folder in folders)
    if twice is not None:
        raise option_error(option, str(twice), "is named twice; name each run once")
    names = distinct_names(list(folders)) if labels is None else list(labels)
    if len(names) != len(folders):
        raise option_error("--labels", " ".join(names), f"must be {len(folders)} names, one for each run")
    if (same := _repeated(names)) is not None:
        raise option_error("--labels", same, "is the name of two runs; each needs its own")
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    for first, second in combinations(runs, 2):
        keys = ("run_id", "started")
        if all(first.content.get(key) and first.content.get(key) == second.content.get(key) for key in keys):
            raise option_error(option, str(second.path), f"is a copy of {first.path}; name each run once")
    return runs


def runs_in(folder: Path) -> list[Path]:
    """The run directories of a grid in the order of its ledger, or `folder` itself."""
    if not (folder / "grid.json").exists():
        return [folder]
    ledger = (folder / CSV_NAME).read_text(encoding="utf-8-sig") if (folder / CSV_NAME).exists() else ""
    runs = [folder / RUNS_FOLDER / row["run_name"] for row in csv.DictReader(io.StringIO(ledger))]
    return [run for run in runs if (run / "config.json").exists()]


def differing_settings(runs: Sequence[Run]) -> list[Setting]:
    """Settings of the job first, then of paths, drawing and running. Names and folders of the runs are left out."""
    jobs = {name for run in runs for name in run.trajectory}
    trees = [run.options | run.trajectory for run in runs]
    found = []
    for name in dict.fromkeys(name for tree in trees for name in tree):
        values = [tree.get(name, "absent") for tree in trees]
        kind = _kind(name, is_job=name in jobs)
        if kind is not None and any(value != values[0] for value in values):
            found.append(Setting(name, kind, values))
    return sorted(found, key=lambda setting: _KINDS.index(setting.kind))


def _kind(name: str, *, is_job: bool) -> str | None:
    if name in _PATHS:
        return _PATH
    if is_job:
        return _JOB
    section = name.split(".")[0]
    if name in _PLACES or (section in _NAMES_AND_PLACES and name not in _EVENTS):
        return None
    return _DRAWING if section == "sampling" else _RUNNING


def _repeated(values: Iterable[Any]) -> Any | None:
    seen = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def read_run(folder: Path, label: str) -> Run:
    """Read a run directory. ConfigError if its config.json is not that of a run; other damaged files are empty."""
    content = read_config(folder)
    content |= {key: {} for key in ("hardware", "trajectory", "versions") if not isinstance(content.get(key), dict)}
    known = [line for line in read_metrics(folder) if line["step"] >= 0]
    by_step = {record["step"]: record for record in known}
    pictures = {
        int(digits): path
        for path in (folder / "samples").glob("step_*.png")
        if (digits := path.stem.removeprefix("step_")).isdecimal()
    }
    records = [by_step[step] for step in sorted(by_step)]
    return Run(
        label,
        folder,
        content,
        read_status(folder) or {},
        records,
        pictures,
        num_unreadable_lines=count_metrics_lines(folder) - len(known),
    )


def _number(record: dict[str, Any], key: str) -> float | None:
    """A finite number from a line, or None."""
    value = record.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if abs(value) <= sys.float_info.max else None


def _integer(value: Any) -> int | None:
    """A number that is not negative and has at most 63 bits, or None: files can be damaged."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and 0 <= value < 2**63 else None
