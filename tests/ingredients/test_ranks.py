# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs with ingredients on several ranks follow the curve of one process, and need the memory that is planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import KEEP, job

from torchditan.config.loader import load_config
from torchditan.planner.plan import plan_run
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, Train

STEPS = ["--training.steps=4", "--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
WAYS = {
    "self-alignment": ["--diffusion.ingredients=self_alignment", "--ema.decay=0.9"],
    "contrastive": ["--diffusion.ingredients=contrastive weight=0.2"],
    "value residual": ["--model.block=value_residual"],
}
FULL, OP = "--activation_checkpoint.mode=full", "--activation_checkpoint.selective_ac_option=op"
SELECTIVE = "--activation_checkpoint.mode=selective"
CONTEXT, REPLICATE = "--training.context_parallel_degree", "--training.data_parallel_replicate_degree"
MODES = {
    2: [
        ("self-alignment", [f"{REPLICATE}=2", "--training.batch_size=2"]),
        ("self-alignment", [f"{REPLICATE}=1", "--training.batch_size=4", FULL]),
        ("self-alignment", [f"{CONTEXT}=2", FULL]),
        ("contrastive", [f"{REPLICATE}=2", "--training.batch_size=2"]),
        ("value residual", [f"{CONTEXT}=2", SELECTIVE, OP]),
    ],
    4: [
        ("self-alignment", [f"{REPLICATE}=2", FULL]),
        ("self-alignment", [f"{REPLICATE}=4"]),
        ("self-alignment", [f"{REPLICATE}=1", "--training.batch_size=1"]),
        ("contrastive", [f"{REPLICATE}=1", "--training.batch_size=2", FULL]),
        ("value residual", [f"{REPLICATE}=1", FULL]),
    ],
}


def assert_close(run: Path, reference: Path) -> None:
    found, expected = (
        torch.tensor([(record["loss"], record["grad_norm"]) for record in read_metrics(path)])
        for path in (run, reference)
    )
    assert found.shape == expected.shape
    difference = float(((found - expected).abs() / expected).max())
    print(f"{run.name}: largest relative difference {difference:.1e}")  # shown by pytest -s
    assert difference < 1e-5, run.name


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_one_curve_on_any_number_of_ranks_and_resumed_on_another(
    world_size: int, tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    kept = [*WAYS["self-alignment"], *STEPS, *KEEP, "--checkpoint.interval=2"]
    train("self-alignment", *kept, "--training.batch_size=8")
    for way in ("contrastive", "value residual"):
        train(way, *WAYS[way], *STEPS, "--training.batch_size=8")
    shutil.copytree(tmp_path / "self-alignment", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoint/step-00000004")
    runs = {f"{number}, {way}": [*WAYS[way], *STEPS, *mode] for number, (way, mode) in enumerate(MODES[world_size])}
    jobs = [job(tmp_path / name, *flags) for name, flags in runs.items()]
    jobs.append(job(tmp_path / "resumed", *kept, "--training.batch_size=2"))
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    for name in runs:
        assert_close(tmp_path / name, tmp_path / name.partition(", ")[2])
    assert "resumed at step 2" in result.stdout
    assert_close(tmp_path / "resumed", tmp_path / "self-alignment")


PLANNED = [  # as in tests/planner/test_plan.py, whose script measures the steps
    *("--dataset.dataset_name=dummy", "--dataset.image_size=16", "--model.input_channels=4"),
    *("--dataset.num_classes=10", "--model.flavor=debugmodel", "--training.batch_size=4"),
]


@pytest.mark.slow
def test_the_planned_memory_is_that_of_real_steps(tmp_path: Path, run_distributed: RunDistributed) -> None:
    ways = [[*WAYS["self-alignment"], FULL], [*WAYS["value residual"], FULL]]
    result = run_distributed(["tests/planner/test_plan.py", json.dumps(ways), tmp_path], 1)
    assert result.returncode == 0, result.stderr
    for flags, row in zip(ways, json.loads((tmp_path / "0.json").read_text()), strict=True):
        plan = plan_run(load_config([*PLANNED, *flags]), device="cpu", num_devices=1)
        assert row["state"] == plan.state
        assert plan.peak.total == pytest.approx(row["peak"], rel=0.003), flags
