# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run directories: their values for a page, the settings in which they differ, and their comparison.

Notable:
- All data comes from the files of the run directories. Missing data is None, never 0.
- Several runs are usually one job on different hardware. Their times are compared over equal steps, their scores at an
  equal step. Runs are one job if all options agree that decide what is learned. Only then should their losses agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from torchditan.errors import counted, option_error
from torchditan.extras.ablation.ledger import CSV_NAME
from torchditan.extras.ablation.maker import RUNS_FOLDER
from torchditan.extras.report.labels import duration, parallel_mode, ratio_text
from torchditan.run.reading import read_config, read_metrics, read_status

SAME_CURVE = 1e-3
"""Relative difference of losses up to which two curves of one job count as equal."""
# A path cannot show whether moved weights are the same weights.
_PATHS = ("model.path", "checkpoint.initial_load_path", "text_encoder.path", "lora.assistant_path")
_NAMES_AND_PLACES = ("job", "profiling", "comm", "cache", "metrics")
_PLACES = ("dataset.root_dir", "autoencoder.path", "checkpoint.folder")
_EVENTS = ("metrics.enable_sampling", "metrics.sample_freq")  # drawing samples takes time
_KINDS = ("training", "a path; contents may be equal", "sampling", "execution")
_STATES = {"oom": "out of memory", "running": "running, or killed", "error": "failed"}


@dataclass(frozen=True)
class Run:
    """One run directory.

    `content` is its config.json, `status` its status.json (empty without that file), `metrics` the numbers of
    metrics.jsonl by step, and `pictures` its sample grids by step.
    """

    label: str
    path: Path
    content: dict[str, Any]
    status: dict[str, Any]
    metrics: pd.DataFrame
    pictures: dict[int, Path]

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
        return self.machine.get("device_count")

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
        replicate = self.options.get("training.data_parallel_replicate_degree")
        if not (self.world_size and replicate):
            return None
        mode = parallel_mode(f"{replicate},{self.world_size // replicate}")
        context = self.options.get("training.context_parallel_degree", 1)
        tokens = f", context parallelism over {context}" if context > 1 else ""
        return "one process" if mode == "one device" else f"{mode}{tokens}"

    @property
    def precision(self) -> str | None:
        precision = self.options.get("training.mixed_precision_param")
        return f"{precision}, float8" if precision and self.options.get("float8.enable_float8_linear") else precision

    @property
    def steps(self) -> int | None:
        return int(self.metrics.index[-1]) if len(self.metrics) else None

    @property
    def steps_text(self) -> str:
        """`100`, or `15 of 100` if the run has not done all."""
        if self.steps is None:
            return "none"
        steps = max(self.steps, self.status.get("step") or 0)  # an interrupted run logs no line for its last steps
        planned = self.options.get("training.steps", "?")
        return f"{steps:,}" if steps == planned else f"{steps:,} of {planned}"

    @property
    def state(self) -> str:
        return str(self.status.get("state") or "unknown")

    @property
    def was_resumed(self) -> bool:
        """Whether the run was started more than once. config.json has the hardware of the last start."""
        return self.content.get("created") != self.content.get("started")

    @property
    def state_text(self) -> str:
        return _STATES.get(self.state, self.state) + (", resumed" if self.was_resumed else "")

    @property
    def scored_against(self) -> str | None:
        """Reference of PSNR and SSIM: held-out `images`, samples of the `original` model, or None."""
        return "images" if "psnr" in self.metrics else "original" if "psnr_to_original" in self.metrics else None

    def curve(self, key: str) -> pd.Series:
        """The values of a key by step; of `psnr` and `ssim`, those of the samples."""
        if self.scored_against == "original" and key in ("psnr", "ssim"):
            key = f"{key}_to_original"
        return self.metrics[key].dropna() if key in self.metrics else pd.Series(dtype=float)

    def last(self, key: str) -> float | None:
        known = self.curve(key)
        return float(known.iloc[-1]) if len(known) else None

    def over_time(self, curve: pd.Series) -> pd.Series:
        """A curve over the seconds until its steps were reached: the time of the first line at or after each step."""
        clock = pd.concat([pd.Series([0.0], index=[0]), self.curve("elapsed_s")])
        places = clock.index.searchsorted(curve.index)
        known = places < len(clock)
        return curve[known].set_axis(clock.iloc[places[known]].to_numpy())

    def reached_at(self, step: int) -> float | None:
        """Seconds until the weights of a step were reached."""
        reached = self.over_time(pd.Series([0.0], index=[step])).index
        return float(reached[0]) if len(reached) else None

    def median(self, key: str) -> float | None:
        """Median over the steps after the first line, which warm up. Each has the mean of its logging window."""
        steps = np.diff(self.metrics.index)
        if key not in self.metrics or not len(steps):
            return None
        over_steps = self.metrics[key].iloc[1:].repeat(steps).dropna()
        return float(over_steps.median()) if len(over_steps) else None


def read_run(folder: Path, label: str) -> Run:
    """Read a run directory. ConfigError if its config.json is not that of a run; other damaged files are empty."""
    content = read_config(folder)
    content |= {key: {} for key in ("hardware", "trajectory", "versions") if not isinstance(content.get(key), dict)}
    pictures = {
        int(digits): path
        for path in (folder / "samples").glob("step_*.png")
        if (digits := path.stem.removeprefix("step_")).isdecimal()
    }
    return Run(label, folder, content, read_status(folder) or {}, metrics_of(folder), pictures)


def metrics_of(folder: Path) -> pd.DataFrame:
    """The numbers of metrics.jsonl by step, of several lines of one step the last; NaN where one is missing."""
    records = {record["step"]: record for record in read_metrics(folder) if record["step"] >= 0}
    frame = pd.DataFrame(list(records.values()), index=list(records), dtype=float)
    return frame.sort_index().replace([np.inf, -np.inf], np.nan)


def read_runs(folders: Sequence[Path], labels: Sequence[str] | None) -> list[Run]:
    """Read run directories and name them.

    Raises:
        ConfigError: a folder is not a run, or the number of labels is another.
    """
    unique = list({folder.resolve(): folder for folder in folders}.values())
    names = distinct_names(unique) if labels is None else list(labels)
    if len(names) != len(unique):
        raise option_error("--labels", " ".join(names), f"must be {len(unique)} names, one for each run")
    return [read_run(folder, name) for folder, name in zip(unique, names, strict=True)]


def runs_in(folder: Path) -> list[Path]:
    """The run directories of a grid in the order of its ledger, or `folder` itself."""
    if not (folder / "grid.json").exists():
        return [folder]
    ledger = folder / CSV_NAME
    names = pd.read_csv(ledger, dtype=str)["run_name"] if ledger.exists() else []
    return [run for name in names if ((run := folder / RUNS_FOLDER / name) / "config.json").exists()]


def distinct_names(folders: list[Path]) -> list[str]:
    """The folder names, with as many parents as needed to make them unique."""
    resolved = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("resolved folders are unique")


class Setting(NamedTuple):
    """An option that differs between runs. `kind` is what it decides: one of `_KINDS`."""

    name: str
    kind: str
    values: list[Any]


def differing_settings(runs: Sequence[Run]) -> list[Setting]:
    """Settings of the job first, then of paths, drawing and running. Names and folders of the runs are left out."""
    jobs = {name for run in runs for name in run.content["trajectory"]}
    trees = [run.options | run.content["trajectory"] for run in runs]
    found = []
    for name in dict.fromkeys(name for tree in trees for name in tree):
        values = [tree.get(name, "absent") for tree in trees]
        section = name.split(".")[0]
        if name in _PATHS:
            kind = _KINDS[1]
        elif name in jobs:
            kind = _KINDS[0]
        elif name in _PLACES or (section in _NAMES_AND_PLACES and name not in _EVENTS):
            continue
        else:
            kind = _KINDS[2] if section == "sampling" else _KINDS[3]
        if any(value != values[0] for value in values):
            found.append(Setting(name, kind, values))
    return sorted(found, key=lambda setting: _KINDS.index(setting.kind))


def compared(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run: the columns of compare.csv. None where a run did not measure a value.

    Training times are until the last step that all runs logged, ratios are to the slowest run. The equal step is the
    last one at which all runs have PSNR or SSIM; if no run has any, the last one that all logged.
    """
    of_runs = [set(run.metrics.index) for run in runs if run.steps is not None]
    common = max(map(int, set.intersection(*of_runs)), default=None) if of_runs else None
    scored = [set(run.curve("psnr").index) | set(run.curve("ssim").index) for run in runs]
    logged = [steps for steps in (scored if any(scored) else [set(run.metrics.index) for run in runs]) if steps]
    equal = max(map(int, set.intersection(*logged)), default=None) if logged else None
    rows = []
    for run in runs:
        step_time = run.median("step_time_s")
        drawing = run.curve("seconds_per_image")
        memory = run.curve("peak_memory_gib")
        at_equal = {key: run.curve(key).get(equal) for key in ("loss", "validation_loss", "psnr", "ssim")}
        rows.append(
            {
                "label": run.label,
                "path": str(run.path),
                "hardware": run.hardware,
                "world_size": run.world_size,
                "parallel_mode": run.parallel_mode,
                "global_batch_size": run.options.get("training.global_batch_size"),
                "precision": run.precision,
                "steps": run.steps,
                "planned_steps": run.options.get("training.steps"),
                "elapsed_s": run.last("elapsed_s"),
                "steps_per_second": 1 / step_time if step_time else None,
                "images_per_second": run.median("images_per_second"),
                "speed_up": None,
                "seconds_per_image": float(drawing.median()) if len(drawing) else None,
                "peak_memory_gib": float(memory.max()) if len(memory) else None,
                "loss": run.last("loss"),
                "validation_loss": run.last("validation_loss"),
                "state": run.state,
                "common_step": common,
                "training_time_s": None if common is None else run.reached_at(common),
                "training_time_ratio": None,
                "equal_step": equal,
                "elapsed_s_at_equal_step": None if equal is None else run.reached_at(equal),
                **{f"{key}_at_equal_step": value for key, value in at_equal.items()},
                "scored_against": run.scored_against,
                "torch": run.content["versions"].get("torch"),
                "git_commit": run.content.get("git_commit"),
                "hostname": run.machine.get("hostname"),
                "run_id": run.content.get("run_id"),
            }
        )
    speeds, times = ([row[name] for row in rows if row[name]] for name in ("images_per_second", "training_time_s"))
    for row in rows:
        if len(speeds) > 1 and row["images_per_second"]:
            row["speed_up"] = row["images_per_second"] / min(speeds)
        if len(times) > 1 and row["training_time_s"]:
            row["training_time_ratio"] = max(times) / row["training_time_s"]
    return pd.DataFrame(rows, dtype=object)


class CurvePair(NamedTuple):
    """Losses of two runs of one job at the steps that both logged."""

    first: Run
    second: Run
    difference: float
    """The largest, relative to the larger loss."""
    parted_at: int | None
    """The first step at which they differ by more than SAME_CURVE."""


def curve_pairs(runs: Sequence[Run]) -> list[CurvePair]:
    """The pairs of runs of one job that logged losses at the same steps."""
    found = []
    for first, second in combinations(runs, 2):
        both = pd.concat([first.curve("loss"), second.curve("loss")], axis=1, join="inner")
        if len(both) and all(setting.kind != _KINDS[0] for setting in differing_settings([first, second])):
            relative = (both.iloc[:, 0] - both.iloc[:, 1]).abs() / both.abs().max(axis=1).replace(0, 1)
            parted = relative.index[relative > SAME_CURVE]
            found.append(CurvePair(first, second, float(relative.max()), int(parted[0]) if len(parted) else None))
    return found


def run_headlines(runs: Sequence[Run], table: pd.DataFrame, pairs: Sequence[CurvePair]) -> Iterable[str]:
    """The ratio of total training times, and whether runs of one job follow one curve."""
    times = [(time, run.label) for run, time in zip(runs, table["training_time_s"], strict=True) if time]
    if len(times) > 1:
        (least, fastest), (most, slowest) = min(times), max(times)
        yield (
            f"Total training time: {fastest} is {ratio_text(most / least)} times as fast as {slowest} "
            f"({counted(table['common_step'].iloc[0], 'step')} in {duration(least)} instead of {duration(most)})."
        )
    most_apart = max((pair.difference for pair in pairs), default=None)
    if most_apart is not None and most_apart <= SAME_CURVE:
        yield f"Runs of one job have the same losses{f', within {most_apart:.1e}' if most_apart else ''}."


def run_warnings(runs: Sequence[Run], pairs: Sequence[CurvePair]) -> Iterable[str]:
    """Curves of one job that part, and what a reader has to know about a run before its numbers."""
    parted = [(pair.parted_at, pair) for pair in pairs if pair.parted_at is not None]
    if parted:
        step, first = min(parted, key=lambda found: found[0])
        yield (
            f"The losses of {len(parted)} of {counted(len(pairs), 'pair')} of runs of one job differ by more "
            f"than {SAME_CURVE:g}, first at step {step:,} ({first.first.label} and {first.second.label})."
        )
    for run in runs:
        if run.state != "completed":
            reason = f": {run.status['reason'][:300]}" if run.status.get("reason") else ""
            yield f"{run.label}: the status is {run.state_text}{reason}."
        if run.metrics.empty:
            imported = "it was imported and did not train." if "imported" in run.content else ""
            yield f"{run.label}: {imported or 'metrics.jsonl has no logged step.'}"
        elif "loss" in run.metrics and (lost := run.metrics.index[run.metrics["loss"].isna()]).size:
            steps = f"{len(lost):,} of {counted(len(run.metrics), 'logged step')}"
            yield f"{run.label}: the loss is not finite at {steps}, first at step {lost[0]:,}."
