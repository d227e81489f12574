# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run: console, metrics.jsonl, TensorBoard, Weights & Biases, Trackio.

Notable:
- `images_per_second` is global and counts only the images that were in the batches.
- The time and GPU memory of sampling, validation and checkpoints (`timer.excluded`) do not count as training. Their
  time is logged separately.
- Loss and gradient norm arrive as Python floats at log steps, so logging does not wait for the device. The exception is
  `timer.excluded`, which would otherwise count queued training steps as sampling.
- Rank 0 reports its own memory and time; the logger does not communicate with other ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from PIL import Image

from torchditan.config.options import Metrics
from torchditan.run.console import Console, record_line
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_metrics
from torchditan.run.step_timer import StepTimer
from torchditan.run.training_progress import Progress

if TYPE_CHECKING:
    from torchditan.run.trackers import Tracker

ALWAYS_KEYS = (
    "step",
    "images_seen",
    "loss",
    "grad_norm",
    "lr",
    "step_time_s",
    "images_per_second",
    "tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "peak_reserved_gib",
    "peak_memory_percent",
    "data_loading_percent",
    "elapsed_s",
)
_END_AFTER = 9
"""Steps after the first one, by which the end of the run is estimated once."""


class MetricsLogger:
    """Reports the steps of a run. On ranks that do not write it only measures.

    `progress` is the trainer's, which changes in place. `flops_per_image` are the model FLOPs of forward and backward.
    `peak_flops` is the device's dense bf16 peak in FLOP/s, or None if unknown. `tokens_per_image` is the number of
    patches of one image.
    """

    def __init__(
        self,
        config: Metrics,
        run_directory: RunDirectory,
        progress: Progress,
        *,
        world_size: int,
        device: torch.device,
        flops_per_image: float,
        peak_flops: float | None,
        total_steps: int,
        tokens_per_image: int,
        clock: Callable[[], float] = time.perf_counter,
        stream: TextIO | None = None,
    ) -> None:
        self.timer = StepTimer(device, clock)
        self._config = config
        self._run_directory = run_directory
        self._progress = progress
        self._world_size = world_size
        self._flops_per_image = flops_per_image
        self._tokens_per_image = tokens_per_image
        self._peak_flops = peak_flops
        self._total_steps = total_steps
        self._clock = clock
        self._start = clock() - progress.elapsed_s
        self._logged_step, self._logged_images = progress.step, progress.images_seen
        self._first_step: tuple[int, float] | None = None  # start of the ETA measurement: (step, its end)
        self._console: Console | None = None
        self._figures = ""  # of the last record, for the bar: reading the loss at every step would wait for the device
        self._trackers: list[Tracker] = []
        if not run_directory.is_writer:
            return
        self._console = Console(stream or sys.stdout, color=config.enable_color_printing, clock=clock)
        if config.enable_tensorboard or config.enable_wandb or config.enable_trackio:
            from torchditan.run.trackers import open_trackers

            self._trackers = open_trackers(config, run_directory, start_step=progress.step)

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of the run so far, including those before a resume."""
        return self._clock() - self._start

    def show_step(self) -> None:
        """Show the progress. Call it after each optimizer step."""
        step = self._progress.step
        if self._first_step is None:  # the first step compiles and warms up: a poor predictor
            self._first_step = (step, self._clock())
        if self._console is not None:
            if step - self._first_step[0] == _END_AFTER and step < self._total_steps:
                left = self._time_left()
                assert left is not None
                end = datetime.now() + left
                date = f"{end:%a %d %b, %H:%M}" if left > timedelta(days=1) else f"{end:%H:%M}"
                self.message(f"about {left} left: the run will end at about {date}")
            self._console.progress(step, self._total_steps, self._eta(), figures=self._figures)

    def log(
        self,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        extra: dict[str, Any] | None = None,
        max_loss: float | None = None,
    ) -> dict[str, Any]:
        """Report the steps since the last call. `extra` (rollbacks, ...) is added to the fixed keys.

        `max_loss`, the largest loss of any rank, is one of the course project's TensorBoard tags.

        Returns the record, with the same keys on every rank.
        """
        step, images_seen = self._progress.step, self._progress.images_seen
        window = self.timer.read(steps=step - self._logged_step, images=images_seen - self._logged_images)
        self._logged_step, self._logged_images = step, images_seen
        speed = window["images_per_second"]
        flops = None if speed is None else speed * self._flops_per_image / self._world_size
        known: dict[str, Any] = {
            "step": step,
            "images_seen": images_seen,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "elapsed_s": self.elapsed_s,
            "tflops_per_device": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or self._peak_flops is None else 100 * flops / self._peak_flops,
            **self.timer.memory.read(),
            **window,
        }
        record = {key: known.pop(key) for key in ALWAYS_KEYS} | known | (extra or {})
        self._figures = f"loss {loss:.4f}  " + ("" if speed is None else f"{speed:,.4g} images/s  ")
        self._run_directory.append_metrics(record)
        self._show(record)
        legacy: dict[str, float] = {}
        if self._trackers and self._config.legacy_tags:
            from torchditan.run.legacy_tags import legacy_scalars  # only for the option metrics.legacy_tags

            legacy = legacy_scalars(
                record,
                max_loss=max_loss,
                flops_per_image=self._flops_per_image,
                tokens_per_image=self._tokens_per_image,
                world_size=self._world_size,
                memory=self.timer.memory.allocator,
            )
        numbers = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}
        self._track(lambda tracker: tracker.log(numbers, step, legacy=legacy))
        return record

    def lacks_figures(self, step: int, task: str) -> bool:
        """Whether the record of `step` is there, without the figures of this task."""
        records = read_metrics(self._run_directory.path) if self._run_directory.is_writer else []
        return any(record["step"] == step and f"{task}_s" not in record for record in records[-1:])

    def add_figures(self, step: int, task: str, figures: dict[str, float]) -> None:
        """Add figures of a task, such as "validation", to the last record, which is that of `step`, in every log."""
        figures = {f"{task}_s": self.timer.take_excluded(task), **figures}
        self._run_directory.extend_last_metrics(figures)
        if "validation_loss" in figures:
            self._show({"step": step, **figures})
        self._track(lambda tracker: tracker.log(figures, step, legacy={}))

    def roll_back(self) -> None:
        """After a rollback, drop the later steps from every log, because they will run again."""
        step = self._progress.step
        self._run_directory.truncate_metrics(step)
        self._track(lambda tracker: tracker.roll_back(step))
        self._logged_step, self._logged_images = step, self._progress.images_seen
        self._first_step = None
        self.timer.restart()

    def flush(self) -> None:
        """Sync all logs to disk. A checkpoint of this step must not be ahead of them."""
        self._run_directory.sync_metrics()
        self._track(lambda tracker: tracker.flush())

    def message(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.line(text)

    def log_image(self, name: str, image: Path, step: int) -> None:
        """Log an image file to the trackers."""
        if self._trackers:
            pixels = np.asarray(Image.open(image).convert("RGB"))
            self._track(lambda tracker: tracker.log_image(name, pixels, step))

    def close(self) -> None:
        """Remove the bar and finish the trackers."""
        if self._console is not None:
            self._console.close()
        self._track(lambda tracker: tracker.close())

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker. If the disk is full, it gets no more, but the run continues."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except OSError as error:
                self._trackers.remove(tracker)
                what = f"warning: {type(tracker).__name__} cannot write ({error.strerror})"
                self.message(f"{what}; metrics.jsonl continues")

    def _show(self, record: dict[str, Any]) -> None:
        if (console := self._console) is not None:
            line = record_line(record, self._total_steps, self._eta(), color=console.color, columns=console.columns)
            console.line(line)

    def _time_left(self) -> timedelta | None:
        """Until the end of the run, by the steps after the first; None before the second."""
        step = self._progress.step
        if self._first_step is None or step == self._first_step[0]:
            return None
        first, ended = self._first_step
        seconds = (self._clock() - ended) / (step - first) * (self._total_steps - step)
        return timedelta(seconds=round(seconds))

    def _eta(self) -> str:
        left = self._time_left()
        return "-:--:--" if left is None else str(left)
