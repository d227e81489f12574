# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/options.md equals the text that the configuration generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torchditan.config.reference import reference
from torchditan.config.schema import options
from torchditan.config.trajectory import TRAJECTORY_KEYS

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = "python -m torchditan.config.reference > docs/options.md"


def rows() -> dict[str, str]:
    """Option -> its line in the reference."""
    lines = (line for line in reference().splitlines() if line.startswith("| `"))
    return {line.split("`")[1]: line for line in lines}


def test_the_option_reference_is_current() -> None:
    page = (REPOSITORY / "docs" / "options.md").read_text(encoding="utf-8")
    assert page.split("\n") == f"{reference()}\n".split("\n"), f"generate it again: {COMMAND}"


def test_the_reference_has_every_option_and_marks_the_trajectory() -> None:
    assert rows().keys() >= options().keys()
    assert {option for option in options() if "| fixed |" in rows()[option]} == set(TRAJECTORY_KEYS)


def test_the_reference_is_generated_without_torch() -> None:
    script = "import sys; import torchditan.config.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0
