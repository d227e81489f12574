# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Supervision of one rank during training: its place, lost ranks, and the verdict when it ends.

It is created before anything else is built, so that a failure while building also gets a verdict.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchditan.distributed.process_group import Rank, set_timeout
from torchditan.errors import printable
from torchditan.run.directory import RunDirectory
from torchditan.run.metrics import MetricsLogger
from torchditan.run.progress import Advance, report_progress
from torchditan.run.reading import read_status
from torchditan.run.training_progress import Progress
from torchditan.supervision.exit_status import LOST_RANK, verdict_of
from torchditan.supervision.rank_status import write_rank_status

if TYPE_CHECKING:
    from torchditan.supervision.watchdog import RankWatch


class Supervision:
    """Watches one rank, prints its messages and records its verdict.

    Args:
        rank: this process.
        run_directory: open; `close` closes it.
    """

    def __init__(self, rank: Rank, run_directory: RunDirectory) -> None:
        self.rank = rank
        self.run_directory = run_directory
        self.progress = Progress()
        """The trainer's progress object, which changes in place."""
        self.start_step: int | None = None
        """Step at which this process started training; None while it is still building."""
        self.logger: MetricsLogger | None = None
        """Set by the trainer once the logger controls the console."""
        self.watch: RankWatch | None = None
        """None with a single rank."""
        self.timeout_seconds = 0
        """How long ranks wait for each other."""
        self._closing = ExitStack()  # in reverse order; a failure does not skip the rest
        self._closing.callback(run_directory.close)

    def connect(self, *, timeout_seconds: int) -> None:
        """Start watching the other ranks, if there are any. All ranks call it, with the process group open."""
        self.timeout_seconds = timeout_seconds
        if self.rank.world_size == 1:
            return
        from torchditan.supervision.watchdog import RankWatch

        folder = self.run_directory.path / "flight_recorder"
        self.watch = RankWatch(self.rank, timeout_seconds=timeout_seconds, on_lost=self.record_lost, folder=folder)
        self._closing.callback(self.watch.close)

    def log_with(self, logger: MetricsLogger) -> None:
        """Send messages through the logger from now on, and close it together with the rest."""
        self.logger = logger
        self._closing.callback(logger.close)

    def close(self) -> None:
        self._closing.close()

    def note(self, step: int, place: str) -> None:
        """Record that this rank is now in `step`, doing `place`. Reports of a lost rank contain it."""
        if self.watch is not None:
            self.watch.note(step, place)

    def set_timeout(self, seconds: int, *, but: dist.ProcessGroup | None) -> None:
        """Set how long ranks wait for each other, except in the process group that saves checkpoints."""
        set_timeout(seconds, but=but)
        self.timeout_seconds = seconds
        if self.watch is not None:
            self.watch.timeout_seconds = seconds

    def warn(self, text: str) -> None:
        """Print a line on rank 0, through the logger if it exists."""
        text = printable(text)  # it may name files
        if self.rank.rank == 0:
            self.logger.message(text) if self.logger is not None else print(text, file=sys.stderr, flush=True)

    def warn_here(self, text: str) -> None:
        """Print a line on this rank, which has seen what the others have not."""
        if self.rank.rank == 0:
            self.warn(text)
        else:
            print(f"rank {self.rank.rank}: {text}", file=sys.stderr, flush=True)

    def reporting(self, what: str) -> AbstractContextManager[Advance]:
        """Report progress of slow work, above the progress bar if the console has one."""
        return report_progress(what, say=None if self.logger is None else self.logger.message)

    def record_end(self, status: str, reason: str | None = None, *, exit_code: int = 0, **memory: Any) -> None:
        """Write the verdict that all ranks share, and close the process group."""
        if self.rank.rank == 0:
            self._write_status(status, reason)
        dist.barrier()
        write_rank_status(status, reason, step=self.progress.step, exit_code=exit_code, **memory)
        dist.destroy_process_group()
        if self.watch is not None:
            self.watch.close()  # no rank waits for this one while it deletes

    def record_failure(self, error: BaseException) -> None:
        """Write the verdict of an exception. Any rank may write it, since its exit ends the others.

        Raises:
            SystemExit: another rank caused it, with the cause.
        """
        status, exit_code, reason = verdict_of(error)
        if status == "interrupted" and self.rank.world_size > 1:
            status = "error"  # the ranks did not agree to stop
        is_everyones = exit_code == 2 and self.start_step is None  # every rank finds a mistake before the first step
        if self.watch is not None and not is_everyones:
            cause = self.watch.explain(error, reason)
            if cause is not None:
                self.record_lost(cause)
                raise SystemExit(f"rank {self.rank.rank}: {cause}") from None
        write_rank_status(status, reason, step=self.progress.step, exit_code=exit_code)
        is_first = self.rank.rank == 0
        if exit_code == 2 and is_first and self.start_step in (None, self.progress.step):
            self.run_directory.discard()
        elif is_first or (self.watch is not None and not is_everyones):
            self._write_status(status, reason)

    def record_stop(self, reason: str) -> None:
        """Record that a signal ends this rank without an agreement of all ranks."""
        step = self.progress.step
        reason = f"{reason} (after step {step}; the same command continues from the last checkpoint, if there is one)"
        write_rank_status("interrupted", reason, step=step, exit_code=75)
        if (read_status(self.run_directory.path) or {}).get("state") not in ("error", "oom"):
            self._write_status("interrupted" if self.rank.world_size == 1 else "error", reason)
        if self.watch is not None:
            self.watch.close(reason)

    def record_lost(self, cause: str) -> None:
        """Record the cause that another rank is; the watching thread also calls this."""
        write_rank_status("error", cause, step=self.progress.step, exit_code=1)
        if cause.startswith(LOST_RANK):  # a rank that failed by itself has written why
            self._write_status("error", cause)

    def _write_status(self, status: str, reason: str | None) -> None:
        self.run_directory.write_status(status, reason, step=self.progress.step, rank=self.rank.rank)
