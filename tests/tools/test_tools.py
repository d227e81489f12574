# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""tools/: a little of the fuzzer, of the kills and of the two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kills
import pytest
import two_hosts
from fuzz import fuzz
from fuzz_kinds import KINDS

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", KINDS)
def test_a_few_fuzzed_files_of_each_kind_find_nothing(name: str) -> None:
    result = fuzz(KINDS[name], seed=1, seconds=60, most=20)
    assert result["found"] == [] and result["cases"] > 0


def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    """More with `python tools/kills.py --kills 200`."""
    command = [sys.executable, kills.__file__, "--kills=5", "--seed=0", f"--folder={tmp_path}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert results
    assert not any(result["problems"] for result in results)


@pytest.mark.parametrize("scenario", two_hosts.SCENARIOS)
def test_two_hosts_train_on_as_if_nothing_had_happened(scenario: str, tmp_path: Path) -> None:
    try:
        two_hosts.play(scenario, tmp_path)
    except PermissionError as error:
        pytest.skip(str(error))
