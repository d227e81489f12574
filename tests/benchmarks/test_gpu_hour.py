# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/gpu_hour.py with sections that only print, and cheap real ones on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import gpu_hour
from gpu_hour import REPOSITORY
from gpu_hour_sections import Found, Section

pytestmark = pytest.mark.nightly

PRINT = (sys.executable, "-c", "open(r'{folder}/n', 'w').write('7')")
FAIL = (sys.executable, "-c", f"print(r'before {REPOSITORY}/train.py'); raise ValueError('no | kernel')")


def read_number(folder: Path, outputs: Sequence[str]) -> Found:
    number = int((folder / "n").read_text())
    return Found([{"what": "n", "number": number, "ratio": number / 3}], problem=None if number == 7 else "not 7")


def section(name: str, *commands: tuple[str, ...], expected_s: float = 30.0, **options: Any) -> Section:
    return Section(name, f"Title of {name}", expected_s, commands, read_number, **options)


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`hour([sections], "--flags")`: the exit code and the JSON."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(sections: list[Section], *flags: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu_hour, "build_sections", lambda **_: sections)
        out = tmp_path / "hour.json"
        code = gpu_hour.main([f"--out={out}", *flags])
        return code, json.loads(out.read_text())

    return run


def test_a_failed_section_is_recorded_and_the_others_go_on(hour: Any, tmp_path: Path) -> None:
    code, document = hour([section("bad", PRINT, FAIL, PRINT), section("good", PRINT)])
    assert code == 1
    bad, good = document["sections"]["bad"], document["sections"]["good"]
    assert (bad["status"], bad["error"]) == ("failed", "exit code 1: ValueError: no | kernel")
    assert bad["rows"][0]["number"] == 7, "what the first command measured is kept"
    assert "before train.py" in bad["output_tail"]
    assert (good["status"], good["error"], good["rows"][0]["ratio"]) == ("ok", None, 7 / 3)
    assert good["commands"][0].startswith("python -c ")
    assert document["versions"]["torch"] and "git_commit" in document and document["device_name"]
    page = (tmp_path / "hour.md").read_text()
    assert "> exit code 1: ValueError: no | kernel" in page
    assert "| what | number | ratio |\n| --- | --- | --- |\n| n | 7 | 2.333 |\n" in page
    assert "Tiny models" in page and "Emulated" not in page


def test_the_same_command_continues_with_what_has_no_record(hour: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert hour([section("bad", FAIL)])[0] == 1
    before = hour([section("bad", FAIL), section("good", PRINT)])[1]["sections"]["bad"]
    printed = capsys.readouterr().out
    assert printed.count("bad: Title") == 1, "a failure is not repeated"
    code, document = hour([section("bad", PRINT), section("good", PRINT)], "bad")
    assert code == 0, "a section that is named runs again"
    assert before["status"] == "failed" and document["sections"]["bad"]["status"] == "ok"
    assert len(document["commands"]) == 3


def test_what_does_not_fit_into_the_time_is_not_run_and_runs_later(hour: Any) -> None:
    code, document = hour([section("long", PRINT, expected_s=90.0), section("short", PRINT)], "--minutes=1")
    assert code == 0
    assert {name: record["status"] for name, record in document["sections"].items()} == {
        "long": "not run",
        "short": "ok",
    }
    assert document["sections"]["long"]["error"].startswith("needs about 90 s; ")
    assert hour([section("long", PRINT, expected_s=90.0)])[1]["sections"]["long"]["status"] == "ok"


def test_a_section_and_its_processes_end_at_the_time_limit(hour: Any) -> None:
    sleep = (sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])")
    code, document = hour([section("hangs", PRINT, sleep, expected_s=0.75)])
    record = document["sections"]["hangs"]
    assert (code, record["error"]) == (1, "the time limit of 2 s was reached")
    assert record["seconds"] < 30 and record["rows"]


def test_cheap_sections_run_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "hour.json"
    names = ["step_xl", "resume", "oom"]
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_hour.py"), "--tiny", f"--out={out}", *names]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    records = json.loads(out.read_text())["sections"]
    assert set(records) == set(names)
    assert records["resume"]["rows"] == [{"steps": 20, "equal": "yes"}]
    assert records["oom"]["rows"][0]["state"] == "oom"
    assert records["step_xl"]["rows"][0]["step_ms"] > 0
