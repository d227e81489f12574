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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchditan.config.errors import option_error
from torchditan.config.options import Profiling
from torchditan.run.atomic_files import temporary_path
from torchditan.run.directory import RunDirectory

_WARMUP_STEPS = 3  # otherwise the first traced step includes the start of the tracer
_MAX_MEMORY_EVENTS = 100_000


def check_profiling(config: Profiling, device: torch.device) -> None:
    """Raise ConfigError if `config` needs something that `device` does not support."""
    if config.enable_memory_snapshot and device.type != "cuda":
        right = f"needs CUDA, this run is on {device.type}; leave it out"
        raise option_error("profiling.enable_memory_snapshot", True, right)


class Profiler:
    """Yielded by `profiling`; call `step` at the end of every training step."""

    def __init__(self, start_step: int, excluded: Callable[[], AbstractContextManager[object]]) -> None:
        self.last_step = start_step
        self.num_calls = 0
        """Number of finished steps, including rolled-back ones, as torch's profiler counts them."""
        self.excluded = excluded
        self.on_step: list[Callable[[], None]] = []
        self.is_slow: list[Callable[[int], bool]] = []

    def step(self, step: int) -> None:
        assert step == self.last_step + 1, f"step {step} after {self.last_step}"
        self.last_step = step
        self.num_calls += 1
        with self.excluded() if any(is_slow(step) for is_slow in self.is_slow) else nullcontext():
            for call in self.on_step:
                call()

    def return_to(self, step: int) -> None:
        """Return to `step` after a rollback: later steps run again."""
        self.last_step = step


@contextmanager
def profiling(
    config: Profiling,
    run_directory: RunDirectory,
    rank: int,
    *,
    device: torch.device,
    start_step: int = 0,
    excluded: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Profiler]:
    """Profile the steps in the body according to `config`; every rank writes separate files.

    Args:
        excluded: context manager for work after a step that does not count as training.
    """
    check_profiling(config, device)
    profiler = Profiler(start_step, excluded)
    with ExitStack() as stack:
        if config.enable_profiling:
            folder = run_directory.folder(config.save_traces_folder)
            stack.enter_context(_traces(profiler, folder, rank, device, config.profile_freq))
        if config.enable_memory_snapshot:
            folder = run_directory.folder(config.save_memory_snapshot_folder)
            stack.enter_context(_memory_snapshots(profiler, folder, rank, config.profile_freq))
        yield profiler


def trace_action(step: int, profile_freq: int) -> ProfilerAction:
    """Action of the profiler during training step `step`, counted from 1."""
    until_traced = -step % profile_freq
    if until_traced == 0:
        return ProfilerAction.RECORD_AND_SAVE
    return ProfilerAction.WARMUP if until_traced <= _WARMUP_STEPS else ProfilerAction.NONE


def _changes_after(step: int, profile_freq: int) -> bool:
    """Whether the tracer starts, stops or writes after `step`."""
    action = trace_action(step, profile_freq)
    return action == ProfilerAction.RECORD_AND_SAVE or action != trace_action(step + 1, profile_freq)


@contextmanager
def _traces(profiler: Profiler, folder: Path, rank: int, device: torch.device, profile_freq: int) -> Iterator[None]:
    def save(trace: profile) -> None:
        _write(folder / _step_name(profiler.last_step) / f"rank{rank}.json", trace.export_chrome_trace)

    # A trace covers one step, so clearing the events of the previous one is intended.
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    first = profiler.last_step + 1
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trace = profile(
        activities=activities,
        schedule=lambda count: trace_action(first + count, profile_freq),
        on_trace_ready=save,
        record_shapes=True,
    )
    trace.start()
    profiler.on_step.append(trace.step)
    profiler.is_slow.append(lambda _: _changes_after(first + profiler.num_calls - 1, profile_freq))
    try:
        yield
    finally:
        trace.on_trace_ready = None  # an unfinished step is not a trace
        trace.stop()


@contextmanager
def _memory_snapshots(profiler: Profiler, folder: Path, rank: int, profile_freq: int) -> Iterator[None]:
    dump = torch.cuda.memory._dump_snapshot

    def is_due(step: int) -> bool:
        return step % profile_freq == 0

    def save() -> None:
        if is_due(profiler.last_step):
            _write(folder / _step_name(profiler.last_step) / f"rank{rank}.pickle", dump)

    # Otherwise each dump would look up the names of all C++ frames, which is slow.
    torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS, stacks="python")
    profiler.on_step.append(save)
    profiler.is_slow.append(is_due)
    try:
        yield
    except torch.OutOfMemoryError:
        _write(folder / f"{_step_name(profiler.last_step + 1)}_oom" / f"rank{rank}.pickle", dump)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _step_name(step: int) -> str:
    return f"step_{step:08d}"


def _write(path: Path, save: Callable[[str], object]) -> None:
    """Have `save` write to a temporary file, then rename it, so that a killed run leaves no partial trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_path(path)
    save(str(partial))
    os.replace(partial, path)
