# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checkpoints in torch's distributed format: sharded writing, and loading on any mesh and world size.

A checkpoint is `step-00000100/`: the tensors of model, EMA and optimizer, the run's `config.json`, and
`progress.json` with the integers that the rest of a run follows from (learning rate, data position and
randomness are functions of them). It is written beside, as `step-00000100.partial`, and published by one rename.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from torchditan.config import ConfigError, option_error
from torchditan.ema import EMA

_NAME = re.compile(r"step-(\d{8})")
_PROGRESS = "progress.json"
_CONFIG = "config.json"


@dataclasses.dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    images_seen: int = 0
    """Position in the training stream: samples consumed over all ranks."""
    elapsed_s: float = 0.0
    """Seconds spent training, over all parts of the run."""


class CheckpointManager:
    """Saves, prunes and loads the checkpoints of one run; every method is called by all ranks."""

    def __init__(
        self,
        folder: Path,
        *,
        model: nn.Module,
        ema: EMA | None,
        optimizer: Optimizer,
        keep_latest_k: int,
        config: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.model = model
        self.ema = ema
        self.optimizer = optimizer
        self.keep_latest_k = keep_latest_k
        self.config = config

    def save(self, progress: Progress, *, loader_state: dict[str, Any] | None = None) -> Path:
        """Write the checkpoint of this step and drop the oldest ones.

        Args:
            progress: stored as JSON beside the tensors.
            loader_state: this rank's position in a source that can only be streamed, JSON-able.
        """
        target = self.folder / f"step-{progress.step:08d}"
        partial = target.with_suffix(".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(self._state(), checkpoint_id=partial)
        if loader_state is not None:
            _write_json(partial / f"loader_rank{dist.get_rank()}.json", loader_state)
        dist.barrier()
        if dist.get_rank() == 0:
            _write_json(partial / _CONFIG, self.config)
            _write_json(partial / _PROGRESS, dataclasses.asdict(progress))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
        dist.barrier()
        if dist.get_rank() == 0:
            self._prune()
        return target

    def load_latest(self) -> tuple[Progress, dict[str, Any] | None] | None:
        """Load the newest checkpoint; None where there is none."""
        checkpoint = latest_checkpoint(self.folder)
        if checkpoint is None:
            return None
        state = self._state()
        dcp.load(state, checkpoint_id=checkpoint)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        loader = checkpoint / f"loader_rank{dist.get_rank()}.json"
        loader_state = json.loads(loader.read_text()) if loader.exists() else None
        return read_progress(checkpoint), loader_state

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        return state

    def _prune(self) -> None:
        if self.keep_latest_k:
            for old in list_checkpoints(self.folder)[: -self.keep_latest_k]:
                shutil.rmtree(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def latest_checkpoint(folder: Path) -> Path | None:
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    checkpoints = {int(path.name.removeprefix("step-")): path for path in list_checkpoints(folder)}
    if not checkpoints:
        raise ConfigError(f"{folder} holds no checkpoint; train with --checkpoint.enable_checkpoint")
    if step is not None and step not in checkpoints:
        raise option_error("--step", step, f"no such checkpoint in {folder}; there are {sorted(checkpoints)}")
    return checkpoints[max(checkpoints) if step is None else step]


def read_progress(checkpoint: Path) -> Progress:
    return Progress(**json.loads((checkpoint / _PROGRESS).read_text()))


def load_weights(model: nn.Module, checkpoint: Path, *, ema: bool) -> None:
    """Load only the weights of a checkpoint, averaged or raw, into a model, in place."""
    weights = get_model_state_dict(model)
    key = "ema" if ema else "model"
    with warnings.catch_warnings():
        # Of a load in one process, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({key: weights}, checkpoint_id=checkpoint, no_dist=True)
    set_model_state_dict(model, weights)


def read_state(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint whose name begins with `prefix`, on the CPU, in one process.

    Names are `model.<parameter>`, `ema.<parameter>` and `optimizer.state.<parameter>.<exp_avg, exp_avg_sq or step>`.
    """
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    with warnings.catch_warnings():
        # Of a load in one process, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
