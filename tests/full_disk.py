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


def limit_writes(
    manager: type[CheckpointManager],
    monkeypatch: pytest.MonkeyPatch,
    *,
    size: Callable[[Path], int] = lambda folder: 1_000_000,
) -> list[int]:
    """While `manager` writes the files of the returned steps, at first none, the system takes no file above `size`, in
    bytes, which may depend on the folder of checkpoints."""
    steps: list[int] = []
    write_files = manager._write_files
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self: CheckpointManager, partial: Path, *arguments: Any) -> Any:
        if step_of(partial.with_suffix("")) in steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size(self.folder), limits[1]))
        try:
            return write_files(self, partial, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(manager, "_write_files", limited)
    return steps
