# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The adapters refuse other folders, and report what became of each foreign test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import assert_refused

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parent
ADAPTERS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text() and path != Path(__file__))

ADAPTER = """
import sys
import foreign_suite

def replace(module):
    module.add = lambda a, b: a + b + (a == 2)

sys.exit(foreign_suite.main("", tests=["tests/test_add.py"], replace=replace, skipped={skipped}))
"""
SUITE = """
import pytest

def add(a, b):
    raise AssertionError("theirs")

class TestAdd:
    def test_one(self):
        assert add(1, 1) == 2

    def test_two(self):
        assert add(2, 2) == 4

    def test_other(self):
        raise AssertionError("not for us")

    @pytest.mark.skip(reason="theirs")
    def test_skipped(self):
        pass

@pytest.fixture
def broken():
    raise ValueError("no data")

def test_needs_data(broken):
    pass
"""


def run(script: Path, *arguments: object) -> tuple[int, str, str]:
    path = os.pathsep.join([str(FOLDER), *sys.path])
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    (tmp_path / "suite" / "tests").mkdir(parents=True)
    (tmp_path / "suite" / "tests" / "test_add.py").write_text(SUITE)
    return tmp_path / "suite"


def write_adapter(folder: Path, skipped: dict[str, str]) -> Path:
    (folder / "adapter.py").write_text(ADAPTER.format(skipped=skipped))
    return folder / "adapter.py"


def test_each_outcome_of_a_foreign_test_is_reported(fake: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, {"TestAdd::test_o[!n]*": "not ours"})
    code, out, _ = run(adapter, "--source", fake)
    lines = out[out.index("passed 1") :].splitlines()
    assert lines[:2] == ["passed 1, skipped 2, failed 2", "  passed  TestAdd::test_one"]
    assert sorted(lines[2:4]) == ["  skipped 1: not ours", "  skipped 1: theirs"]
    assert lines[4].startswith("  failed  TestAdd::test_two: ") and "== 4" in lines[4]
    assert lines[5].startswith("  failed  test_needs_data: ") and "no data" in lines[5]
    assert (code, len(lines)) == (1, 6)


def test_a_wrong_source_is_one_line(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, {})
    code, _, err = run(adapter)
    assert code == 2
    assert_refused(err, "--source = none", ["folder"])
    code, _, err = run(adapter, "--source", tmp_path)
    assert code == 2
    assert_refused(err, f'--source = "{tmp_path}"', ["tests/test_add.py"])


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda path: path.stem)
def test_each_adapter_refuses_another_folder(adapter: Path, tmp_path: Path) -> None:
    for module in ("diffusers", "torchdata", "safetensors"):
        pytest.importorskip(module)
    code, _, err = run(adapter, "--source", tmp_path)
    assert code == 2
    assert_refused(err.splitlines()[-1], f'--source = "{tmp_path}"', ["folder"])
