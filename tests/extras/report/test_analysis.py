# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""optimization_analysis.py: exactly known effects, runs that are not data, the report, and invalid ledgers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ledger_rows import DEVICE, Row, row
from PIL import Image
from refusals import assert_refused, refused

from torchditan.config.loader import load_config, to_dict
from torchditan.extras.ablation.grid import BATCH_SIZE, CHECKPOINTING, COMPILE, FLAVOR, PARALLEL
from torchditan.extras.ablation.ledger import write_ledger
from torchditan.extras.report.data import Data
from torchditan.extras.report.effects import MEMORY, METRICS, MFU, THROUGHPUT, Metric
from torchditan.extras.report.figures import curves_figure
from torchditan.extras.report.grids import read_grids
from torchditan.extras.report.labels import MINUS
from torchditan.extras.report.page import Page, Section
from torchditan.extras.report.report import page_of, write_report
from torchditan.extras.report.sections import _final_losses, _panels

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = "optimization_analysis.py"


def unmeasured(status: str, reason: str, **axes: Any) -> Row:
    """A run that did not complete. It keeps numbers, absurd ones: nobody may read them."""
    absurd = {"throughput": 1e9, "memory": 1e-9}
    return row(**absurd, **axes, status=status, reason=reason)


def write_grid(folder: Path, rows: Iterable[Row], *, axes: tuple[str, ...] = (), **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    described = {"schema_version": 1, "kind": "torchditan ablation grid", "name": "grid"}
    described |= {"base": None, "axes": {axis: [0] for axis in axes}, "settings": {}, "exclude": []}
    (folder / "grid.json").write_text(json.dumps(described | content))
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


def analyse(folders: list[Path], figures: list[str] | None = None) -> Data:
    return Data(grids=read_grids(folders), figures=figures)


def change(data: Data, axis: str, start: str, end: str, metric: Metric = THROUGHPUT) -> Any:
    """The row of effects.csv."""
    key = ("axis", axis), ("from_value", start), ("to_value", end), ("metric", metric.column)
    (found,) = (item for item in data.effects.itertuples() if all(getattr(item, name) == value for name, value in key))
    return found


def compiling(data: Data, metric: Metric = THROUGHPUT) -> Any:
    return change(data, COMPILE, "false", "true", metric)


def spread(effect: Any) -> list[float]:
    ends = ("median", "quartile_1", "quartile_3", "minimum", "maximum")
    return [getattr(effect, f"{name}_percent") for name in ends]


def section(page: Page, title: str) -> Section:
    (found,) = (section for section in page.sections if section.title == title)
    return found


def titles(data: Data) -> list[str]:
    return [section.title for section in page_of(data).sections]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return analyse([write_grid(tmp_path_factory.mktemp("a") / "known", two_settings())])


def test_effects_are_what_was_put_in(known: Data) -> None:
    for key, metric, percent in (
        ((COMPILE, "false", "true"), THROUGHPUT, 50),
        ((COMPILE, "false", "true"), MFU, 50),
        ((COMPILE, "false", "true"), MEMORY, -20),
        ((CHECKPOINTING, "none", "selective"), THROUGHPUT, -10),
        ((CHECKPOINTING, "none", "selective"), MEMORY, -40),
    ):
        found = change(known, *key, metric)
        better = (percent > 0) == metric.higher_is_better
        assert (found.num_pairs, found.num_better) == (6, 6 if better else 0)
        assert spread(found) == pytest.approx([percent] * 5)
    assert page_of(known).warnings == []


def test_an_effect_is_the_median_of_the_pairs_changes(tmp_path: Path) -> None:
    rows = []
    for batch, factor in ((1, 1.1), (2, 1.2), (4, 1.3), (8, 4.0)):  # their mean is +90%
        rows += [row(batch=batch, throughput=batch), row(batch=batch, compiled=True, throughput=factor * batch)]
    found = compiling(analyse([write_grid(tmp_path / "grid", rows)]))
    assert found.num_pairs == 4
    assert spread(found) == pytest.approx([25, 17.5, 97.5, 10, 300])


def test_pairs_differ_in_one_axis_and_in_nothing_else(tmp_path: Path) -> None:
    values = itertools.product((4, 8), (False, True), ("none", "full"), ("float32", "bfloat16"), ("1,2", "2,1"), (2, 4))
    keys = ("batch", "compiled", "checkpointing", "precision", "parallel", "patch")
    rows = [row(**dict(zip(keys, setting, strict=True)), **{"optimizer.lr": 0.1}) for setting in values]
    rows += [{**entry, "optimizer.lr": 0.2, "run_name": entry["run_name"] + "_lr-0.2"} for entry in rows]
    analysis = analyse([write_grid(tmp_path / "grid", rows, axes=("optimizer.lr",))])
    cells, axes = analysis.grids.cells, analysis.grids.axes
    assert len(axes) == 8
    assert len(analysis.pairs) == 6 * 64, "each of 128 cells has one partner in each of six axes"
    for pair in analysis.pairs.itertuples():
        differing = [axis for axis in axes if cells[axis][pair.a] != cells[axis][pair.b]]
        assert differing == [pair.axis]
        assert (cells[pair.axis][pair.a], cells[pair.axis][pair.b]) == (pair.from_value, pair.to_value)


def test_what_did_not_complete_is_never_data(tmp_path: Path, known: Data) -> None:
    rows = two_settings((4, 8, 16))
    for batch, status in enumerate(("oom", "error", "timeout", "skipped"), start=32):
        rows += [unmeasured(status, "why", batch=batch, compiled=compiled) for compiled in (False, True)]
    found = analyse([write_grid(tmp_path / "known", rows)])
    assert len(found.grids.cells) == len(known.grids.cells)
    assert found.effects.equals(known.effects)


def test_repeats_are_averaged_before_they_pair(tmp_path: Path) -> None:
    rows = [row(throughput=value, repeat=number) for number, value in enumerate((80, 120), start=1)]
    rows += [row(compiled=True, throughput=value, repeat=number) for number, value in enumerate((140, 180, 160), 1)]
    found = compiling(analyse([write_grid(tmp_path / "grid", rows)]))
    assert (found.num_pairs, found.median_percent) == (1, pytest.approx(60))


def test_batches_that_were_searched_for_are_compared_as_found(tmp_path: Path) -> None:
    rows = [row(batch=24, throughput=100), row(batch=40, compiled=True, throughput=180)]
    assert analyse([write_grid(tmp_path / "given", rows)]).effects.empty
    analysis = analyse([write_grid(tmp_path / "grid", rows, autotune="largest")])
    assert page_of(analysis).headlines == ["torch.compile: off → on: +80% images/s, no clear change in memory (1 pair)"]


def test_meshes_are_compared_on_equal_devices_only(tmp_path: Path) -> None:
    speeds = {"1,1": 100, "1,2": 180, "2,1": 198, "1,4": 320, "4,1": 380}
    rows = [row(parallel=mesh, throughput=speed) for mesh, speed in speeds.items()]
    pairs = analyse([write_grid(tmp_path / "grid", rows)]).pairs
    assert list(zip(pairs["from_value"], pairs["to_value"], strict=True)) == [("1,2", "2,1"), ("1,4", "4,1")]


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
    assert analysis.grids.effects == ["checkpoint_fraction", "resolution"]
    found = change(analysis, "checkpoint_fraction", "0", "1")
    assert (found.num_pairs, found.median_percent) == (3, pytest.approx(-20))
    assert change(analysis, "resolution", "512x512", "1024x1024").num_pairs == 2
    *_, table = section(page_of(analysis), "Throughput and memory").blocks
    fastest = table.frame[["model", "resolution", "images/s"]].head(3).to_numpy().tolist()
    assert fastest[0] == ["sdxl/SDXL", "512x512", "72.00"]
    one_each = [entry for entry in published_rows() if "1024x" not in entry["run_name"]]
    assert analyse([write_grid(tmp_path / "one", one_each, axes=axes)]).grids.effects == ["checkpoint_fraction"]


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
    curves = analysis.curves("loss")
    assert [(curve.panel, curve.label, len(curve.values)) for curve in curves] == [
        ("bfloat16", "optimizer.lr 0.001", 250),
        ("bfloat16", "optimizer.lr 0.0001", 250),
        ("float16", "optimizer.lr 0.001", 3),
    ]
    assert curves[2].values.to_dict() == {1: 2.0, 2: 3.0, 4: 4.0}
    table = _final_losses(analysis)
    assert table.to_numpy().tolist() == [
        ["optimizer.lr 0.001", "error", "0.01"],
        ["optimizer.lr 0.0001", "0.001", "0.001"],
    ]
    figure = curves_figure(_panels(analysis, "Training loss", "loss", "loss"))
    assert [panel.get_title("left") for panel in figure.axes] == ["Training loss, bfloat16", "Training loss, float16"]
    (cross,) = (line for panel in figure.axes for line in panel.lines if line.get_marker() == "X")
    assert cross.get_xydata().tolist() == [[4, 4]], "where the failed run ended"
    assert [text.get_text() for text in figure.legends[0].texts] == ["optimizer.lr 0.001", "optimizer.lr 0.0001"]


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
        ([row(), row(batch=16, compiled=True)], []),
    ],
    ids=["slower", "noise", "not all pairs", "no pair"],
)
def test_the_headline_follows_the_pairs(tmp_path: Path, rows: list[Row], lines: list[str]) -> None:
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert page_of(analysis).headlines == lines
    assert ("What each setting changes" in titles(analysis)) == bool(lines)


def test_pairs_of_two_commits_count_and_are_flagged(tmp_path: Path) -> None:
    rows = [row(throughput=100), row(compiled=True, throughput=150, git_commit="other")]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert compiling(analysis).median_percent == pytest.approx(50)
    assert analysis.pairs["mixed"].tolist() == [True]
    assert "1 of 1 matched pair mix commits, versions" in page_of(analysis).warnings[0]


def test_devices_of_one_grid_never_mix(tmp_path: Path) -> None:
    rows = [row(throughput=100), row(compiled=True, throughput=300, device="NVIDIA H200")]
    analysis = analyse([write_grid(tmp_path / "grid", rows)])
    assert analysis.pairs.empty
    assert analysis.grids.sources == [f"grid on {DEVICE}", "grid on NVIDIA H200"]


def test_folders_are_compared_setting_by_setting(tmp_path: Path) -> None:
    slow = write_grid(tmp_path / "a40", [{**entry, "device": "NVIDIA A40"} for entry in two_settings()])
    rows = [{**entry, "images_per_second_mean": 2.5 * entry["images_per_second_mean"]} for entry in two_settings()]
    fast = write_grid(tmp_path / "a100", [*rows[:-1], row(batch=64, throughput=1e6)])
    analysis = analyse([slow, fast])
    names = f"a100 on {DEVICE}", "a40 on NVIDIA A40"
    between = change(analysis, "source", *reversed(names))
    assert (between.num_pairs, between.median_percent) == (11, pytest.approx(150))
    assert page_of(analysis).headlines[0] == (
        f"{names[0]} against {names[1]}: +150% images/s, no clear change in memory (11 pairs)"
    )
    assert set(analysis.effects["grid"]) == set(names)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_grid(tmp_path / name / "grid", [row()]) for name in ("x", "y")]
    assert analyse([*folders, folders[0]]).grids.sources == ["x/grid", "y/grid"]


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
    assert "2 runs failed, most often: " in body and "18 runs: 14 completed, 1 out of memory" in body
    assert "&lt;b&gt;no&lt;/b&gt;" in body and body.count("<script") == 1 and "<b>no" not in body


def test_the_plots_are_in_the_page_and_next_to_it_as_png_and_svg(reports: list[dict[str, bytes]]) -> None:
    files = reports[0]
    plots = ("effects", "throughput", "memory")
    drawn = {f"{name}.{end}" for name in plots for end in ("svg", "png")}
    assert files.keys() == {"report.html", "effects.csv", "pairs.csv"} | drawn
    for name in plots:
        svg = files[f"{name}.svg"]
        assert svg[svg.index(b"<svg") :] in files["report.html"]
        Image.open(io.BytesIO(files[f"{name}.png"])).verify()
    assert files["report.html"].count(b"<svg") == len(plots)
    assert "activation checkpointing: none → selective" in files["effects.svg"].decode()


def test_the_report_is_reproducible_and_links_the_files_next_to_it(reports: list[dict[str, bytes]]) -> None:
    assert reports[0] == reports[1]
    page = reports[0]["report.html"].decode()
    links = set(re.findall(r"""<a href="([^"#][^"]*)""", page))
    assert links == reports[0].keys() - {"report.html"}, "the files next to it"


def test_labels_in_plots_are_never_formulas_or_markup(tmp_path: Path) -> None:
    names = ["$\\frac{$", "<b>&", "_hidden"]
    rows = [row(throughput=100 + number, **{"model.mlp": name, "run_name": name}) for number, name in enumerate(names)]
    page = page_of(analyse([write_grid(tmp_path / "grid", rows, axes=("model.mlp",))])).html
    assert "<b>&<" not in page and ">&lt;b&gt;&amp;<" in page
    svg = page[page.index('<figure id="throughput"') :]
    for name in ("$\\frac{$", "&lt;b&gt;&amp;", "_hidden"):
        assert name in svg[: svg.index("</figure>")], name


@pytest.mark.usefixtures("undrawn")
def test_effects_csv_holds_the_effects(tmp_path: Path, run_script: RunScript) -> None:
    assert run_script(SCRIPT, write_grid(tmp_path / "grid", two_settings()), "--out", tmp_path)[0] == 0
    with open(tmp_path / "effects.csv", newline="") as file:
        table = list(csv.DictReader(file))
    wanted = {"comparison": "same batch", "axis": COMPILE, "metric": MEMORY.column}
    (entry,) = (entry for entry in table if wanted.items() <= entry.items())
    assert (entry["better"], entry["num_pairs"], float(entry["median_percent"])) == ("lower", "6", pytest.approx(-20))
    assert len(table) == 2 * len(METRICS)
    with open(tmp_path / "pairs.csv", newline="") as file:
        pairs = list(csv.DictReader(file))
    assert len(pairs) == 12


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "rows",
    [
        [row(batch=16, mfu_mean=None, peak_memory_gib=None, loss_last=None)],
        [unmeasured("error", "it died before it said anything", device="", torch_version="", num_devices=None)],
    ],
    ids=["little was measured", "nothing started"],
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
        (lambda text: text.splitlines()[0] + "\n", "{csv}", ["no run"]),
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


def test_a_folder_that_is_no_grid_is_one_line(tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "foreign").mkdir()
    for name, mentions in {"gone": ["exist", "grid folder"], "foreign": ["grid folder", "grid.json"]}.items():
        code, out, err = run_script(SCRIPT, tmp_path / name)
        assert (code, out) == (2, "")
        assert_refused(err, str(tmp_path / name), mentions)
    (tmp_path / "foreign" / "grid.json").write_text("{")
    with refused(str(tmp_path / "foreign"), "grid.json"):
        analyse([tmp_path / "foreign"])


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


@pytest.mark.usefixtures("undrawn")
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
    assert analysis.grids.varied == [BATCH_SIZE, CHECKPOINTING, "optimizer.lr"]
    assert set(analysis.grids.runs[PARALLEL]) == {"1,2"}
    assert list(analysis.grids.runs["status"]).count("error") == 1
    checkpointing = change(analysis, CHECKPOINTING, "none", "full")
    assert (checkpointing.num_pairs, checkpointing.median_percent) == (4, -50.0)
    assert analysis.grids.cells["images_per_second_mean"].max() == 16.0, "the last 10 of 50 steps"
    code, out, err = run_script(SCRIPT, folder)
    assert (code, out) == (0, f"report: {folder}/analysis/report.html\n"), err
    write_run(folder / "accumulated", "--training.batch_size=8", "--training.global_batch_size=32")
    assert "training.global_batch_size" in analyse([folder]).grids.varied
