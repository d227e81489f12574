# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run: console, metrics.jsonl, TensorBoard, Weights & Biases.

Notable:
- `images_per_second` is global and counts only the images that were in the batches.
- The time and GPU memory of sampling, validation and checkpoints (`timer.excluded`) do not count as training. Their
  time is logged separately.
- Loss and gradient norm arrive as Python floats at log steps, so logging does not wait for the device. The exception is
  `timer.excluded`, which would otherwise count queued training steps as sampling.
- Rank 0 reports its own memory and time; the logger does not communicate with other ranks.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from PIL import Image

from torchditan.config.options import Metrics
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_metrics
from torchditan.run.training_progress import Progress

if TYPE_CHECKING:
    from torchditan.run.trackers import TensorBoard, WandB

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
_GIB = 1024**3
_END_AFTER = 9
"""Steps after the first one, by which the end of the run is estimated once."""
CONSOLE_COLUMNS = 100
"""Maximum line length if the output is not a terminal; otherwise the width of the terminal applies."""
_LEAST_IMPORTANT_FIRST = (
    "encoding_percent",
    "data_loading_percent",
    "tflops_per_device",
    "step_time_s",
    "peak_memory_gib",
    "lr",
    "grad_norm",
    "mfu",
    "images_per_second",
)
"""Parts that a console line drops, in this order, until it fits; metrics.jsonl contains all of them."""


class PeakMemory:
    """Peak memory since the last `read`.

    CUDA: memory that the allocator handed out (allocated), also as percent of the device's memory, and memory that it
    held (reserved), which includes cached memory.
    MPS: memory that the Metal driver held for this process when it was read, because Metal counts no peak. It includes
    cached memory. The percentage is that of the memory that Metal recommends as a limit.
    CPU: resident memory of this process since it started, because the system cannot reset it; no reserved memory;
    percent of the host's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocator: dict[str, float] = {}
        """The last `read` in the course project's terms: active memory, and allocator events since process start."""
        self._peaks: dict[str, int] = {}
        if device.type == "cuda":
            self._capacity = torch.cuda.get_device_properties(device).total_memory
        elif device.type == "mps":
            self._capacity = torch.mps.recommended_max_memory()
        else:
            self._capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def read(self) -> dict[str, float | None]:
        self.collect()
        gib = {name: peak / _GIB for name, peak in self._peaks.items()}
        percent = {name: 100 * peak / self._capacity for name, peak in self._peaks.items()}
        self._peaks = {}
        self.allocator = {}
        for name in gib.keys() & {"active", "reserved"}:
            self.allocator |= {f"max_{name}(GiB)": gib[name], f"max_{name}(%)": percent[name]}
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            self.allocator |= {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
        self.restart()
        return {
            "peak_memory_gib": gib["allocated"],
            "peak_reserved_gib": gib.get("reserved"),
            "peak_memory_percent": percent["allocated"],
        }

    def collect(self) -> None:
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            names = ("allocated", "reserved", "active")
            found = {name: stats.get(f"{name}_bytes.all.peak", 0) for name in names}  # {} before the first allocation
        elif self.device.type == "mps":
            found = dict.fromkeys(("allocated", "active"), torch.mps.driver_allocated_memory())
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            found = dict.fromkeys(("allocated", "active"), resident)
        self._peaks = {name: max(peak, self._peaks.get(name, 0)) for name, peak in found.items()}

    def restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


class StepTimer:
    """Splits the time since the last log step: training, waiting for data, and excluded work."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.memory = PeakMemory(device)
        self._clock = clock
        self._excluding: str | None = None
        self.restart()

    def restart(self) -> None:
        """Start the window now. Call it right before the first step, so that setup time does not count."""
        self._window_start = self._clock()
        self._data_loading = 0.0
        self._encoding = 0.0
        self._encoding_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._excluded: dict[str, float] = {}

    @contextmanager
    def excluded(self, name: str) -> Iterator[None]:
        """Exclude time and GPU memory of the body from training; its seconds are logged as `<name>_s`."""
        assert self._excluding is None, f"{name} inside {self._excluding}"
        torch.get_device_module(self.device).synchronize()  # on a CPU it returns at once
        self.memory.collect()
        self._excluding, start = name, self._clock()
        try:
            yield
            torch.get_device_module(self.device).synchronize()
        finally:
            self._excluding = None
            self._excluded[name] = self._excluded.get(name, 0.0) + self._clock() - start
            self.memory.restart()

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Time the body as waiting for the next batch."""
        start = self._clock()
        yield
        if self._excluding is None:
            self._data_loading += self._clock() - start

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Time the body as encoding pixels into latents, a part of the step, without waiting for a GPU."""
        if self._excluding is not None:
            yield
        elif self.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._encoding_events.append((begin, end))
        else:
            start = self._clock()
            yield
            self._encoding += self._clock() - start

    def read(self, *, steps: int, images: int) -> dict[str, float | None]:
        """Means over the window of `steps` and `images`, which ends here; None if no step was done."""
        elapsed = self._clock() - self._window_start
        seconds = elapsed - sum(self._excluded.values())
        counts = steps > 0 and seconds > 0
        means: dict[str, float | None] = {
            "step_time_s": seconds / steps if counts else None,
            "images_per_second": images / seconds if counts else None,
            "data_loading_percent": 100 * self._data_loading / seconds if counts else None,
        }
        for begin, end in self._encoding_events:
            end.synchronize()  # returns at once at a log step: the loss was read after it
            self._encoding += begin.elapsed_time(end) / 1000
        if counts and self._encoding:
            means["encoding_percent"] = 100 * self._encoding / seconds
        means.update({f"{name}_s": spent for name, spent in self._excluded.items()})
        self.restart()
        return means

    def take_excluded(self, name: str) -> float:
        """Seconds of excluded work in this window, which the next `read` does not report again."""
        seconds = self._excluded.pop(name)
        self._window_start += seconds
        return seconds


class Console:
    """Lines of text and, on a terminal, a progress bar below them that never mixes with the lines."""

    _BAR_WIDTH = 10
    _REDRAW_S = 0.1

    def __init__(self, stream: TextIO, *, color: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.color = color and self.is_terminal and not os.environ.get("NO_COLOR")
        self._bar = ""
        self._drawn_at = float("-inf")

    @property
    def columns(self) -> int:
        """Maximum line length."""
        return shutil.get_terminal_size().columns if self.is_terminal else CONSOLE_COLUMNS

    def line(self, text: str) -> None:
        self._stream.write(f"{self._erase()}{text}\n{self._bar}")
        self._stream.flush()

    def progress(self, step: int, total_steps: int, eta: str, *, figures: str = "") -> None:
        """Redraw the bar, a few times per second at most; does nothing if the output is not a terminal.

        `figures` stands between step and time left: the last logged loss and speed.
        """
        if not self.is_terminal or (self._clock() - self._drawn_at < self._REDRAW_S and step < total_steps):
            return
        self._drawn_at = self._clock()
        share = min(step / total_steps, 1.0)
        bar = "#" * int(share * self._BAR_WIDTH)
        text = f"{share:4.0%} [{bar:.<{self._BAR_WIDTH}}] step {step:,}/{total_steps:,}  {figures}ETA {eta}"
        text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped bar could not be erased
        self._stream.write(f"{self._erase()}{text}")
        self._stream.flush()
        self._bar = text

    def close(self) -> None:
        self._stream.write(self._erase())
        self._stream.flush()
        self._bar = ""

    def _erase(self) -> str:
        return "\r\x1b[2K" if self._bar else ""


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
        self._trackers: list[TensorBoard | WandB] = []
        if not run_directory.is_writer:
            return
        self._console = Console(stream or sys.stdout, color=config.enable_color_printing, clock=clock)
        if config.enable_tensorboard or config.enable_wandb:
            from torchditan.run.trackers import TensorBoard, WandB
        if config.enable_tensorboard:
            self._trackers.append(TensorBoard(run_directory.path / config.save_tb_folder, progress.step))
        if config.enable_wandb:
            self._trackers.append(WandB(config, run_directory))

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
        """Log an image file to TensorBoard and W&B."""
        if self._trackers:
            pixels = np.asarray(Image.open(image).convert("RGB"))
            self._track(lambda tracker: tracker.log_image(name, pixels, step))

    def close(self) -> None:
        """Remove the bar and finish the trackers."""
        if self._console is not None:
            self._console.close()
        self._track(lambda tracker: tracker.close())

    def _track(self, call: Callable[[TensorBoard | WandB], None]) -> None:
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
            line = _console_line(record, self._total_steps, self._eta(), color=console.color, columns=console.columns)
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


def _console_line(record: dict[str, Any], total_steps: int, eta: str, *, color: bool, columns: int) -> str:
    """One line of at most `columns` characters; if it would be longer, the least important parts are dropped."""
    parts = {
        "step": (f"step {{:>{len(str(total_steps))}}}/{total_steps}", 31),
        "loss": ("loss {:.4f}", 32),
        "validation_loss": ("val {:.4f}", 32),
        "grad_norm": ("grad {:.3f}", 33),
        "lr": ("lr {:.1e}", 39),
        "images_per_second": ("{:,.1f} images/s", 34),
        "step_time_s": ("{:.3f} s/step", 34),
        "tflops_per_device": ("{:,.2f} TFLOP/s", 36),
        "mfu": ("MFU {:.1f}%", 36),
        "peak_memory_gib": ("{:.2f} GiB", 35),
        "data_loading_percent": ("data {:.1f}%", 39),
        "encoding_percent": ("encoding {:.1f}%", 39),
    }
    shown = {
        key: (text.format(record[key]), code) for key, (text, code) in parts.items() if record.get(key) is not None
    }
    shown["eta"] = (f"ETA {eta}", 39)
    for key in _LEAST_IMPORTANT_FIRST:
        if len("  ".join(text for text, _ in shown.values())) <= columns:
            break
        shown.pop(key, None)
    return "  ".join(f"\x1b[{code}m{text}\x1b[0m" if color else text for text, code in shown.values())
