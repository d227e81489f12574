# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/options.md is generated, and current."""

from __future__ import annotations

from pathlib import Path

from torchditan.config.reference import reference
from torchditan.config.schema import options
from torchditan.config.trajectory import TRAJECTORY_KEYS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_the_page_is_current_has_every_option_and_marks_the_trajectory() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == f"{reference()}\n", "run python -m torchditan.config.reference > docs/options.md"
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() >= options().keys()
    assert {option for option in options() if "| fixed |" in rows[option]} == set(TRAJECTORY_KEYS)
