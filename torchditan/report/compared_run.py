# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One of the compared runs, read from its run directory.

Notable:
- Missing data is None, never 0.
- A sampling belongs to the step of its weights, and to the time at which that step was logged.
- Reading needs neither torch nor pandas.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torchditan.report.grid_results import parallel_mode
from torchditan.run.reading import read_config, read_metrics, read_status

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
    ascending step, and `pictures` its sample grids by step.
    """

    label: str
    path: Path
    content: dict[str, Any]
    status: dict[str, Any]
    records: list[dict[str, Any]]
    pictures: dict[int, Path]

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
        shard = self.options.get("training.data_parallel_shard_degree")
        if not (self.world_size and replicate and shard):
            return None
        mode = parallel_mode(f"{replicate},{self.world_size // replicate}")
        context = self.options.get("training.context_parallel_degree", 1)
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
        return self.options.get("training.steps")

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

    @property
    def draws_own_prompts(self) -> bool:
        """Whether the samples use the user's own prompts, which have no real images."""
        return bool(self.options.get("sampling.prompts"))

    @cached_property
    def samplings(self) -> list[Sampling]:
        """Samplings with scores or a picture, by step."""
        end = _TO_ORIGINAL if self.scored_against == "original" else ""
        names = {name: name if name == "seconds_per_image" else f"{name}{end}" for name in _SCORES}
        lines = {record["step"]: {name: number(record, key) for name, key in names.items()} for record in self.records}
        scored = {step for step, values in lines.items() if any(value is not None for value in values.values())}
        return [
            Sampling(step, self.reached_at(step), **lines.get(step, {}), picture=self.pictures.get(step))
            for step in sorted(scored | self.pictures.keys())
        ]

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line that has the key."""
        known = ((record["step"], number(record, key)) for record in self.records)
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
            if (value := number(record, key)) is not None
        ]
        if not windows:
            return None
        values, counts = zip(*sorted(windows), strict=True)
        ends = list(accumulate(counts))
        middle = (values[bisect_right(ends, index)] for index in ((ends[-1] - 1) // 2, ends[-1] // 2))
        return statistics.mean(middle)


def read_run(folder: Path, label: str) -> Run:
    content = read_config(folder)
    try:
        status = read_status(folder)
    except ValueError:  # truncated by a copy
        status = None
    by_step = {
        record["step"]: record
        for record in read_metrics(folder)
        if isinstance(record, dict) and isinstance(record.get("step"), int)
    }
    pictures = {
        int(digits): path
        for path in (folder / "samples").glob("step_*.png")
        if (digits := path.stem.removeprefix("step_")).isdecimal()
    }
    records = [by_step[step] for step in sorted(by_step)]
    return Run(label, folder, content, status if isinstance(status, dict) else {}, records, pictures)


def number(record: dict[str, Any], key: str) -> float | None:
    """A finite number from a line, or None."""
    value = record.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def last_number(records: list[dict[str, Any]], key: str) -> float | None:
    known = (number(record, key) for record in reversed(records))
    return next((value for value in known if value is not None), None)


def is_by(elapsed_s: float | None, limit: float) -> bool:
    return elapsed_s is not None and elapsed_s <= limit
