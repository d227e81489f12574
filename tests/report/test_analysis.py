# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""optimization_analysis.py: exactly known effects, runs that are not data, the report, and invalid ledgers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ledger_rows import DEVICE, Row, row
from PIL import Image
from refusals import assert_refused, refused

from torchditan.ablation.grid import BATCH_SIZE, CHECKPOINTING, COMPILE, FLAVOR, PARALLEL, PATCH_SIZE
from torchditan.ablation.ledger import write_ledger
from torchditan.config.loader import load_config, to_dict
from torchditan.report.effects import (
    MEMORY,
    METRICS,
    MFU,
    SAME_BATCH,
    THROUGHPUT,
    Effect,
    fastest,
    frontier,
    repayment,
    scaling,
)
from torchditan.report.grid_page import Analysis, analyse, grid_page
from torchditan.report.labels import MINUS
from torchditan.report.losses import final_losses, loss_curves
from torchditan.report.page import Section, Table, Warned, html_of
from torchditan.report.plots import loss_figure
from torchditan.report.report import write_report

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = "optimization_analysis.py"


def unmeasured(status: str, reason: str, **axes: Any) -> Row:
    """A run that did not complete. It keeps numbers, absurd ones: nobody may read them."""
    absurd = {"throughput": 1e9, "memory": 1e-9}
    return row(**absurd, **axes, status=status, reason=reason)


def write_grid(folder: Path, rows: Iterable[Row], *, axes: tuple[str, ...] = (), **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grid.json").write_text(json.dumps({"schema_version": 1, **content}))
    write_ledger(folder, list(rows), axes=axes)
    return folder


def two_settings(batches: tuple[int, ...] = (4, 8, 16)) -> list[Row]:
    """Compiling: +50% images/s, -20% memory. Checkpointing: -10% images/s, -40% memory. Exact in every pair."""
    return [
        row(
            batch=batch,
            compiled=compiled,
            checkpointing=mode,
            throughput=100 * math.log2(2 * batch) * (1.5 if compiled else 1) * (0.9 if mode != "none" else 1),
            memory=2 * batch * (0.8 if compiled else 1) * (0.6 if mode != "none" else 1),
        )
        for batch, compiled, mode in itertools.product(batches, (False, True), ("none", "selective"))
    ]


def effect(effects: list[Effect], axis: str, start: str, end: str) -> Effect:
    (found,) = (item for item in effects if item.key == (axis, start, end))
    return found


def compiling(analysis: Analysis) -> Effect:
    return effect(analysis.effects.same_batch, COMPILE, "false", "true")


def changes(analysis: Analysis) -> list[Any]:
    return [item.change(metric) for item in analysis.effects.same_batch for metric in METRICS]


def warning(analysis: Analysis, words: str) -> Warned:
    (found,) = (found for found in analysis.warnings if words in found.sentence)
    return found


def headlines(analysis: Analysis) -> list[str]:
    return list(grid_page(analysis).headlines)


def section(analysis: Analysis, title: str) -> Section:
    (found,) = (section for section in grid_page(analysis).shown if section.title == title)
    return found


def titles(analysis: Analysis) -> list[str]:
    return [section.title for section in grid_page(analysis).shown]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyse([write_grid(tmp_path_factory.mktemp("a") / "known", two_settings())])


def test_effects_are_what_was_put_in(known: Analysis) -> None:
    for key, metric, change in (
        ((COMPILE, "false", "true"), THROUGHPUT, 50),
        ((COMPILE, "false", "true"), MFU, 50),
        ((COMPILE, "false", "true"), MEMORY, -20),
        ((CHECKPOINTING, "none", "selective"), THROUGHPUT, -10),
        ((CHECKPOINTING, "none", "selective"), MEMORY, -40),
    ):
        found = effect(known.effects.same_batch, *key).change(metric)
        better = (change > 0) == metric.higher_is_better
        assert (found.num_pairs, found.num_better) == (6, 6 if better else 0)
        assert found[1:6] == pytest.approx([change] * 5)
    assert known.warnings == []


def test_an_effect_is_the_median_of_the_pairs_changes(tmp_path: Path) -> None:
    rows = []
    for batch, factor in ((1, 1.1), (2, 1.2), (4, 1.3), (8, 4.0)):  # their mean is +90%
        rows += [row(batch=batch, throughput=batch), row(batch=batch, compiled=True, throughput=factor * batch)]
    change = compiling(analyse([write_grid(tmp_path / "grid", rows)])).change(THROUGHPUT)
    assert change.num_pairs == 4
    assert change[1:6] == pytest.approx([25, 17.5, 97.5, 10, 300])


def test_pairs_differ_in_one_axis_and_in_nothing_else(tmp_path: Path) -> None:
    values = itertools.product((4, 8), (False, True), ("none", "full"), ("float32", "bfloat16"), ("1,2", "2,1"), (2, 4))
    keys = ("batch", "compiled", "checkpointing", "precision", "parallel", "patch")
    rows = [row(**dict(zip(keys, setting, strict=True)), **{"optimizer.lr": 0.1}) for setting in values]
    rows += [{**entry, "optimizer.lr": 0.2, "run_name": entry["run_name"] + "_lr-0.2"} for entry in rows]
    analysis = analyse([write_grid(tmp_path / "grid", rows, axes=("optimizer.lr",))])
    cells, axes = analysis.results.cells, analysis.results.axes
    assert len(axes) == 8
    assert len(analysis.effects.pairs[SAME_BATCH]) == 6 * 64, "each of 128 cells has one partner in each of six axes"
    for pair in analysis.effects.pairs[SAME_BATCH].itertuples():
        differing = [axis for axis in axes if cells[axis][pair.a] != cells[axis][pair.b]]
        assert differing == [pair.axis]
        assert (cells[pair.axis][pair.a], cells[pair.axis][pair.b]) == (pair.from_value, pair.to_value)


def test_a_run_without_a_partner_changes_nothing(tmp_path: Path, known: Analysis) -> None:
    alone = [
        row(batch=64, throughput=1e6),
        row(batch=8, compiled=True, precision="float32", throughput=1e-3),
        row(batch=8, compiled=True, parallel="1,8", throughput=1e-3),
    ]
    found = analyse([write_grid(tmp_path / "grid", two_settings() + alone)])
    assert len(found.results.cells) == len(known.results.cells) + 3
    for before in known.effects.same_batch:
        after = effect(found.effects.same_batch, *before.key)
        assert [after.change(metric) for metric in METRICS] == [before.change(metric) for metric in METRICS]


@pytest.mark.parametrize("status", ["oom", "error", "timeout", "skipped"])
def test_what_did_not_complete_is_never_data(tmp_path: Path, known: Analysis, status: str) -> None:
    rows = two_settings((4, 8, 16))
    rows += [unmeasured(status, "why", batch=32, compiled=compiled) for compiled in (False, True)]
    found = analyse([write_grid(tmp_path / "grid", rows)])
    assert len(found.results.cells) == len(known.results.cells)
    assert changes(found) == changes(known)
    assert fastest(found.results)["batch"].tolist() == [16]


def test_zero_throughput_is_no_data(tmp_path: Path) -> None:
    rows = [row(throughput=50), {**row(compiled=True), "images_per_second_mean": 0.0}]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert compiling(analysis).change(THROUGHPUT).num_pairs == 0
    assert warning(analysis, "lack a measurement").cases is not None


def test_repeats_are_averaged_before_they_pair(tmp_path: Path) -> None:
    rows = [row(throughput=value, repeat=number) for number, value in enumerate((80, 120), start=1)]
    rows += [row(compiled=True, throughput=value, repeat=number) for number, value in enumerate((140, 180, 160), 1)]
    change = compiling(analyse([write_grid(tmp_path / "grid", rows)])).change(THROUGHPUT)
    assert (change.num_pairs, change.median) == (1, pytest.approx(60))


def test_each_side_runs_at_its_best_batch(tmp_path: Path) -> None:
    """Checkpointing is slower at the same batch, and faster because it allows a larger one."""
    rows = [row(batch=8, throughput=100), unmeasured("oom", "out", batch=16), row(batch=4, throughput=80)]
    rows += [row(batch=batch, checkpointing="full", throughput=speed) for batch, speed in ((4, 72), (8, 90), (16, 125))]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    key = (CHECKPOINTING, "none", "full")
    assert effect(analysis.effects.same_batch, *key).change(THROUGHPUT)[:2] == (2, pytest.approx(-10))
    assert effect(analysis.effects.best_batch, *key).change(THROUGHPUT)[:2] == (1, pytest.approx(25))
    assert analysis.effects.num_unequal_batches == 0


def test_best_batches_are_not_compared_where_one_side_was_tried_at_fewer(tmp_path: Path) -> None:
    rows = [row(batch=8, throughput=100), unmeasured("error", "crashed", batch=16)]
    rows += [row(batch=batch, compiled=True, throughput=10 * batch) for batch in (8, 16)]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert effect(analysis.effects.best_batch, COMPILE, "false", "true").change(THROUGHPUT).num_pairs == 0
    assert analysis.effects.num_unequal_batches == 1


def test_batches_that_were_searched_for_are_compared_as_found(tmp_path: Path) -> None:
    rows = [row(batch=24, throughput=100), row(batch=40, compiled=True, throughput=180)]
    analysis = analyse([write_grid(tmp_path / "grid", rows, autotune="largest")])
    assert compiling(analysis).change(THROUGHPUT).num_pairs == 0
    assert effect(analysis.effects.best_batch, COMPILE, "false", "true").change(THROUGHPUT)[:2] == (
        1,
        pytest.approx(80),
    )
    assert headlines(analysis) == [
        "torch.compile: off → on: +80% images/s, no clear change in memory (1 pair, each at its best batch)"
    ]


def test_meshes_are_compared_on_equal_devices_only(tmp_path: Path) -> None:
    speeds = {"1,1": 100, "1,2": 180, "2,1": 198, "1,4": 320, "4,1": 380}
    rows = [row(parallel=mesh, throughput=speed) for mesh, speed in speeds.items()]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert [item.key[1:] for item in analysis.effects.same_batch] == [("1,2", "2,1"), ("1,4", "4,1")]
    assert len(analysis.effects.pairs[SAME_BATCH]) == 2
    table = scaling(analysis.results)
    parts = {(entry.mode, entry.num_devices): entry.part for entry in table.itertuples()}
    expected = {("FSDP", 1): 1, ("FSDP", 2): 0.9, ("FSDP", 4): 0.8, ("DDP", 1): 1, ("DDP", 2): 0.99, ("DDP", 4): 0.95}
    assert parts == pytest.approx(expected)


def test_the_frontier_is_what_nothing_else_beats(tmp_path: Path) -> None:
    points = {1: (10, 5), 2: (20, 6), 4: (15, 7), 8: (30, 20), 16: (30, 21), 32: (25, 19)}
    rows = [row(batch=batch, throughput=speed, memory=memory) for batch, (speed, memory) in points.items()]
    rows.append(row(patch=4, batch=1, throughput=9, memory=30))
    cells = analyse([write_grid(tmp_path / "grid", rows)]).results.cells
    best = frontier(cells)
    assert list(zip(best[PATCH_SIZE], best["batch"], strict=True)) == [
        ("2", 1),
        ("2", 2),
        ("2", 32),
        ("2", 8),
        ("4", 1),
    ]


def test_compiling_is_repaid_after_what_it_costs(tmp_path: Path) -> None:
    rows = [row(batch=100, throughput=100), row(batch=100, compiled=True, throughput=200)]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    cost = repayment(compiling(analysis), analysis.results.cells)
    assert cost is not None
    assert (cost.num_pairs, cost.seconds, cost.steps) == (1, pytest.approx(58), pytest.approx(116))


def test_the_page_begins_with_each_effect_in_one_line(known: Analysis) -> None:
    assert headlines(known) == [
        f"torch.compile: off → on: +50% images/s, {MINUS}20% memory (6 pairs)",
        f"activation checkpointing: none → selective: {MINUS}10% images/s, {MINUS}40% memory (6 pairs)",
    ]
    page = html_of(grid_page(known))
    assert "12 runs: 12 completed." in page
    assert "Compiling takes 58 s more at the start, which is repaid after about " in page


def published_rows() -> list[Row]:
    """Two published models, of which only one ran at two resolutions; checkpointing all blocks costs a fifth."""
    settings = [
        ("flux/FLUX.1-dev", "512x512", 4.0),
        ("flux/FLUX.1-dev", "1024x1024", 1.0),
        ("sdxl/SDXL", "512x512", 9.0),
    ]
    return [
        row(
            throughput=throughput * (0.8 if fraction else 1) * 8,
            parallel="1,8",
            memory=100 - 50 * fraction,
            checkpointing="fraction",
            model=model,
            resolution=resolution,
            checkpoint_fraction=fraction,
            **{FLAVOR: model.partition("/")[2], "run_name": f"{model}_{resolution}_{fraction}".replace("/", "-")},
        )
        for model, resolution, throughput in settings
        for fraction in (0.0, 1.0)
    ]


def test_published_models_are_measured_each_for_itself(tmp_path: Path) -> None:
    axes = ("model", "resolution", "checkpoint_fraction")
    analysis = analyse([write_grid(tmp_path / "grid", published_rows(), axes=axes)])
    assert analysis.results.effects == ["checkpoint_fraction", "resolution"]
    change = effect(analysis.effects.same_batch, "checkpoint_fraction", "0", "1").change(THROUGHPUT)
    assert (change.num_pairs, change.median) == (3, pytest.approx(-20))
    assert effect(analysis.effects.same_batch, "resolution", "512x512", "1024x1024").change(THROUGHPUT).num_pairs == 2
    assert len(fastest(analysis.results)) == 3
    assert len(frontier(analysis.results.cells)) == 6  # each model has its own
    (table,) = section(analysis, "The fastest runs").blocks
    assert isinstance(table, Table)
    places = [list(table.frame).index(name) for name in ("model", "resolution", "images/s")]
    assert [[row[place] for place in places] for row in table.frame.to_numpy()] == [
        ["sdxl/SDXL", "512x512", "72.00"],
        ["flux/FLUX.1-dev", "512x512", "32.00"],
        ["flux/FLUX.1-dev", "1024x1024", "8.000"],
    ]
    one_each = [entry for entry in published_rows() if "1024x" not in entry["run_name"]]
    assert analyse([write_grid(tmp_path / "one", one_each, axes=axes)]).results.effects == ["checkpoint_fraction"]


def write_losses(folder: Path, entry: Row, losses: list[float | None]) -> None:
    run = folder / "runs" / entry["run_name"]
    run.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_loss_is_drawn_by_precision_and_learning_rate(tmp_path: Path) -> None:
    rows = [
        row(precision=precision, steps=250, loss_mean=10 * rate, **{"optimizer.lr": rate})
        for precision in ("bfloat16", "float16")
        for rate in (0.001, 0.0001)
    ]
    for entry in rows:
        entry["run_name"] += f"_lr-{entry['optimizer.lr']}"
    rows[2] |= {"status": "error", "loss_mean": None}
    folder = write_grid(tmp_path / "grid", rows, axes=("optimizer.lr",))
    for entry in rows[:2]:
        write_losses(folder, entry, [entry["optimizer.lr"] * step for step in range(250, 0, -1)])
    write_losses(folder, rows[2], [2.0, 3.0, None, 4.0])
    analysis = analyse([folder])
    curves = loss_curves(analysis.results)
    assert [(curve.precision, curve.setting, len(curve.steps)) for curve in curves] == [
        ("bfloat16", "learning rate 0.001", 84),
        ("bfloat16", "learning rate 0.0001", 84),
        ("float16", "learning rate 0.001", 3),
    ]
    assert (curves[0].steps[0], curves[0].losses[0]) == (2, pytest.approx(0.249))  # the mean of three steps
    assert (curves[2].steps, curves[2].losses) == ([1, 2, 4], [2.0, 3.0, 4.0])
    table = {
        "learning rate 0.0001": {"float16": "0.001", "bfloat16": "0.001"},
        "learning rate 0.001": {"float16": "error", "bfloat16": "0.01"},
    }
    assert final_losses(analysis.results) == table
    figure = loss_figure(curves)
    assert figure is not None
    lines = {panel.get_title("left"): [line.get_marker() for line in panel.lines] for panel in figure.axes}
    assert lines == {"float16": ["None", "X"], "bfloat16": ["None", "None"]}
    (cross,) = (line for line in figure.axes[0].lines if line.get_marker() == "X")
    assert cross.get_xydata().tolist() == [[4, 4]], "where the failed run ended"
    assert [text.get_text() for text in figure.legends[0].texts] == ["learning rate 0.001", "learning rate 0.0001"]
    assert "Mean loss of the last steps" in html_of(grid_page(analysis))


def test_short_runs_have_a_loss_curve_and_no_metrics_have_no_section(tmp_path: Path, known: Analysis) -> None:
    folder = write_grid(tmp_path / "grid", [row()])
    write_losses(folder, row(), [3.0, 2.0, 1.5])
    (curve,) = loss_curves(analyse([folder]).results)
    assert (curve.steps, curve.losses) == ([1, 2, 3], [3.0, 2.0, 1.5])
    assert "Loss over steps" in titles(analyse([folder]))
    assert loss_curves(known.results) == []
    assert "Loss over steps" not in titles(known)


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            [row(throughput=100), row(compiled=True, throughput=60)],
            [f"torch.compile: off → on: {MINUS}40% images/s, no clear change in memory (1 pair)"],
        ),
        (
            [row(throughput=100), row(compiled=True, throughput=100.2)],
            ["torch.compile: off → on: no clear change in images/s or memory (1 pair)"],
        ),
        (
            [row(batch=b, compiled=c, throughput=150 if c else 100) for b in (1, 2, 4, 8) for c in (False, True)]
            + [row(batch=16), row(batch=16, compiled=True, throughput=90)],
            ["torch.compile: off → on: +50% images/s, no clear change in memory (5 pairs)"],
        ),
        ([row(), row(batch=16)], []),
        ([row(), row(batch=16, compiled=True)], []),
        ([unmeasured("oom", "out")], []),
    ],
    ids=["slower", "noise", "not all pairs", "all eager", "no pair", "nothing completed"],
)
def test_the_headline_follows_the_pairs(tmp_path: Path, rows: list[Row], lines: list[str]) -> None:
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert headlines(analysis) == lines
    assert ("What each setting changes" in titles(analysis)) == bool(lines)


def test_a_fall_with_the_batch_is_shown(tmp_path: Path) -> None:
    points = {4: (100, 5), 8: (150, 4), 16: (120, 8)}
    rows = [row(batch=batch, throughput=speed, memory=memory) for batch, (speed, memory) in points.items()]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    for name, step in (("Throughput", "8 → 16"), ("MFU", "8 → 16"), ("Peak memory", "4 → 8")):
        found = warning(analysis, f"{name} falls by more than 1%")
        assert found.sentence.endswith("in 1 of 2 steps from one batch size to the next, by up to 20.0%.")
        assert found.cases is not None
        assert found.cases.frame["batch"].tolist() == [step]
    assert len(analysis.results.cells) == 3, "a warning removes nothing"


def test_a_compiled_loss_that_differs_is_shown(tmp_path: Path) -> None:
    rows = [row(loss_last=1.0), row(compiled=True, loss_last=1.3)]
    found = warning(analyse([write_grid(tmp_path / "grid", rows)]), "must not change the loss")
    assert "in 1 of 1 matched pair, by up to 30.0%" in found.sentence
    assert found.cases is not None
    assert len(found.cases.frame) == 1


def test_pairs_of_two_commits_count_and_are_flagged(tmp_path: Path) -> None:
    rows = [row(throughput=100), row(compiled=True, throughput=150, git_commit="other")]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert compiling(analysis).change(THROUGHPUT).median == pytest.approx(50)
    assert analysis.effects.pairs[SAME_BATCH]["mixed"].tolist() == [True]
    assert "1 of 1 matched pair mix" in warning(analysis, "commits, versions").sentence


def test_devices_of_one_grid_never_mix(tmp_path: Path) -> None:
    rows = [row(throughput=100), row(compiled=True, throughput=300, device="NVIDIA H200")]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert len(analysis.effects.pairs[SAME_BATCH]) == 0
    assert analysis.results.sources == [f"grid on {DEVICE}", "grid on NVIDIA H200"]
    assert "Each kind is analysed separately" in warning(analysis, "several kinds of device").sentence


def test_folders_are_compared_setting_by_setting(tmp_path: Path) -> None:
    slow = write_grid(tmp_path / "a40", [{**entry, "device": "NVIDIA A40"} for entry in two_settings()])
    rows = [{**entry, "images_per_second_mean": 2.5 * entry["images_per_second_mean"]} for entry in two_settings()]
    fast = write_grid(tmp_path / "a100", [*rows[:-1], row(batch=64, throughput=1e6)], steps=60)
    analysis = analyse([slow, fast])
    (between,) = analysis.effects.between_folders
    assert between.change(THROUGHPUT)[:3] == (11, pytest.approx(150), pytest.approx(150))
    assert headlines(analysis)[0] == (
        f"a100 on {DEVICE} against a40 on NVIDIA A40: +150% images/s, no clear change in memory (11 pairs)"
    )
    assert {item.source for item in analysis.effects.same_batch} == set(analysis.results.sources)
    found = warning(analysis, "other base settings than a40")
    assert found.cases is not None
    assert found.cases.frame.to_numpy().tolist() == [["a100", "steps", "null", "60"]]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_grid(tmp_path / name / "grid", [row()]) for name in ("x", "y")]
    assert analyse([*folders, folders[0]]).results.sources == ["x/grid", "y/grid"]


def test_a_parquet_ledger_reads_like_the_csv(tmp_path: Path) -> None:
    rows = [*two_settings(), unmeasured("oom", "out", batch=32), row(batch=None, status="error", mfu_mean=None)]
    folder = write_grid(tmp_path / "grid", rows)
    expected = analyse([folder])
    (folder / "runs_summary.csv").unlink()
    found = analyse([folder])
    assert changes(found) == changes(expected)
    assert found.results.cells.equals(expected.results.cells)
    file = folder / "runs_summary.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with refused(str(file), "complete", "parquet"):
        analyse([folder])


# The report and the command


HOSTILE = "RuntimeError: <b>no</b> </script><script>alert(1)</script>"


def everything() -> list[Row]:
    rows = two_settings()
    rows += [
        unmeasured("oom", "CUDA out of memory on rank 3", batch=32),
        unmeasured("error", HOSTILE, batch=64),
        unmeasured("timeout", "no step for 600 s", batch=64, compiled=True),
        unmeasured("skipped", "float8 needs compute capability 8.9", batch=8, precision="bfloat16_f8"),
    ]
    return rows + [row(batch=8, parallel=mesh, throughput=700 + int(mesh[0])) for mesh in ("1,2", "2,1")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of two reports of one grid."""
    folder = write_grid(tmp_path_factory.mktemp("everything") / "grid", everything())
    for name in ("one", "two"):
        write_report([folder], out=folder / name)
    return [{path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in ("one", "two")]


def test_the_report_answers_lists_and_names(reports: list[dict[str, bytes]]) -> None:
    page = reports[0]["report.html"].decode()
    body = page[page.index("<body>") :]
    assert body.index("torch.compile: off → on: +50% images/s") < body.index("What each setting changes")
    for words in (DEVICE, "2.13.0", "3976addf00d", "node07", "CUDA out of memory on rank 3", "no step for 600 s"):
        assert words in body, words
    assert "float8 needs compute capability 8.9" in body
    assert "Out of memory: 1 run" in body and "2 runs failed, most often: " in body and "Skipped: 1 run" in body
    assert "&lt;b&gt;no&lt;/b&gt;" in body and "<script" not in body and "<b>no" not in body


def test_the_plots_are_in_the_page_and_next_to_it_as_png_and_svg(reports: list[dict[str, bytes]]) -> None:
    files = reports[0]
    plots = ("effects", "effects_best_batch", "throughput", "memory", "frontier", "scaling")
    drawn = {f"{name}.{end}" for name in plots for end in ("svg", "png")}
    assert files.keys() == {"report.html", "effects.csv", "pairs.csv"} | drawn
    for name in plots:
        svg = files[f"{name}.svg"]
        assert svg[svg.index(b"<svg") :] in files["report.html"]
        Image.open(io.BytesIO(files[f"{name}.png"])).verify()
    assert files["report.html"].count(b"<svg") == len(plots)
    assert "activation checkpointing: none → selective" in files["effects.svg"].decode()


def test_the_report_loads_nothing_and_is_reproducible(reports: list[dict[str, bytes]]) -> None:
    assert reports[0] == reports[1]
    page = reports[0]["report.html"].decode()
    assert not re.search(r"""<(?:script|link|img|image|iframe|object)\b[^>]*(?:src|href)=|@import|url\((?!#)""", page)
    links = set(re.findall(r"""<a href="([^"#][^"]*)""", page))
    assert links == reports[0].keys() - {"report.html"}, "the files next to it"


def test_labels_in_plots_are_never_formulas_or_markup(tmp_path: Path) -> None:
    names = ["$\\frac{$", "<b>&", "_hidden"]
    rows = [row(throughput=100 + number, **{"model.mlp": name, "run_name": name}) for number, name in enumerate(names)]
    page = html_of(grid_page(analyse([write_grid(tmp_path / "grid", rows, axes=("model.mlp",))])))
    assert "<b>&<" not in page and ">&lt;b&gt;&amp;<" in page
    svg = page[page.index('<figure id="throughput"') :]
    for name in ("$\\frac{$", "&lt;b&gt;&amp;", "_hidden"):
        assert name in svg[: svg.index("</figure>")], name


def test_effects_csv_holds_the_effects(tmp_path: Path, run_script: RunScript) -> None:
    assert run_script(SCRIPT, write_grid(tmp_path / "grid", two_settings()), "--out", tmp_path)[0] == 0
    with open(tmp_path / "effects.csv", newline="") as file:
        table = list(csv.DictReader(file))
    wanted = {"comparison": "same batch", "axis": COMPILE, "metric": MEMORY.column}
    (entry,) = (entry for entry in table if wanted.items() <= entry.items())
    assert (entry["better"], entry["num_pairs"], float(entry["median_percent"])) == ("lower", "6", pytest.approx(-20))
    assert len(table) == 2 * 2 * len(METRICS), "two effects, at the same and at the best batch"
    with open(tmp_path / "pairs.csv", newline="") as file:
        pairs = list(csv.DictReader(file))
    assert len(pairs) == 12 + 4


@pytest.mark.parametrize(
    "rows",
    [
        [row(batch=16, parallel="2,4", peak_memory_gib=None, loss_last=None)],
        [row(mfu_mean=None, mfu_std=None), row(compiled=True, mfu_mean=None)],
        [unmeasured("error", "it died before it said anything", device="", torch_version="", num_devices=None)],
    ],
    ids=["one run without memory", "no MFU", "nothing started"],
)
def test_a_report_can_be_made_of_little(tmp_path: Path, run_script: RunScript, rows: list[Row]) -> None:
    folder = write_grid(tmp_path / "grid", rows)
    code, _, err = run_script(SCRIPT, folder)
    assert (code, err) == (0, "")
    page = (folder / "analysis" / "report.html").read_text()
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", page)
    sections = re.findall(r"<section.*?</section>", page, flags=re.DOTALL)
    assert all("<svg" in section or "<td" in section for section in sections), "no section without content"


@pytest.mark.parametrize(
    ("change", "about", "mentions"),
    [
        (lambda text: text.rsplit(",", 1)[0] + "\n", "{csv}", ["cut short", "row 3", "38 of 39 columns"]),
        (lambda text: text.splitlines()[0] + "\n", "{csv}", ["no run"]),
        (lambda text: "a,b\n1,2\n", "{csv}", ["ledger", "schema_version"]),
        (lambda text: text.replace("\n1,", "\n2,"), "{csv}", ["version 2", "version 1"]),
        (lambda text: text.replace("completed", "finished"), '{csv}: status = "finished"', ["completed"]),
        (lambda text: text.replace("123.25", "fast"), "{csv}", ["row 2", '"fast"', "images_per_second_mean"]),
        (lambda text: text.replace('"1,1"', '"1x1"'), 'parallel = "1x1"', ["replicate,shard", '"2,4"']),
    ],
)
def test_a_ledger_that_cannot_be_trusted_is_one_line(
    tmp_path: Path, run_script: RunScript, change: Callable[[str], str], about: str, mentions: list[str]
) -> None:
    folder = write_grid(tmp_path / "grid", [row(throughput=123.25), row(compiled=True)])
    file = folder / "runs_summary.csv"
    file.write_text(change(file.read_text()))
    code, out, err = run_script(SCRIPT, folder)
    assert (code, out) == (2, "")
    assert_refused(err, about.format(csv=file), mentions)
    assert not (folder / "analysis").exists()


def test_every_cut_of_a_ledger_is_told(tmp_path: Path) -> None:
    """Wherever a copy stopped, but at the end of a row: that is a grid that is not done."""
    folder = write_grid(tmp_path / "grid", [row(), row(compiled=True)])
    file = folder / "runs_summary.csv"
    whole = file.read_bytes()
    rows_end = {position + 1 for position, byte in enumerate(whole) if byte == ord("\n")}
    for end in range(0, len(whole), 17):
        if end not in rows_end:
            file.write_bytes(whole[:end])
            with pytest.raises(ValueError, match=r"cut short|empty|no column|not a complete"):
                analyse([folder])


def test_a_folder_that_is_no_grid_is_one_line(tmp_path: Path, run_script: RunScript) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (tmp_path / "file").write_text("")
    for folder, mentions in {
        tmp_path / "gone": ["exist", "grid folder"],
        tmp_path / "file": ["a file", "grid folder"],
        foreign: ["grid folder", "grid.json"],
    }.items():
        code, out, err = run_script(SCRIPT, folder)
        assert (code, out) == (2, "")
        assert_refused(err, str(folder), mentions)
    for content, file, mentions in (
        ("{", "grid.json", ["parse"]),
        ('{"schema_version": 7}', "grid.json", ["version 7", "version 1"]),
        ('{"schema_version": 1, "axes": {"training.seed": 0}}', "grid.json", ["axes", "type"]),
        ('{"schema_version": 1}', "", ["runs_summary.csv"]),
    ):
        (foreign / "grid.json").write_text(content)
        with refused(str(foreign / file), *mentions):
            analyse([foreign])
    (foreign / "runs_summary.csv").mkdir()
    with refused(str(foreign / "runs_summary.csv"), "cannot be read", "directory"):
        analyse([foreign])


def write_run(folder: Path, *flags: str, state: str = "completed", **content: Any) -> None:
    """A run directory with 50 steps, logged every 10: faster with a larger batch and without checkpointing."""
    config = load_config([f"--metrics.experiment_name={folder.name}", *flags])
    content |= {"started": "2026-11-20T10:00:00+00:00", "git_commit": "abc", "config": to_dict(config)}
    content |= {"versions": {"torch": "2.13.0", "python": "3.11.7"}}
    content |= {"hardware": {"device_name": DEVICE, "device": "cuda", "device_count": 2, "hostname": "node07"}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "status.json").write_text(json.dumps({"state": state, "reason": None}))
    speed = 2.0 * config.training.batch_size * (0.5 if config.activation_checkpoint.mode == "full" else 1)
    keys = ("loss", "step_time_s", "tflops_per_device", "elapsed_s", "peak_memory_gib")
    lines = [
        {**dict.fromkeys(keys, 1.0), "step": step, "images_per_second": speed * (1 if step == 50 else 9)}
        for step in (1, 10, 20, 30, 40, 50)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_folder_of_runs_that_no_grid_made_is_analysed(tmp_path: Path, run_script: RunScript) -> None:
    """The axes are the options that differ. A global batch that follows from batch and ranks is not an axis."""
    folder = tmp_path / "runs"
    for batch, mode in itertools.product((4, 8), ("none", "full")):
        flags = [f"--training.batch_size={batch}", f"--activation_checkpoint.mode={mode}", "--optimizer.lr=1e-3"]
        flags += [f"--training.global_batch_size={2 * batch}"]
        write_run(folder / f"{batch}-{mode}", *flags)
        write_run(folder / f"{batch}-{mode}-lr", *flags, "--optimizer.lr=1e-4")
    write_run(folder / "killed", *flags, "--training.batch_size=8", state="running")
    (folder / "imported").mkdir()
    (folder / "imported" / "config.json").write_text('{"config": {}, "imported": {}}')
    analysis = analyse([folder])
    assert analysis.results.varied == [BATCH_SIZE, CHECKPOINTING, "optimizer.lr"]
    assert set(analysis.results.runs[PARALLEL]) == {"1,2"}
    assert list(analysis.results.runs["status"]).count("error") == 1
    checkpointing = effect(analysis.effects.same_batch, CHECKPOINTING, "none", "full")
    assert checkpointing.change(THROUGHPUT)[:2] == (4, -50.0)
    assert analysis.results.cells["images_per_second_mean"].max() == 16.0, "the last 10 of 50 steps"
    code, out, err = run_script(SCRIPT, folder)
    assert (code, out) == (0, f"report: {folder}/analysis/report.html\n"), err
    write_run(folder / "accumulated", "--training.batch_size=8", "--training.global_batch_size=32")
    assert "training.global_batch_size" in analyse([folder]).results.varied


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ([], "", ["required", "grid"]),
        (["{grid}", "--out={grid}/grid.json"], '--out = "{grid}/grid.json"', ["writable folder"]),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    tmp_path: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    folder = write_grid(tmp_path / "grid", [row()])
    code, out, err = run_script(SCRIPT, *(argument.format(grid=folder) for argument in arguments))
    assert (code, out) == (2, "")
    assert_refused(err, about.format(grid=folder), mentions)


@pytest.mark.nightly
def test_ten_thousand_rows_take_less_than_twenty_seconds(tmp_path: Path, run_script: RunScript) -> None:
    settings = itertools.product(
        (1, 2, 4, 8, 16, 32, 64), (False, True), ("none", "selective", "full"), ("float32", "bfloat16"), ("1,8", "8,1"),
        (2, 4, 8), range(20),
    )  # fmt: skip
    keys = ("batch", "compiled", "checkpointing", "precision", "parallel", "patch", "seed")
    rows = []
    for setting in settings:
        values = dict(zip(keys, setting, strict=True))
        seed = values.pop("seed")
        speed = 10 * values["batch"] * (1.5 if values["compiled"] else 1) * (1 + seed / 1000)
        entry = row(**values, throughput=speed, memory=values["batch"], **{"training.seed": seed})
        rows.append({**entry, "run_name": f"{entry['run_name']}_seed-{seed}"})
    assert len(rows) > 10_000
    folder = write_grid(tmp_path / "grid", rows, axes=("training.seed",))
    start = time.process_time()  # other work on the machine is not ours
    assert run_script(SCRIPT, folder)[0] == 0
    assert time.process_time() - start < 20
    assert "torch.compile: off → on: +50% images/s" in (folder / "analysis" / "report.html").read_text()
