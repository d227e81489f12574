# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Snapshots of power-function averages during training, for a reconstruction afterwards (`ema.post_hoc_widths`).

Notable:
- a snapshot is written like a checkpoint (manager.py): every rank writes its shards, and one rename publishes the
  folder with its checksums. Nothing prunes snapshots;
- a snapshot is on disk before any later checkpoint. A killed run therefore never resumes behind a missing snapshot,
  except one that a full disk refused;
- the snapshots of a folder always belong to one sequence of steps. If a run resumes or rolls back, the first snapshot
  that it writes replaces all snapshots of the steps that the run takes again.
"""

from __future__ import annotations

import shlex
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchditan.checkpoint.files import discard, discard_unfinished, list_checkpoints, step_of
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_state import ModelState, RunState, Snapshot
from torchditan.config.options import Config
from torchditan.distributed.torch_versions import set_group_timeout
from torchditan.models.saved_weights import saved_parameters
from torchditan.optim.divergence import DivergenceGuard
from torchditan.optim.power_ema import PowerEMA, num_snapshots
from torchditan.supervision.exit_status import NotSaved
from torchditan.supervision.supervision import Supervision

AVERAGES = "post_hoc_ema"
"""Name of the averages in a checkpoint and in a snapshot, and of the folder of snapshots in `checkpoint.folder`."""


class PostHocEMA:
    """The averages of one run and their snapshots. All ranks call every method.

    Args:
        model: the model to average.
        config: the resolved settings, with `ema.post_hoc_widths`.
        run_folder: run directory.
        supervision: provides the logger, and the progress of the run.
        guard: checks the last step before its weights are stored.
    """

    def __init__(
        self, model: nn.Module, *, config: Config, run_folder: Path, supervision: Supervision, guard: DivergenceGuard
    ) -> None:
        self.config = config
        self.run_folder = run_folder
        self.supervision = supervision
        self.progress = supervision.progress
        self.guard = guard
        only_trained = config.lora.rank > 0
        self.averages = PowerEMA(model, widths=config.ema.post_hoc_widths, only_trained=only_trained)
        buffers = BuffersState(model, only_trained=only_trained)
        tensors = {AVERAGES: self.averages, "model": buffers if buffers.state_dict() else None}
        self.manager = SnapshotManager(
            snapshot_folder(run_folder, config),
            RunState(self.progress, tensors=tensors),
            config=config,
            timeout_seconds=config.comm.init_timeout_seconds,
            warn=supervision.warn,
        )
        self._updated_step: int | None = None
        """The last step in the averages that this process added; None before the first."""

    def announcement(self) -> str:
        """What the snapshots contain and the disk space that they take, in one line."""
        steps, options = self.config.training.steps, self.config.ema
        number, size = num_snapshots(steps, options.post_hoc_interval), self.averages.num_bytes
        existing = next(folder for folder in (self.manager.folder, *self.manager.folder.parents) if folder.exists())
        return (
            f"averages of widths {', '.join(map(str, options.post_hoc_widths))}: {number} snapshots of "
            f"{size / 1e9:,.3f} GB, {number * size / 1e9:,.3f} GB in all, in {self.manager.folder} "
            f"({shutil.disk_usage(existing).free / 1e9:,.1f} GB free); the same {size / 1e9:,.3f} GB in each checkpoint"
        )

    def add_step(self) -> None:
        """Add the weights of this step to the averages, and store a snapshot if one is due. Before any checkpoint."""
        step = self.progress.step
        if self._updated_step is None or step != self._updated_step + 1:  # the first step, or after a rollback
            self.manager.last_step = step - 1
        self._updated_step = step
        self.averages.update(step)
        if step % self.config.ema.post_hoc_interval == 0 and step < self.config.training.steps:
            self._save()

    def finish(self) -> None:
        """Store the snapshot of the last step, unless a resumed run finds it.

        Raises:
            NotSaved: it cannot be written.
        """
        step = self.progress.step
        if self._updated_step is None:
            if (self.manager.folder / f"step-{step:08d}").exists():
                return
            self.manager.last_step = step
        self._save()
        if self.manager.failure is not None:
            again = "the same command writes it, if the run kept its last checkpoint"
            raise NotSaved(f"the last snapshot of the averages could not be written: {self.manager.failure}; {again}")
        run = shlex.quote(str(self.run_folder))
        self.supervision.warn(f"average of another width: torchditan average {run} --width 0.075")

    def _save(self) -> None:
        logger = self.supervision.logger
        assert logger is not None
        self.supervision.note(self.progress.step, "saving averages")
        self.guard.wait()
        with logger.timer.excluded("post_hoc_ema"), self.supervision.reporting("saving averages"):
            self.manager.save()

    def state_dict(self) -> dict[str, Any]:
        return self.averages.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages.load_state_dict(state_dict)


class SnapshotManager(CheckpointManager):
    """Writes snapshots, at once and not in a thread, and never prunes them."""

    what = "snapshot of the averages"

    def __init__(self, folder: Path, state: RunState, *, config: Config, timeout_seconds: int, **options: Any) -> None:
        super().__init__(folder, state, config=config, timeout_seconds=timeout_seconds, **options)
        self.stager = None  # in the background, a checkpoint of a later step could be published first
        self.keep_latest_k = 0
        self.timeout = timedelta(seconds=timeout_seconds)
        self.last_step = 0
        """Snapshots up to this step belong to the run; later ones are of steps that the run takes again."""
        if dist.get_rank() == 0:
            discard_unfinished(folder)

    def save(self) -> None:
        # Between steps, ranks wait for each other less long than for a disk.
        set_group_timeout(self.group, self.timeout)
        super().save()

    def _publish(self, partial: Path, target: Path, snapshot: Snapshot, checksums: dict[str, list[Any]]) -> None:
        if dist.get_rank() == 0:  # the new snapshot is complete, but has no name yet
            for path in list_checkpoints(self.folder):
                if step_of(path) > self.last_step:
                    discard(path)
        super()._publish(partial, target, snapshot, checksums)
        self.last_step = snapshot.step


class BuffersState(ModelState):
    """The persistent buffers of a model, which complete averaged parameters. None under a LoRA."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        parameters = saved_parameters(self.model)
        return {name: tensor for name, tensor in super().state_dict().items() if name not in parameters}


def snapshot_folder(run_folder: Path, config: Config) -> Path:
    """Folder of a run's snapshots."""
    return run_folder / config.checkpoint.folder / AVERAGES
