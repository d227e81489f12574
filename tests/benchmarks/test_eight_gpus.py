# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/eight_gpus.py: the table from a ledger. `benchmarks/eight_gpus.sh --tiny` runs all of it, in minutes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import eight_gpus

from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.ablation.ledger import row_of

pytestmark = pytest.mark.nightly


def test_the_table_has_what_was_measured_and_empty_cells_for_what_was_not(tmp_path: Path) -> None:
    grid = load_grid("eight_gpus", axes={"parallel": ["1,1", "1,2", "2,1", "2,2", "1,8"], "model.flavor": ["DiT-XL"]})
    speeds = {"1,1": 400.0, "1,2": 760.0, "2,2": 1200.0}
    ledger = []
    for run in grid.runs():
        status = "completed" if run.axes["parallel"] in speeds else "oom" if run.num_devices == 2 else "skipped"
        row = row_of(grid, run, status, None, device=None)
        if status != "skipped":
            row["started"] = "2026-11-28T12:00:00+00:00"
        if status == "completed":
            speed = speeds[run.axes["parallel"]]
            row |= {"images_per_second_mean": speed, "step_time_s_mean": 64 * run.num_devices / speed}
            row |= {"mfu_mean": 30.0, "peak_memory_gib": 36.0}
            (tmp_path / run.name).mkdir()
            lines = [{"step": step, "data_loading_percent": 90.0 if step == 1 else 1.5} for step in range(1, 31)]
            (tmp_path / run.name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ledger.append(row)

    document: dict[str, Any] = {"gpus": 4, "device_name": "NVIDIA X", "driver": "1.2", "date": "2026-11-28T12"}
    document |= {"versions": {"torch": "2.11.0"}, "rows": eight_gpus.rows_of(ledger, tmp_path)}
    document["resume"] = {"status": "failed", "reason": "cut on 4 ranks: no space"}
    page = tmp_path / "page.md"
    page.write_text("before\n{}old\n{}after\n".format(*eight_gpus.TABLE_MARKS))
    eight_gpus.fill(document, page, source="JSON")
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| 1 | one process | DiT-XL/2 | 400 | 160.0 | 30.0% | 36.0 GiB | 1.00 | 1.5% |",
        "| 2 | FSDP | DiT-XL/2 | 760 | 168.4 | 30.0% | 36.0 GiB | 0.95 | 1.5% |",
        "| 2 | DDP | DiT-XL/2 | oom |  |  |  |  |  |",
        "| 4 | HSDP 2 x 2 | DiT-XL/2 | 1200 | 213.3 | 30.0% | 36.0 GiB | 0.75 | 1.5% |",
        "| 8 | FSDP | DiT-XL/2 |  |  |  |  |  |  |",
    ]
    assert "Kill and resume: failed (cut on 4 ranks: no space)." in lines
