# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Commands that only print end quietly when their reader closes the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = {
    "planner": ["-m", "torchditan.planner", "quickstart", "--device", "cpu", "--num_devices", "2"],
    "dry run": ["-m", "torchditan.ablation", "run", "0.5B", "--dry-run"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_ends_a_command_without_a_traceback(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    reading, writing = os.pipe()
    os.close(reading)  # the reader is gone before the first line
    try:
        run = subprocess.run(
            [sys.executable, *COMMANDS[name]],
            cwd=tmp_path,
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        os.close(writing)
    assert "Traceback" not in run.stderr
    assert "BrokenPipe" not in run.stderr
    assert run.returncode == 0
