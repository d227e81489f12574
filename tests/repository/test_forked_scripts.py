# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Scripts that tests run in forks behave as new processes do, with torchrun and without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

PRINT = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GIVEN")
line = " ".join(os.environ.get(name, "-") for name in names)
sys.stdout.write(f"{__name__} {sys.argv[1]} {line} {os.getcwd()}\\n")  # at once: two ranks write to one pipe
sys.stdout.flush()
print("to stderr", file=sys.stderr)
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
try:
    time.sleep(60)
except Exception as error:
    print("caught", repr(error), flush=True)
    raise
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_a_script_has_the_environment_of_torchrun_or_none(script: Path, run_distributed: RunDistributed) -> None:
    script.write_text(PRINT)
    for world_size, expected in ((None, ["- - - -"]), (2, ["0 0 2 none", "1 1 2 none"])):
        result = run_distributed([script, "word"], world_size, cwd=script.parent, env={"GIVEN": "yes"})
        assert result.returncode == 0, result.stderr
        lines = [f"__main__ word {rank} yes {script.parent}" for rank in expected]
        assert sorted(result.stdout.splitlines()) == lines
        assert result.stderr.count("to stderr") == len(expected)


def test_a_failed_rank_ends_the_others(script: Path, run_distributed: RunDistributed) -> None:
    script.write_text(FAIL)
    begun = time.monotonic()
    result = run_distributed([script], 2)
    assert result.returncode == 1
    assert result.stdout == ""  # SIGTERM ends a rank at once, as one that torchrun started: it does not raise there
    assert time.monotonic() - begun < 50
