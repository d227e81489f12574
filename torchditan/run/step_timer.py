# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Measures training: the time of a step, the share that waits for data, and peak memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_GIB = 1024**3


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
