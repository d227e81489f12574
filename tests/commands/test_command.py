# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The command `torchditan`: its table of commands, and the list of configurations."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torchditan.commands import COMMANDS

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_command_has_a_module_and_a_line_of_help(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_script("torchditan", "--help")
    assert (outcome.code, outcome.err) == (0, "")
    for name, command in COMMANDS.items():
        assert find_spec(command.module) is not None, name
        assert re.search(rf"^  {name} +{re.escape(command.help)}$", outcome.out, flags=re.MULTILINE), name
    assert run_script("torchditan").out == outcome.out


def test_help_takes_less_than_three_tenths_of_a_cpu_second_and_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "torchditan", "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3  # other jobs share the cores
    assert not re.search(r"\| +(torch|numpy)$", done.stderr, flags=re.MULTILINE)


def test_the_list_states_the_hardware_of_the_page(run_script: RunScript) -> None:
    """docs/index.md has a row for each configuration, with the hardware that its file names."""
    shown = run_script("torchditan", "list").out
    page = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8").partition("\nGrids of runs")[0]
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \|", page, flags=re.MULTILINE)
    stated = {name: hardware for hardware, names in rows for name in re.findall(r"`([^`]+)`", names)}
    listed = re.findall(r"^  (\S+) +\S.*\n +\[(.+)\]$", shown, flags=re.MULTILINE)
    assert dict(listed) == stated and len(stated) > 15
