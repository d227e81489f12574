# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Compares runs, usually one job on different hardware: training time, speed, loss, PSNR and SSIM.

Notable:
- All data comes from the files of the run directories. Missing data is None, never 0.
- Runs are the same job if their trajectory options agree. Only then are their curves expected to agree.
- A sampling belongs to the step of its weights, and to the time at which that step was logged.
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
from torchditan.report.labels import as_utf8
from torchditan.run.reading import count_metrics_lines, read_config, read_metrics, read_status

SAME_CURVE = 1e-3
"""Relative difference of losses up to which two curves of one job count as equal."""
# A path cannot show whether moved weights are the same weights.
_PATHS = ("model.path", "checkpoint.initial_load_path", "text_encoder.path", "lora.assistant_path")
_NAMES_AND_PLACES = ("job", "profiling", "comm", "cache", "metrics")
_EVENTS = ("metrics.enable_sampling", "metrics.sample_freq")  # drawing samples takes time
_PLACES = ("dataset.root_dir", "autoencoder.path", "checkpoint.folder")
_KINDS = ("job", "path", "drawing", "running")
_SCORES = ("psnr", "ssim", "seconds_per_image")
_TO_ORIGINAL = "_to_original"  # suffix of scores against samples of the original model


@dataclass(frozen=True)
class Sampling:
    """Samples drawn with the weights of a step. `elapsed_s` is None if no later line was logged."""

    step: int
    elapsed_s: float | None
    psnr: float | None = None
    ssim: float | None = None
    seconds_per_image: float | None = None
    picture: Path | None = None

    @property
    def is_scored(self) -> bool:
        return self.psnr is not None or self.ssim is not None


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
    def state(self) -> str:
        return str(self.status.get("state") or "unknown")

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
        return "original" if f"psnr{_TO_ORIGINAL}" in keys else None

    @cached_property
    def samplings(self) -> list[Sampling]:
        """Samplings with scores or a picture, by step."""
        end = _TO_ORIGINAL if self.scored_against == "original" else ""
        names = {name: name if name == "seconds_per_image" else f"{name}{end}" for name in _SCORES}
        lines = {record["step"]: {name: _number(record, key) for name, key in names.items()} for record in self.records}
        scored = {step for step, values in lines.items() if any(value is not None for value in values.values())}
        return [
            Sampling(step, self.reached_at(step), **lines.get(step, {}), picture=self.pictures.get(step))
            for step in sorted(scored | self.pictures.keys())
        ]

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line that has the key."""
        known = ((record["step"], _number(record, key)) for record in self.records)
        return [(step, value) for step, value in known if value is not None]

    def scores(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of `psnr` or `ssim` of the samples, or of a loss."""
        if key not in _SCORES:
            return self.curve(key)
        known = ((sampling.step, getattr(sampling, key)) for sampling in self.samplings)
        return [(step, value) for step, value in known if value is not None]

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
    """An option that differs between runs. `kind`: `job`, `path`, `drawing` (of samples) or `running`."""

    name: str
    kind: str
    values: list[Any]


@dataclass(frozen=True)
class CurvePair:
    """Losses of two runs of one job at the steps that both logged."""

    first: Run
    second: Run
    num_steps: int
    difference: float | None  # the largest, relative to the larger loss
    step: int | None  # step of the largest difference
    parted_at: int | None  # the first step at which they differ by more than SAME_CURVE


@dataclass(frozen=True)
class Standing:
    """State of a run at a time or a step. `sampling` is the last scored sampling by then."""

    step: int | None = None
    elapsed_s: float | None = None
    loss: float | None = None
    validation_loss: float | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Comparison:
    """All comparisons of the runs.

    `equal_time_s` is the largest time that all runs reached. `equal_step` is the largest step at which all runs drew
    scored samples (without scores: pictures; without pictures: that all logged). `picture_step` is the largest step at
    which all drew pictures. Runs without any such data are ignored. Values are None if no such time or step exists.
    """

    runs: list[Run]
    settings: list[Setting]
    curves: list[CurvePair]
    equal_time_s: float | None
    equal_step: int | None
    picture_step: int | None

    @cached_property
    def common_step(self) -> int | None:
        """The last step that all runs reached; runs without a logged line are ignored."""
        return min((run.steps for run in self.runs if run.steps is not None), default=None)

    def training_time(self, run: Run) -> float | None:
        """Seconds that a run took for the steps that all runs reached, with sampling, validation and checkpoints."""
        return None if self.common_step is None else run.reached_at(self.common_step)

    def time_ratio(self, run: Run) -> float | None:
        """Training time of the slowest run, divided by that of this run."""
        own = self.training_time(run)
        known = [time for time in map(self.training_time, self.runs) if time]
        return max(known) / own if own and len(known) > 1 else None

    @property
    def scored_against(self) -> set[str]:
        """The kinds of references of the scores of these runs. Scores of different kinds are not comparable."""
        return {run.scored_against for run in self.runs if run.scored_against is not None}

    @property
    def slowest(self) -> float | None:
        return min((run.images_per_second for run in self.runs if run.images_per_second), default=None)

    def speed_up(self, run: Run) -> float | None:
        """Images/s relative to the slowest run."""
        return run.images_per_second / self.slowest if run.images_per_second and self.slowest else None

    def at_equal_time(self, run: Run) -> Standing:
        limit = self.equal_time_s
        if limit is None:
            return Standing()
        records = [record for record in run.records if _is_by(_number(record, "elapsed_s"), limit)]
        samplings = [sampling for sampling in run.samplings if sampling.is_scored and _is_by(sampling.elapsed_s, limit)]
        return Standing(
            step=records[-1]["step"] if records else None,
            elapsed_s=_number(records[-1], "elapsed_s") if records else None,
            loss=_last_number(records, "loss"),
            validation_loss=_last_number(records, "validation_loss"),
            sampling=samplings[-1] if samplings else None,
        )

    def at_equal_step(self, run: Run) -> Standing:
        step = self.equal_step
        if step is None:
            return Standing()
        records = [record for record in run.records if record["step"] == step]
        return Standing(
            step=step,
            elapsed_s=run.reached_at(step),
            loss=_last_number(records, "loss"),
            validation_loss=_last_number(records, "validation_loss"),
            sampling=next((found for found in run.samplings if found.step == step and found.is_scored), None),
        )

    def picture_at_equal_time(self, run: Run) -> Sampling | None:
        limit = self.equal_time_s
        drawn = [sampling for sampling in run.samplings if sampling.picture is not None]
        known = [sampling for sampling in drawn if limit is not None and _is_by(sampling.elapsed_s, limit)]
        return known[-1] if known else None

    def picture_at_equal_step(self, run: Run) -> Sampling | None:
        return next((found for found in run.samplings if found.picture and found.step == self.picture_step), None)


def compare(folders: Sequence[Path], labels: Sequence[str] | None = None) -> Comparison:
    """Read run directories and compare them.

    Args:
        folders: run directories, or grids, whose runs are compared.
        labels: a name for each run. None: the folder names.

    Raises:
        ConfigError: fewer than two runs, a duplicate run, a folder that is not a run, or wrong labels.
    """
    runs = _read_runs(folders, labels)
    scored = _last_common([found.step for found in run.samplings if found.is_scored] for run in runs)
    pictured = _last_common(run.pictures for run in runs)
    logged = _last_common([record["step"] for record in run.records] for run in runs)
    has_scores = any(found.is_scored for run in runs for found in run.samplings)
    has_pictures = any(run.pictures for run in runs)
    return Comparison(
        runs=runs,
        settings=differing_settings(runs),
        curves=[_compare_curves(first, second) for first, second in combinations(runs, 2) if _are_one(first, second)],
        equal_time_s=min((run.elapsed_s for run in runs if run.elapsed_s is not None), default=None),
        equal_step=scored if has_scores else pictured if has_pictures else logged,
        picture_step=pictured,
    )


def _read_runs(folders: Sequence[Path], labels: Sequence[str] | None) -> list[Run]:
    folders = [run for folder in folders for run in _runs_in(folder)]
    if len(folders) < 2:
        shown = " ".join(map(str, folders))
        raise option_error("--compare", shown, "is a single run; must be two or more run directories")
    return read_runs(folders, labels, option="--compare")


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


def _runs_in(folder: Path) -> list[Path]:
    """The run directories of a grid in the order of its ledger, or `folder` itself."""
    if not (folder / "grid.json").exists():
        return [folder]
    ledger = (folder / CSV_NAME).read_text(encoding="utf-8-sig") if (folder / CSV_NAME).exists() else ""
    runs = [folder / RUNS_FOLDER / row["run_name"] for row in csv.DictReader(io.StringIO(ledger))]
    return [run for run in runs if (run / "config.json").exists()]


def differing_settings(runs: list[Run]) -> list[Setting]:
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
        return "path"
    if is_job:
        return "job"
    section = name.split(".")[0]
    if name in _PLACES or (section in _NAMES_AND_PLACES and name not in _EVENTS):
        return None
    return "drawing" if section == "sampling" else "running"


def _are_one(first: Run, second: Run) -> bool:
    """Whether two runs are the same job."""
    return not any(setting.kind == "job" for setting in differing_settings([first, second]))


def _compare_curves(first: Run, second: Run) -> CurvePair:
    there = dict(second.curve("loss"))
    common = [(step, loss, there[step]) for step, loss in first.curve("loss") if step in there]
    relative = [(abs(a - b) / (max(abs(a), abs(b)) or 1.0), step) for step, a, b in common]
    difference, step = max(relative, key=lambda pair: pair[0], default=(None, None))
    parted_at = next((step for value, step in relative if value > SAME_CURVE), None)
    return CurvePair(first, second, len(common), difference, step, parted_at)


def _last_common(steps: Iterable[Iterable[int]]) -> int | None:
    """The largest step that all non-empty sets contain."""
    known = [found for found in map(set, steps) if found]
    return max(set.intersection(*known), default=None) if known else None


def _repeated(values: Iterable[Any]) -> Any | None:
    seen = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def comparison_csv(comparison: Comparison) -> bytes:
    """compare.csv: one row per run with unrounded numbers; fields without a measurement are empty."""
    file = io.StringIO()
    rows = [_csv_row(comparison, run) for run in comparison.runs]
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return as_utf8(file.getvalue())


def _csv_row(comparison: Comparison, run: Run) -> dict[str, Any]:
    versions = run.content.get("versions", {})
    row = {
        "label": run.label,
        "path": str(run.path),
        "hardware": run.hardware,
        "world_size": run.world_size,
        "parallel_mode": run.parallel_mode,
        "global_batch_size": run.global_batch_size,
        "precision": run.precision,
        "steps": run.steps,
        "planned_steps": run.planned_steps,
        "elapsed_s": run.elapsed_s,
        "steps_per_second": run.steps_per_second,
        "images_per_second": run.images_per_second,
        "speed_up": comparison.speed_up(run),
        "seconds_per_image": run.seconds_per_image,
        "peak_memory_gib": run.peak_memory_gib,
        "loss": run.loss,
        "validation_loss": run.validation_loss,
        "state": run.state,
        "equal_time_s": comparison.equal_time_s,
        "equal_step": comparison.equal_step,
    }
    for name, standing in (("time", comparison.at_equal_time(run)), ("step", comparison.at_equal_step(run))):
        sampling = standing.sampling
        row |= {
            f"step_at_equal_{name}": standing.step,
            f"elapsed_s_at_equal_{name}": standing.elapsed_s,
            f"loss_at_equal_{name}": standing.loss,
            f"validation_loss_at_equal_{name}": standing.validation_loss,
            f"sampled_step_at_equal_{name}": sampling.step if sampling else None,
            f"psnr_at_equal_{name}": sampling.psnr if sampling else None,
            f"ssim_at_equal_{name}": sampling.ssim if sampling else None,
        }
    return row | {
        "scored_against": run.scored_against,
        "torch": versions.get("torch"),
        "git_commit": run.content.get("git_commit"),
        "hostname": run.machine.get("hostname"),
        "run_id": run.content.get("run_id"),
        "common_step": comparison.common_step,
        "training_time_s": comparison.training_time(run),
        "training_time_ratio": comparison.time_ratio(run),
    }


def read_run(folder: Path, label: str) -> Run:
    """Read a run directory. ConfigError if its config.json is not that of a run; other damaged files are empty."""
    content = read_config(folder)
    content |= {key: {} for key in ("hardware", "trajectory", "versions") if not isinstance(content.get(key), dict)}
    try:
        status = read_status(folder)
    except (OSError, ValueError, RecursionError):  # truncated by a copy
        status = None
    lines = read_metrics(folder)
    known = [line for line in lines if isinstance(line, dict) and _integer(line.get("step")) is not None]
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
        status if isinstance(status, dict) else {},
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


def _last_number(records: list[dict[str, Any]], key: str) -> float | None:
    known = (_number(record, key) for record in reversed(records))
    return next((value for value in known if value is not None), None)


def _is_by(elapsed_s: float | None, limit: float) -> bool:
    return elapsed_s is not None and elapsed_s <= limit
