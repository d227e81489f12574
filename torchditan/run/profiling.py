# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Traces of single steps by the torch profiler, and snapshots of CUDA memory.

Notable:
- With `profile_freq = 100`, steps 100, 200, ... are traced, also after a resume. The steps before each are warm-up.
- A trace is `<save_traces_folder>/step_00000100/rank0.json`, for chrome://tracing or Perfetto.
- Starting, stopping and writing a trace runs in the context that the caller passes, and does not count as training
  time. A traced step is slower, and that does count.
- A snapshot is `<save_memory_snapshot_folder>/step_00000100/rank0.pickle`, for pytorch.org/memory_viz. Running out of
  memory writes one to `step_00000100_oom/`, named by the step that failed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchditan.config.options import Profiling
from torchditan.run.atomic_files import temporary_path
from torchditan.run.directory import RunDirectory

_WARMUP_STEPS = 3  # otherwise the first traced step includes the start of the tracer
_MAX_MEMORY_EVENTS = 100_000


class Profiler:
    """Profiles the steps in its body (`with`) according to `config`; every rank writes separate files.

    Args:
        excluded: context manager for work after a step that does not count as training.
    """

    def __init__(
        self,
        config: Profiling,
        run_directory: RunDirectory,
        rank: int,
        *,
        device: torch.device,
        start_step: int = 0,
        excluded: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.config = config
        self.folder = run_directory.path
        self.rank = rank
        self.excluded = excluded
        self.last_step = start_step
        self.trace: profile | None = None
        if config.enable_profiling:
            # A trace covers one step, so clearing the events of the previous one is intended.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            is_cuda = device.type == "cuda"
            self.trace = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
                schedule=lambda _: self._action(self.last_step + 1),  # torch's count ignores resumes and rollbacks
                on_trace_ready=self._save_trace,
                record_shapes=True,
            )
            self.trace.start()
        if config.enable_memory_snapshot:
            # Otherwise each dump would look up the names of all C++ frames, which is slow.
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS, stacks="python")

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self.snapshot(f"step_{self.last_step + 1:08d}_oom")
        if self.trace is not None:
            self.trace.on_trace_ready = None  # an unfinished step is not a trace
            self.trace.stop()
        if self.config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def step(self, step: int) -> None:
        """Call it at the end of every training step."""
        self.last_step = step
        is_snapshot_due = self.config.enable_memory_snapshot and step % self.config.profile_freq == 0
        with self.excluded() if is_snapshot_due or self._tracer_changes() else nullcontext():
            if self.trace is not None:
                self.trace.step()
            if is_snapshot_due:
                self.snapshot(f"step_{step:08d}")

    def snapshot(self, name: str) -> None:
        """Write a memory snapshot, if they are enabled."""
        if self.config.enable_memory_snapshot:
            path = self.folder / self.config.save_memory_snapshot_folder / name / f"rank{self.rank}.pickle"
            _write(path, torch.cuda.memory._dump_snapshot)

    def _action(self, step: int) -> ProfilerAction:
        """Of torch's profiler in training step `step`, counted from 1."""
        until_traced = -step % self.config.profile_freq
        if until_traced == 0:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if until_traced <= _WARMUP_STEPS else ProfilerAction.NONE

    def _tracer_changes(self) -> bool:
        """Whether the tracer starts, stops or writes between the last step and the next one."""
        if self.trace is None:
            return False
        action = self.trace.current_action
        return action == ProfilerAction.RECORD_AND_SAVE or action != self._action(self.last_step + 1)

    def _save_trace(self, trace: profile) -> None:
        folder = self.folder / self.config.save_traces_folder / f"step_{self.last_step:08d}"
        _write(folder / f"rank{self.rank}.json", trace.export_chrome_trace)


def _write(path: Path, save: Callable[[str], object]) -> None:
    """Have `save` write to a temporary file, then rename it, so that a killed run leaves no partial trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_path(path)
    save(str(partial))
    os.replace(partial, path)
