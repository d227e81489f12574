# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads run directories: the values that a page of runs shows, and the settings in which runs differ.

Notable:
- All data comes from the files of the run directories. Missing data is None, never 0.
- Several runs are usually one job on different hardware. Their times are compared over equal steps, their scores at an
  equal step. Runs are one job if all options agree that decide what is learned. Only then should their losses agree.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from torchditan.ablation.ledger import CSV_NAME
from torchditan.ablation.maker import RUNS_FOLDER
from torchditan.config.errors import ConfigError, option_error
from torchditan.report.grid_results import distinct_names, parallel_mode
from torchditan.report.labels import count, duration, ratio_text
from torchditan.run.reading import count_metrics_lines, read_config, read_metrics, read_status

if TYPE_CHECKING:
    import pandas as pd

# A path cannot show whether moved weights are the same weights.
_PATHS = ("model.path", "checkpoint.initial_load_path", "text_encoder.path", "lora.assistant_path")
SAME_CURVE = 1e-3
"""Relative difference of losses up to which two curves of one job count as equal."""
_NAMES_AND_PLACES = ("job", "profiling", "comm", "cache", "metrics")
_EVENTS = ("metrics.enable_sampling", "metrics.sample_freq")  # drawing samples takes time
_PLACES = ("dataset.root_dir", "autoencoder.path", "checkpoint.folder")
_JOB, _PATH, _DRAWING, _RUNNING = _KINDS = ("training", "a path; contents may be equal", "sampling", "execution")
_MOST_RUNS = 32  # the colours and dashes of the plots distinguish no more
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
    def machine(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["hardware"]
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


class Setting(NamedTuple):
    """An option that differs between runs. `kind` is what it decides: one of `_KINDS`."""

    name: str
    kind: str
    values: list[Any]


def read_runs(folders: Sequence[Path], labels: Sequence[str] | None, *, option: str) -> list[Run]:
    """Read run directories and name them. `option` is what the user named them with, for messages.

    Raises:
        ConfigError: too many runs, a duplicate, a folder that is not a run, or wrong labels.
    """
    if len(folders) > _MOST_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are too many for one page; name at most {_MOST_RUNS}, or the folder that holds them"
        )
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
    jobs = {name for run in runs for name in run.content["trajectory"]}
    trees = [run.options | run.content["trajectory"] for run in runs]
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


class CurvePair(NamedTuple):
    """Losses of two runs of one job at the steps that both logged."""

    first: Run
    second: Run
    difference: float
    """The largest, relative to the larger loss."""
    parted_at: int | None
    """The first step at which they differ by more than SAME_CURVE."""


@dataclass(frozen=True)
class Comparison:
    """Values that need all runs. They are None where runs did not measure them; runs without a line are ignored."""

    runs: Sequence[Run]

    @cached_property
    def common_step(self) -> int | None:
        """The last step that all runs reached."""
        return min((run.steps for run in self.runs if run.steps is not None), default=None)

    def training_time(self, run: Run) -> float | None:
        """Seconds that a run took for the steps that all runs reached, with sampling, validation and checkpoints."""
        return None if self.common_step is None else run.reached_at(self.common_step)

    def time_ratio(self, run: Run) -> float | None:
        """Training time of the slowest run, divided by that of this run."""
        own = self.training_time(run)
        known = [time for time in map(self.training_time, self.runs) if time]
        return max(known) / own if own and len(known) > 1 else None

    def speed_up(self, run: Run) -> float | None:
        """Images/s relative to the slowest run."""
        known = [speed for other in self.runs if (speed := other.images_per_second)]
        return run.images_per_second / min(known) if run.images_per_second and len(known) > 1 else None

    @cached_property
    def equal_step(self) -> int | None:
        """The last step at which all runs have PSNR or SSIM; if no run has any, the last one that all logged."""
        scored = [{step for key in ("psnr", "ssim") for step, _ in run.scores(key)} for run in self.runs]
        logged = [{record["step"] for record in run.records} for run in self.runs]
        known = [steps for steps in (scored if any(scored) else logged) if steps]
        return max(set.intersection(*known), default=None) if known else None

    def at_equal_step(self, run: Run) -> dict[str, float | None]:
        """`elapsed_s`, `loss`, `validation_loss`, `psnr` and `ssim` of a run at `equal_step`."""
        step = self.equal_step
        if step is None:
            return dict.fromkeys(("elapsed_s", "loss", "validation_loss", "psnr", "ssim"))
        curves = {key: dict(run.curve(key)) for key in ("loss", "validation_loss")}
        curves |= {key: dict(run.scores(key)) for key in ("psnr", "ssim")}
        return {"elapsed_s": run.reached_at(step), **{key: curve.get(step) for key, curve in curves.items()}}

    @cached_property
    def curves(self) -> list[CurvePair]:
        """The pairs of runs of one job that logged losses at the same steps."""
        pairs = (_curve_pair(*pair) for pair in combinations(self.runs, 2) if _are_one_job(*pair))
        return [pair for pair in pairs if pair is not None]

    @property
    def headlines(self) -> Iterable[str]:
        """The ratio of total training times, and whether runs of one job follow one curve."""
        times = [(time, run.label) for run in self.runs if (time := self.training_time(run))]
        if len(times) > 1:
            (least, fastest), (most, slowest) = min(times), max(times)
            yield (
                f"Total training time: {fastest} is {ratio_text(most / least)} times as fast as {slowest} "
                f"({count(self.common_step or 0, 'step')} in {duration(least)} instead of {duration(most)})."
            )
        most_apart = max((pair.difference for pair in self.curves), default=None)
        if most_apart is not None and most_apart <= SAME_CURVE:
            yield f"Runs of one job have the same losses{f', within {most_apart:.1e}' if most_apart else ''}."

    @property
    def warnings(self) -> Iterable[str]:
        parted = [(pair.parted_at, pair) for pair in self.curves if pair.parted_at is not None]
        if parted:
            step, first = min(parted, key=lambda found: found[0])
            yield (
                f"The losses of {len(parted)} of {count(len(self.curves), 'pair')} of runs of one job differ by more "
                f"than {SAME_CURVE:g}, first at step {step:,} ({first.first.label} and {first.second.label})."
            )

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per run: the columns of compare.csv. None where a run did not measure it."""
        import pandas as pd

        return pd.DataFrame([self._row(run) for run in self.runs], dtype=object)

    def _row(self, run: Run) -> dict[str, Any]:
        return {
            "label": run.label,
            "path": str(run.path),
            "hardware": run.hardware,
            "world_size": run.world_size,
            "parallel_mode": run.parallel_mode,
            "global_batch_size": run.options.get("training.global_batch_size"),
            "precision": run.precision,
            "steps": run.steps,
            "planned_steps": run.planned_steps,
            "elapsed_s": run.elapsed_s,
            "steps_per_second": run.steps_per_second,
            "images_per_second": run.images_per_second,
            "speed_up": self.speed_up(run),
            "seconds_per_image": run.seconds_per_image,
            "peak_memory_gib": run.peak_memory_gib,
            "loss": run.last("loss"),
            "validation_loss": run.last("validation_loss"),
            "state": run.state,
            "common_step": self.common_step,
            "training_time_s": self.training_time(run),
            "training_time_ratio": self.time_ratio(run),
            "equal_step": self.equal_step,
            **{f"{key}_at_equal_step": value for key, value in self.at_equal_step(run).items()},
            "scored_against": run.scored_against,
            "torch": run.content["versions"].get("torch"),
            "git_commit": run.content.get("git_commit"),
            "hostname": run.machine.get("hostname"),
            "run_id": run.content.get("run_id"),
        }


def _are_one_job(first: Run, second: Run) -> bool:
    return not any(setting.kind == _JOB for setting in differing_settings([first, second]))


def _curve_pair(first: Run, second: Run) -> CurvePair | None:
    there = dict(second.curve("loss"))
    common = [(step, loss, there[step]) for step, loss in first.curve("loss") if step in there]
    if not common:
        return None
    relative = [(step, abs(a - b) / (max(abs(a), abs(b)) or 1.0)) for step, a, b in common]
    parted_at = next((step for step, difference in relative if difference > SAME_CURVE), None)
    return CurvePair(first, second, max(difference for _, difference in relative), parted_at)
