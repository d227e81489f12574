# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TensorBoard, W&B and Trackio behind one interface, opened so that a resumed run continues its curves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

from torchditan.config.options import Metrics
from torchditan.errors import option_error
from torchditan.run.directory import RunDirectory
from torchditan.run.reading import read_config


def check_trackers(config: Metrics) -> None:
    """Raise ConfigError if a requested tracker is not installed."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
    for package, module in modules.items():
        try:
            if getattr(config, f"enable_{package}"):
                import_module(module)
        except ImportError:
            right = f"needs the {package} package: pip install {package}"
            raise option_error(f"metrics.enable_{package}", True, right) from None


class TensorBoard:
    """Event files. Its methods raise OSError if the disk is full."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder = folder
        self._open(start_step)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide events of a killed run after its last checkpoint, or all of them without one: those steps run again.
        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int, *, legacy: Mapping[str, float]) -> None:
        for key, value in {**numbers, **legacy}.items():
            self._writer.add_scalar(key, value, step)

    def log_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def roll_back(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of W&B: offline without a login."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self._wandb: Any = import_module("wandb")
        stored = read_config(run_directory.path)
        run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchditan"),
            name=run_directory.path.name,
            id=stored["run_id"],  # a resumed run continues its curves
            resume="allow",
            dir=str(run_directory.path),
            config=stored["config"],
            mode=None if os.environ.get("WANDB_MODE") or _has_wandb_login() else "offline",
            settings=self._wandb.Settings(console="off"),  # it would record the progress bar
        )
        # Steps repeat after a resume, which is allowed for a plain metric.
        run.define_metric("*", step_metric="step")
        self._run = run

    def log(self, numbers: Mapping[str, float], step: int, *, legacy: Mapping[str, float]) -> None:
        """The `legacy` tags are of TensorBoard only."""
        self._run.log({**numbers, "step": step})

    def log_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._run.log({name: self._wandb.Image(pixels), "step": step})

    def roll_back(self, step: int) -> None:
        """Records of repeated steps follow the earlier ones."""

    def flush(self) -> None:
        """W&B writes by itself."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, whose database is on this machine, in TRACKIO_DIR."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self._trackio: Any = import_module("trackio")
        stored = read_config(run_directory.path)
        self._run = self._trackio.init(
            project="torchditan",
            name=f"{run_directory.path.name}-{stored['run_id']}",  # by which a resumed run finds its curves
            resume="allow",
            config=stored["config"],
            embed=False,  # it would open its page in a notebook
        )

    def log(self, numbers: Mapping[str, float], step: int, *, legacy: Mapping[str, float]) -> None:
        """The `legacy` tags are of TensorBoard only."""
        self._run.log(dict(numbers), step=step)

    def log_image(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._run.log({name: self._trackio.Image(pixels)}, step=step)

    def roll_back(self, step: int) -> None:
        """Records of repeated steps follow the earlier ones."""

    def flush(self) -> None:
        """Trackio writes by itself, every half second."""

    def close(self) -> None:
        self._trackio.finish()


Tracker = TensorBoard | WandB | Trackio


def open_trackers(config: Metrics, run_directory: RunDirectory, *, start_step: int) -> list[Tracker]:
    """Those that the options ask for, for a run that continues after `start_step`."""
    trackers: list[Tracker] = []
    if config.enable_tensorboard:
        trackers.append(TensorBoard(run_directory.path / config.save_tb_folder, start_step))
    if config.enable_wandb:
        trackers.append(WandB(run_directory))
    if config.enable_trackio:
        trackers.append(Trackio(run_directory))
    return trackers


def _has_wandb_login() -> bool:
    """Whether ~/.netrc contains a line by `wandb login`. wandb itself would prompt for a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc().authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
