# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""tools/: a little of the fuzzer, of the kills and of the two hosts, and proof that the first two notice damage."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kills
import kills_checks
import kills_plans
import numpy as np
import pytest
import torch
import two_hosts
from fuzz import fuzz
from fuzz_cases import Kind, Opener
from fuzz_kinds import KINDS
from fuzz_mutations import PICKLE

pytestmark = pytest.mark.nightly


def write_outside() -> None:
    Path("../outside/new").write_text("new")


def read_outside() -> None:
    Path("../outside/private.txt").read_text()


def write_markup() -> None:
    Path("report.html").write_text("<p>a caption <img src=x onerror=ran()></p>")


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (lambda: pickle.loads(PICKLE), "execution"),
        (lambda: os.system("true"), "execution"),
        (write_outside, "write outside"),
        (read_outside, "read outside"),
        (lambda: {}["missing"], "traceback"),
        (lambda: np.empty(4 << 30, dtype=np.uint8), "memory"),
        (lambda: print("a caption \x1b[2J"), "terminal"),
        (write_markup, "markup"),
        (lambda: os._exit(7), "crash"),
        (lambda: None, "ok"),
    ],
)
def test_the_fuzzer_notices_a_bad_reader(read: Callable[[], object], verdict: str, tmp_path: Path) -> None:
    untouched = PICKLE + bytes(100)

    def make(folder: Path) -> None:
        (folder / "file.bin").write_bytes(untouched)

    def open_file() -> None:
        if Path("file.bin").read_bytes() != untouched:
            read()

    opener = Opener(Kind("a kind", make, open_file), tmp_path / "fuzz")
    try:
        assert opener.open([]).verdict == "ok"
        outcome = opener.open([1])
    finally:
        opener.close()
    assert outcome.verdict == verdict, outcome


@pytest.mark.parametrize("name", KINDS)
def test_a_few_fuzzed_files_of_each_kind_find_nothing(name: str) -> None:
    result = fuzz(KINDS[name], seed=1, seconds=60, most=20)
    assert result["found"] == [] and result["cases"] > 0


def test_kills_see_a_changed_bit_a_lost_step_and_a_file_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: dict[str, dict[str, torch.Tensor]] = {}
    lines = [
        json.dumps({"step": step, "images_seen": 12 * step, "lr": 1e-3, "loss": 1 / step, "grad_norm": 1.0})
        for step in range(1, 21)
    ]
    for name in ("run", "reference"):
        for step in (16, 20):
            (tmp_path / name / "checkpoint" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / name / "status.json").write_text('{"state": "completed", "step": 20}')
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        states[name] = {"model.w": torch.ones(4)}
    numbers = {"step": 20, "images_seen": 240, "position": 240, "elapsed_s": 1.0}
    monkeypatch.setattr("torchditan.checkpoint.loading.read_numbers", lambda path: numbers)
    monkeypatch.setattr("torchditan.checkpoint.loading.read_state", lambda path: states[path.parent.parent.name])
    plan = kills_plans.Plan(5, "adamw", True, ("one", "one"), kills_plans.plan_of(0, 0).kills[:1], ())

    def problems(plan: kills_plans.Plan) -> set[str]:
        return set(kills_checks.compare(tmp_path / "run", tmp_path / "reference", plan)[0])

    assert problems(plan) == set()
    states["run"]["model.w"] = torch.ones(4) * (1 + 2e-7)
    assert problems(plan) == {"tensors"}
    assert problems(replace(plan, layouts=("one", "ddp2"))) == set(), "within the tolerance of other ranks"
    (tmp_path / "run" / ".status.json.vm-1.partial").touch()
    assert problems(plan) == {"tensors", "debris"}
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines[:6] + lines[7:]))
    assert "steps" in problems(plan)


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
