# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoints of one run: saving, resuming, stopping and rolling back.

Notable:
- ranks stop only after a step that all agree on (`StopPoint`), and return to a checkpoint together (`Rollback`);
- a run that kept its weights never overwrites them from the first step, whatever the options.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from torchditan.checkpoint.files import latest_checkpoint
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.config.options import Config
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.ema import EMA
from torchditan.run.directory import RunDirectory
from torchditan.supervision.exit_status import Interrupted, NotSaved
from torchditan.supervision.preemption import StopRequest
from torchditan.supervision.supervision import Supervision

_MAX_ROLLBACKS = 3
"""Returns to the same checkpoint, after which a run ends."""


class RunCheckpoints:
    """Saves and loads the complete run.

    Args:
        manager: writes and reads the state of the run.
        supervision: provides the logger, and the progress that is part of the state.
        guard: checks the last step before its weights are saved.
    """

    def __init__(self, manager: CheckpointManager, *, supervision: Supervision, guard: DivergenceGuard) -> None:
        self.manager = manager
        self.supervision = supervision
        self.progress = supervision.progress
        self.guard = guard
        self.saved_step = -1
        """Step of the newest checkpoint; -1 if there are none."""
        self.has_only_average = False
        """Whether the run continued from final weights that are an average."""

    def save(self, *, complete: bool = False) -> None:
        """Save this step. With `complete`, also wait until an asynchronous write has finished."""
        progress, logger = self.progress, self.supervision.logger
        assert logger is not None
        self.supervision.note(progress.step, "saving")
        self.guard.wait()
        with logger.timer.excluded("checkpoint"), self.supervision.reporting("saving"):
            progress.elapsed_s = logger.elapsed_s
            logger.flush()
            if self.manager.has_checkpoints:
                self.manager.save()
            else:
                self.manager.save_weights()
            if complete:
                self.manager.wait()
            self.saved_step = progress.step

    def load_latest(self) -> bool:
        """Continue from the newest complete checkpoint. Returns whether there was one."""
        found = self.manager.load_latest()
        if found:
            self.saved_step = self.progress.step
        return found

    def resume(
        self, run_directory: RunDirectory, *, ema: EMA | None, load_weights: Callable[[], str] | None
    ) -> str | None:
        """Continue from the newest complete checkpoint of the run. Without one, load the initial weights.

        Args:
            load_weights: loads the initial weights and returns their description; None keeps those of the model.

        Returns:
            Description of the initial weights, for the log.
        """
        loaded = None
        if not self.load_latest():
            if self.manager.load_final_weights():
                self.saved_step = self.progress.step
                self.has_only_average = ema is not None
            elif load_weights is not None:
                loaded = load_weights()
            if ema is not None:
                ema.restart()
        run_directory.truncate_metrics(self.progress.step)
        return loaded

    def wait_for_last(self) -> None:
        """Wait for an unfinished write.

        Raises:
            NotSaved: it failed. Continuing would silently lose the progress since the previous checkpoint.
        """
        with self.supervision.reporting("saving"):
            self.manager.wait()
        if self.manager.failure is not None:
            reason = f"the last checkpoint could not be written: {self.manager.failure}"
            has_earlier = latest_checkpoint(self.manager.folder) is not None
            again = "continues from the one before" if has_earlier else "starts again from the first step"
            raise NotSaved(f"{reason}; the same command {again}")


class StopPoint:
    """Ends the run after a step, with a checkpoint, once any rank has received a stop request.

    Ranks share the request as the maximum over a flag in host memory, on a separate process group, so that no rank
    waits for a device.
    """

    def __init__(self, request: StopRequest, config: Config, checkpoints: RunCheckpoints) -> None:
        self.request = request
        self.config = config
        self.checkpoints = checkpoints
        self.supervision = checkpoints.supervision
        self.group: dist.ProcessGroup | None = None
        if self.supervision.rank.world_size > 1:
            timeout = timedelta(seconds=config.comm.init_timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Start sending this rank's flag, while the optimizer runs."""
        if self._work is not None:
            self._work.wait()  # of a step that diverged, before its result was read
        self._flag.fill_(self.request.signal or 0)
        if self.group is not None:
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def stop_if_asked(self) -> None:
        """End the run with a checkpoint if any rank received a stop request. All ranks learn it at the same step.

        Raises:
            Interrupted: a rank received a request.
        """
        step = self.supervision.progress.step
        self.supervision.note(step, "agreeing whether to stop")
        if self._work is not None:
            self._work.wait()
        number = int(self._flag.item())
        if number and step != self.config.training.steps:
            raise Interrupted(self._save_before_end(signal.Signals(number), step))

    def _save_before_end(self, number: signal.Signals, step: int) -> str:
        """Save the run. Returns why it ends, and how it continues."""
        if step == self.supervision.start_step:
            return f"stopped by {number.name} before any step; the same command starts from the same point"
        reason = f"stopped by {number.name} after step {step}"
        if not self.config.checkpoint.enable_checkpoint:
            saved = self.checkpoints.saved_step
            earlier = f"; step {saved} is saved" if saved >= 0 else " nothing was saved"
            return f"{reason}; without checkpoint.enable_checkpoint{earlier}"
        if step != self.checkpoints.saved_step:
            self.checkpoints.save()
        manager = self.checkpoints.manager
        manager.wait()
        if manager.failure is not None:
            return f"{reason}, which could not be saved ({manager.failure})"
        return f"{reason}; the same command continues there"


class Rollback:
    """Returns a diverged run to its last checkpoint, and skips the data of the step that diverged."""

    def __init__(self, config: Config, checkpoints: RunCheckpoints, *, global_batch_size: int) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.guard = checkpoints.guard
        self.global_batch_size = global_batch_size
        self.tried_step: int | None = None
        self.num_tries = 0

    def to_last_checkpoint(self, divergence: DivergenceError) -> str:
        """Load the last checkpoint, and skip the data up to the step that diverged.

        Returns:
            A warning that describes the rollback.

        Raises:
            DivergenceError: `training.on_nonfinite` is "stop", or the run returned to this checkpoint too often.
        """
        training, progress = self.config.training, self.checkpoints.progress
        if training.on_nonfinite == "stop":
            self.checkpoints.manager.wait()  # an earlier step, which is healthy, may still be written
            raise divergence
        rollbacks = progress.rollbacks
        behind = progress.position
        if progress.step < divergence.step:
            behind += self.global_batch_size  # on a CPU, the step is not counted yet
        self.guard.forget()
        self.guard.optimizer.zero_grad()
        if not self.checkpoints.load_latest():
            raise divergence
        self.num_tries = 1 if progress.step != self.tried_step else self.num_tries + 1
        self.tried_step = progress.step
        if self.num_tries > _MAX_ROLLBACKS:
            after = f"after {_MAX_ROLLBACKS} rollback(s) to step {progress.step}, each with other data"
            raise DivergenceError(divergence.step, f"{divergence.what}, {after}")
        progress.rollbacks = rollbacks + 1
        first, progress.position = progress.position, behind
        return (
            f"warning: step {divergence.step}: {divergence.what}; back to step {progress.step}, without images "
            f"{first:,} to {behind - 1:,} of the stream (rollback {progress.rollbacks})"
        )
