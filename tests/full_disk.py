# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A disk that is full while checkpoints of some steps are written."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchditan.checkpoint.files import step_of
from torchditan.checkpoint.manager import CheckpointManager


def limit_writes(monkeypatch: pytest.MonkeyPatch, *, size: int = 1_000_000) -> list[int]:
    """While checkpoints of the returned steps are written, at first none, the system takes no file above `size`, in
    bytes."""
    steps: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_files, save_weights = CheckpointManager._write_files, CheckpointManager.save_weights

    def limited(self: CheckpointManager, step: int, write: Callable[[], Any]) -> Any:
        if step in steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            return write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def write_some(self: CheckpointManager, partial: Path, *arguments: Any) -> Any:
        return limited(self, step_of(partial.with_suffix("")), lambda: write_files(self, partial, *arguments))

    def save_some(self: CheckpointManager) -> None:
        limited(self, self.state.progress.step, lambda: save_weights(self))

    monkeypatch.setattr(CheckpointManager, "_write_files", write_some)
    monkeypatch.setattr(CheckpointManager, "save_weights", save_some)
    return steps
