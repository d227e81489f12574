# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoints of one run: what it saves, continues from, stops with and rolls back to.

Notable:
- ranks stop only after a step that all agree on (`StopPoint`), and return to a checkpoint together (`Rollback`);
- a run that kept its weights never starts over them, whatever the options.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from torchditan.checkpoint.loading import latest_checkpoint
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.config.options import Config
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.ema import EMA
from torchditan.run.directory import RunDirectory
from torchditan.supervision.exit_status import Interrupted
from torchditan.supervision.preemption import StopAgreement
from torchditan.supervision.supervision import Supervision


class RunCheckpoints:
    """Saves and loads the run as a whole.

    Args:
        manager: writes and reads the state of the run.
        supervision: has the logger, and the progress that is part of that state.
        guard: the last step is checked before its weights are saved.
    """

    def __init__(self, manager: CheckpointManager, *, supervision: Supervision, guard: DivergenceGuard) -> None:
        self.manager = manager
        self.supervision = supervision
        self.progress = supervision.progress
        self.guard = guard
        self.saved_step = -1
        """Step of the newest checkpoint; -1: there is none."""

    def save(self) -> None:
        progress, logger = self.progress, self.supervision.logger
        assert logger is not None
        self.supervision.note(progress.step, "saving")
        self.guard.wait()
        with logger.timer.excluded("checkpoint"), self.supervision.reporting("saving"):
            progress.elapsed_s = logger.elapsed_s
            logger.flush()
            self.manager.save()
            self.saved_step = progress.step

    def load_latest(self) -> bool:
        """Continue where the newest whole checkpoint is, if there is one."""
        found = self.manager.load_latest()
        if found:
            self.saved_step = self.progress.step
        return found

    def resume(
        self, run_directory: RunDirectory, *, ema: EMA | None, load_weights: Callable[[], str] | None
    ) -> str | None:
        """Continue from the newest whole checkpoint of the run; without one, start with given weights.

        Args:
            load_weights: gives the model its initial weights, and says which; None: it keeps those it has.

        Returns:
            What the initial weights were, for the log.
        """
        loaded = None
        if not self.load_latest() and load_weights is not None:
            loaded = load_weights()
            if ema is not None:
                ema.restart()
        run_directory.truncate_metrics(self.progress.step)
        return loaded

    def wait_for_last(self) -> None:
        """Wait for what is still being written.

        Raises:
            OSError: it could not be written; what the run learned since the one before would be lost in silence.
        """
        with self.supervision.reporting("saving"):
            self.manager.wait()
        if self.manager.failure is not None:
            reason = f"the last checkpoint could not be written: {self.manager.failure}"
            has_earlier = latest_checkpoint(self.manager.folder) is not None
            again = "continues from the one before" if has_earlier else "starts again from the first step"
            raise OSError(f"{reason}; the same command {again}")


class StopPoint:
    """Ends the run after a step, with a checkpoint, once any rank was asked to stop."""

    def __init__(
        self, agreement: StopAgreement, config: Config, checkpoints: RunCheckpoints, supervision: Supervision
    ) -> None:
        self.agreement = agreement
        self.config = config
        self.checkpoints = checkpoints
        self.supervision = supervision

    def begin(self) -> None:
        """Send this rank's answer while the optimizer works."""
        self.agreement.begin()

    def stop_if_asked(self) -> None:
        """End here, with a checkpoint, if any rank was asked to: all ranks learn it at the same step.

        Raises:
            Interrupted: they were.
        """
        step = self.supervision.progress.step
        self.supervision.note(step, "agreeing whether to stop")
        number = self.agreement.result()
        if number is not None and step != self.config.training.steps:
            raise Interrupted(self._save_before_end(number, step))

    def _save_before_end(self, number: signal.Signals, step: int) -> str:
        """Save what was learned; the reason of the end, and what comes next."""
        if step == self.supervision.start_step:
            return f"stopped by {number.name} before any step; the same command begins where this one did"
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
    """Takes a run that diverged back to its last checkpoint, and past the data of the step that diverged."""

    def __init__(
        self, config: Config, *, global_batch_size: int, guard: DivergenceGuard, checkpoints: RunCheckpoints
    ) -> None:
        self.config = config
        self.global_batch_size = global_batch_size
        self.guard = guard
        self.checkpoints = checkpoints
        self.tried_step: int | None = None
        self.num_tries = 0

    def to_last_checkpoint(self, divergence: DivergenceError) -> str:
        """Load it, and skip the data up to the step that diverged.

        Returns:
            A warning that says so.

        Raises:
            DivergenceError: the run is to stop at the first one, or came back to the same checkpoint too often.
        """
        training, progress = self.config.training, self.checkpoints.progress
        if training.on_nonfinite == "stop":
            self.checkpoints.manager.wait()  # for one of an earlier step, which is healthy
            raise divergence
        rollbacks = progress.rollbacks
        behind = progress.position
        if progress.step < divergence.step:
            behind += self.global_batch_size  # on a CPU the step is not counted yet
        self.guard.forget()
        self.guard.optimizer.zero_grad()
        if not self.checkpoints.load_latest():
            raise divergence
        self.num_tries = 1 if progress.step != self.tried_step else self.num_tries + 1
        self.tried_step = progress.step
        if self.num_tries > training.max_rollbacks:
            after = f"after {training.max_rollbacks} rollback(s) to step {progress.step}, each to other data"
            raise DivergenceError(divergence.step, f"{divergence.what}, {after}")
        progress.rollbacks = rollbacks + 1
        first, progress.position = progress.position, behind
        return (
            f"warning: step {divergence.step}: {divergence.what}; back to step {progress.step}, without images "
            f"{first:,} to {behind - 1:,} of the stream (rollback {progress.rollbacks})"
        )
