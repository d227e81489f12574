# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TensorBoard and W&B, opened so that a resumed run continues its curves."""

from __future__ import annotations

import os
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from torchditan.config.options import Metrics
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_config


def open_tensorboard(folder: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # Hide events of a killed run after its last checkpoint, or all of them without one: those steps run again.
    return SummaryWriter(str(folder), purge_step=start_step + 1)


def open_wandb(config: Metrics, run_directory: RunDirectory) -> Any:
    wandb: Any = import_module("wandb")
    stored = read_config(run_directory.path)
    run = wandb.init(
        project=config.wandb_project,
        name=run_directory.path.name,
        id=stored["run_id"],  # a resumed run continues its curves
        resume="allow",
        dir=str(run_directory.path),
        config=stored["config"],
        mode=None if os.environ.get("WANDB_MODE") or _has_wandb_login() else "offline",
        settings=wandb.Settings(console="off"),  # it would record the progress bar
    )
    # Steps repeat after a resume, which is allowed for a plain metric.
    run.define_metric("*", step_metric="step")
    return run


def _has_wandb_login() -> bool:
    """Whether ~/.netrc contains a line by `wandb login`. wandb itself would prompt for a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc().authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
