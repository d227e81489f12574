# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Grids whose runs are made in this process (jobs_here.py)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_here import CPU, execute_here

from torchditan.extras.ablation import autotune, maker
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import Grid
from torchditan.extras.ablation.launch import LocalLauncher
from torchditan.extras.ablation.runner import run_grid

Table = list[dict[str, Any]]
RunHere = Callable[..., Table]


@pytest.fixture
def executed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs and trials are those of `execute_here`."""
    monkeypatch.setattr(maker, "execute", execute_here)
    monkeypatch.setattr(autotune, "execute", execute_here)
    monkeypatch.setattr(Device, "here", lambda: CPU)


@pytest.fixture
def run_here(tmp_path: Path, executed_here: None) -> RunHere:
    """`run_here(grid)`: its rows; nothing is printed."""

    def run(grid: Grid, **options: Any) -> Table:
        path = tmp_path / "outputs" / grid.name
        return run_grid(grid, path=path, **{"launcher": LocalLauncher(path), "stream": io.StringIO(), **options})

    return run
