# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The summary of a grid in the columns of AMD's benchmark: values computed by hand, statuses from real runs."""

from __future__ import annotations

import ast
import csv
import io
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchditan.extras.ablation.__main__ import parse, show
from torchditan.extras.ablation.amd_summary import COLUMNS, settings_of, summary_row, write_amd_summary
from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.ablation.runner import stored_grid

FIXED = (
    "run_id run_name timestamp status git_hash git_user total_elapsed_time avg_loss std_loss avg_loss_tail "
    "std_loss_tail avg_step_time_total std_step_time_total avg_step_time_gpu std_step_time_gpu avg_fps_gpu std_fps_gpu "
    "avg_tflops std_tflops num_samples"
)
ROW = {
    "status": "completed",
    "reason": None,
    "num_devices": 2,
    "git_commit": "abc",
    "started": "2026-01-01T00:00:00+00:00",
    "elapsed_s": 90.0,
}


def record(step: int, **values: Any) -> dict[str, Any]:
    """Step n takes n seconds, a quarter of them waiting; two devices share 16 images."""
    measured = {"step_time_s": float(step), "images_per_second": 16 / step, "data_loading_percent": 25.0}
    return {"step": step, "loss": 1 / step, "tflops_per_device": 3.0, **measured, **values}


def summary(records: list[dict[str, Any]], **row: Any) -> dict[str, Any]:
    return summary_row(1, "run", {**ROW, **row}, records, git_user="me")


def test_the_columns_are_amds() -> None:
    assert " ".join(COLUMNS) == FIXED


def test_each_column_is_what_its_name_says() -> None:
    row = summary([record(step) for step in range(1, 21)])
    steps = range(6, 21)  # five are warm-up
    assert list(row) == list(COLUMNS)
    assert row["total_elapsed_time"] == sum(range(1, 21)), "the sum of all steps, warm-up included"
    expected = {
        "loss": [1 / step for step in steps],
        "loss_tail": [1 / step for step in range(11, 21)],
        "step_time_total": [float(step) for step in steps],
        "step_time_gpu": [0.75 * step for step in steps],
        "fps_gpu": [8 / (0.75 * step) for step in steps],
        "tflops": [3.0] * 15,
    }
    for name, values in expected.items():
        assert row[f"avg_{name}"] == pytest.approx(statistics.fmean(values)), name
        assert row[f"std_{name}"] == pytest.approx(statistics.pstdev(values)), name
    assert (row["num_samples"], row["timestamp"], row["git_hash"], row["git_user"]) == (
        15,
        "2026-01-01T00:01:30+00:00",
        "abc",
        "me",
    )


def test_what_was_not_measured_is_empty() -> None:
    row = summary([record(step, data_loading_percent=None, tflops_per_device=None) for step in range(1, 9)])
    assert row["avg_step_time_gpu"] is row["std_step_time_gpu"] is row["avg_fps_gpu"] is row["avg_tflops"] is None
    assert row["avg_step_time_total"] == 7.0
    short = summary([record(step) for step in range(1, 5)], status="oom")
    assert (short["status"], short["total_elapsed_time"], short["num_samples"]) == ("oom", 10.0, 0)
    assert short["avg_loss"] is short["avg_loss_tail"] is short["avg_step_time_total"] is None
    diverged = summary([record(step, loss=None if step == 8 else 1.0) for step in range(1, 9)])
    assert diverged["avg_loss"] is None and diverged["avg_step_time_total"] == 7.0


@pytest.fixture
def folder(tmp_path: Path, run_here: Any) -> Path:
    """A grid of stand-ins that has every status: batch 32 runs out of memory, patch size 4 crashes."""
    axes: dict[str, list[Any]] = {"parallel": ["1,2"], "model.flavor": ["debugmodel"], "precision": ["float32"]}
    axes |= {"training.batch_size": [8, 32, 64], "model.patch_size": [2, 4]}
    grid = load_grid("debug", overrides={"steps": 8, "window": 2, "timeout_s": 30})
    exclude = [{"model.patch_size": 4, "training.batch_size": [32, 64]}]
    grid = replace(grid, name="g", axes=axes, exclude=exclude)
    run_here(grid)
    return tmp_path / "outputs" / "g"


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_show_writes_statuses_and_settings_in_amds_terms(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = (folder / "runs_summary.csv").read_bytes()
    arguments, _ = parse(["show", str(folder), "--amd_summary"])
    show(arguments.show, amd_summary=arguments.amd_summary)
    assert f"{folder}/amd/runs_summary.csv" in capsys.readouterr().out
    rows = read(folder / "amd" / "runs_summary.csv")
    assert [row["status"] for row in rows] == ["success", "oom", "oom-skipped", "error"]
    assert [row["run_id"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0]["avg_step_time_total"] == "0.5" and rows[0]["avg_step_time_gpu"] == "", "these say no waiting time"
    assert rows[2]["total_elapsed_time"] == rows[2]["num_samples"] == rows[2]["timestamp"] == ""
    assert (folder / "runs_summary.csv").read_bytes() == ledger, "the ledger stays ours"

    # As AMD's notebook reads it: columns by name, rows grouped by settings.
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(folder / "amd" / "runs_summary.csv")
    run = stored_grid(folder).runs()[0]
    assert list(table.columns) == [*COLUMNS, *settings_of(run, None, folder)]
    success = table[table["status"] == "success"]
    groups = success.groupby(["run_name", "mixed_precision", "train_batch_size"])["avg_step_time_total"].mean()
    assert list(groups.items()) == [(("debugmodel_bs8_ps2_actnone_cfalse_dfloat32_p1,2", "no", 8), 0.5)]
    expected: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "machine_rank": 0}
    expected |= {"use_cpu": True, "model": "dit/debugmodel", "num_iterations": 8, "resolution": 16}
    expected |= {"gradient_checkpointing": 0.0, "rdzv_backend": "c10d", "logging_dir": str(folder)}
    assert {name: success[name][0] for name in expected} == expected
    assert ast.literal_eval(success["dynamo_config"][0]) == {"dynamo_backend": "no", "dynamo_mode": "default"}
    assert ast.literal_eval(success["fsdp_config"][0])["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert list(table["train_batch_size"]) == [8, 32, 64, 8], "also of runs that were not made"

    grid = stored_grid(folder)
    more = replace(grid, axes={**grid.axes, "training.batch_size": [4, 8]}, exclude=[])
    statuses = [row["status"] for row in read(write_amd_summary(more, folder))]
    assert statuses == ["not_run", "success", "not_run", "error"], "runs that are missing are not run"


def test_settings_of_published_models_are_amds(tmp_path: Path) -> None:
    axes: dict[str, list[Any]] = {"model": ["flux/FLUX.1-dev", "wan/Wan2.1-I2V-14B"], "checkpoint_fraction": [0.5]}
    axes |= {"parallel": ["2,1"], "precision": ["bfloat16_f8", "auto"], "training.compile": [True]}
    flux, _, wan, automatic = load_grid("published_models", axes={**axes, "training.batch_size": [1]}).runs()
    found = settings_of(flux, None, tmp_path)
    names = ("model", "resolution", "num_frames", "gradient_checkpointing", "mixed_precision", "distributed_type")
    assert [found[name] for name in names] == ["flux-dev", "512", None, 0.5, "fp8", "MULTI_GPU"]
    assert found["dynamo_config"]["dynamo_backend"] == "inductor" and found["fsdp_config"] is found["use_cpu"] is None
    found = settings_of(wan, None, tmp_path)
    assert [found[name] for name in names[:3]] == ["wan2_1-i2v", "832,480", 81]
    assert settings_of(automatic, None, tmp_path)["mixed_precision"] is None, "the run chooses it"
