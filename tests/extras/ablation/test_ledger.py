# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The ledger contains the measurements; a truncated ledger is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchditan.errors import ConfigError
from torchditan.extras.ablation import ledger
from torchditan.extras.ablation.ledger import columns, measure, quality, read_ledger, write_ledger

AXES = ("training.batch_size", "optimizer.lr", "dataset.image_size")


def row(name: str, **values: Any) -> ledger.Row:
    known = {"schema_version": 1, "run_name": name, "repeat": 1, "status": "completed", "parallel": "1,8"}
    known |= {"training.compile": True, "model.patch_size": 2, "training.batch_size": 16}
    known |= {"optimizer.lr": 1e-4, "dataset.image_size": [32, 48], "step_time_s_mean": 0.1 + 0.2}
    return {**dict.fromkeys(columns(AXES)), **known, **values}


def record(step: int, **values: Any) -> dict[str, Any]:
    known = {"step": step, "loss": float(step), "step_time_s": 1.0, "images_per_second": 10.0, "mfu": None}
    return {**known, "tflops_per_device": 2.0, "peak_memory_gib": 3.0, "peak_reserved_gib": None, **values}


def test_what_is_written_is_read_back_and_nothing_missing_becomes_zero(tmp_path: Path) -> None:
    rows = [row("a", reason='said "no", twice\nin two lines'), row("b", status="oom", step_time_s_mean=None)]
    write_ledger(tmp_path, rows, axes=AXES)
    first, second = read_ledger(tmp_path, axes=AXES)
    assert first["step_time_s_mean"] == 0.1 + 0.2, "to the last digit"
    assert (first["parallel"], first["training.compile"], first["optimizer.lr"]) == ("1,8", True, 1e-4)
    assert first["reason"] == 'said "no", twice in two lines'
    assert second["step_time_s_mean"] is None and second["mfu_mean"] is None
    write_ledger(tmp_path, [first, second], axes=AXES)
    assert read_ledger(tmp_path, axes=AXES) == [first, second]


def test_the_parquet_file_has_the_same_rows_with_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_ledger(tmp_path, [row("a"), row("b", status="oom", step_time_s_mean=None)], axes=AXES)
    table = parquet.read_table(tmp_path / "runs_summary.parquet")
    assert table.column_names == columns(AXES)
    values = table.to_pydict()
    assert values["step_time_s_mean"] == [0.1 + 0.2, None]
    assert values["training.compile"] == [True, True] and values["training.batch_size"] == [16, 16]
    assert values["status"] == ["completed", "oom"] and values["grid"] == [None, None]


def test_without_pyarrow_there_is_a_csv_alone_and_no_old_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs_summary.parquet").write_bytes(b"older")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    write_ledger(tmp_path, [row("a")], axes=AXES)
    assert [path.name for path in tmp_path.iterdir()] == ["runs_summary.csv"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",loss_last", ",loss_first", r"other columns than this grid \(loss_first\)"),
        (",true,", ",maybe,", r"line 2 does not parse"),
    ],
)
def test_a_ledger_that_is_none_of_ours_is_refused_in_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    write_ledger(tmp_path, [row("a")], axes=AXES)
    path = tmp_path / "runs_summary.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_ledger(tmp_path, axes=AXES)


def test_the_window_is_the_last_steps_and_memory_is_of_all() -> None:
    records = [record(1, step_time_s=9.0, peak_memory_gib=7.0), record(2, step_time_s=2.0)]
    records += [record(3, step_time_s=1.0, images_per_second=8.0), record(4, step_time_s=3.0, images_per_second=12.0)]
    measured = measure(records, window=2, num_devices=4)
    assert (measured["step_time_s_mean"], measured["step_time_s_std"]) == (2.0, pytest.approx(2**0.5))
    assert (measured["images_per_second_mean"], measured["images_per_second_per_device_mean"]) == (10.0, 2.5)
    assert (measured["loss_last"], measured["loss_mean"]) == (4.0, 3.5)
    assert (measured["peak_memory_gib"], measured["peak_reserved_gib"]) == (7.0, None)
    assert measured["compile_s"] == 7.0
    assert measured["mfu_mean"] is None, "the peak is unknown, not zero"
    assert measure(records[:2], window=2, num_devices=4) == {}, "too short for its window"


def test_figures_of_quality_are_those_after_the_last_step() -> None:
    figures = {"validation_loss": 0.5, "FD-EffNetLite0": 30.0, "accuracy_generated": 0.25}
    early = record(2, validation_loss=0.9, **{"KID-EffNetLite0": 0.1})
    measured = measure(
        [record(1), early, record(3, coverage=None, recall=float("nan"), **figures)], window=2, num_devices=1
    )
    assert {name: value for name, value in measured.items() if name in quality()} == figures


def test_a_ledger_has_columns_for_the_figures_that_some_run_measured(tmp_path: Path) -> None:
    write_ledger(tmp_path, [row("a")], axes=AXES)
    before = (tmp_path / "runs_summary.csv").read_bytes()
    assert not set(before.decode().splitlines()[0].split(",")) & quality().keys()
    (first,) = read_ledger(tmp_path, axes=AXES)
    write_ledger(tmp_path, [first, row("b", **{"FD-EffNetLite0": 30.5})], axes=AXES)
    header = (tmp_path / "runs_summary.csv").read_text().splitlines()[0].split(",")
    assert header == [*columns(AXES), "FD-EffNetLite0"], "an older ledger gains the column"
    rows = read_ledger(tmp_path, axes=AXES)
    assert [entry["FD-EffNetLite0"] for entry in rows] == [None, 30.5]
    write_ledger(tmp_path, [first], axes=AXES)
    assert (tmp_path / "runs_summary.csv").read_bytes() == before
