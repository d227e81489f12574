# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Fixtures that replace torchrun and train.py by fakes (stand_ins.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stand_ins import REPOSITORY, TORCHRUN, TRAIN

from torchditan.ablation import launch


@pytest.fixture
def train_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-in for train.py; launches in this process use a stand-in for torchrun."""
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    monkeypatch.setattr(launch, "TORCHRUN", (sys.executable, str(tmp_path / "torchrun.py")))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delenv("TORCHDITAN_RANKS_FOLDER", raising=False)
    return script
