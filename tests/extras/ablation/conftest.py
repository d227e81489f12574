# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Fixtures that replace torchrun and train.py by fakes (stand_ins.py)."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins import CPU, REPOSITORY, TORCHRUN, TRAIN

from torchditan.extras.ablation import launch
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import Grid
from torchditan.extras.ablation.launch import LocalLauncher
from torchditan.extras.ablation.runner import run_grid

Table = list[dict[str, Any]]
RunHere = Callable[..., Table]


@pytest.fixture
def train_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-in for train.py; launches in this process use a stand-in for torchrun, on one CPU."""
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    monkeypatch.setattr(launch, "TORCHRUN", (sys.executable, str(tmp_path / "torchrun.py")))
    monkeypatch.setattr(Device, "here", lambda: CPU)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delenv("TORCHDITAN_RANKS_FOLDER", raising=False)
    return script


@pytest.fixture
def run_here(tmp_path: Path, train_script: Path) -> RunHere:
    """`run_here(grid)`: its rows; stand-ins do the work, nothing is printed."""

    def run(grid: Grid, **options: Any) -> Table:
        path = tmp_path / "outputs" / grid.name
        settings = {"launcher": LocalLauncher(path), "program": (str(train_script),), "stream": io.StringIO()}
        return run_grid(grid, path=path, **{**settings, **options})

    return run
