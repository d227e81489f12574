# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Pages of several runs, also with --compare: exactly known numbers, missing data, and runs of different jobs."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from refusals import assert_refused

from torchditan.extras.report.data import Data
from torchditan.extras.report.grids import read_grids
from torchditan.extras.report.report import page_of
from torchditan.extras.report.runs import differing_settings, read_runs

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = "optimization_analysis.py"
A40 = {"device": "cuda", "device_name": "NVIDIA A40", "device_count": 4, "hostname": "a40-1", "cpu": "EPYC"}
CPU = {"device": "cpu", "device_name": "Xeon", "device_count": 2, "hostname": "desk", "cpu": "Xeon", "cpu_count": 8}
TRAJECTORY = {"model.flavor": "DiT-S", "optimizer.lr": 1e-4, "training.global_batch_size": 32}
CONFIG = {
    "job": {"dump_folder": "outputs", "config_file": None},
    "model": {"flavor": "DiT-S"},
    "optimizer": {"lr": 1e-4},
    "training": {
        "global_batch_size": 32,
        "steps": 20,
        "compile": False,
        "mixed_precision_param": "bfloat16",
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
    },
    "float8": {"enable_float8_linear": False},
    "sampling": {"guidance_scale": 2.0},
    "metrics": {"experiment_name": "run", "log_freq": 1},
}


def line(step: int, *, seconds: float = 1.0, **others: Any) -> dict[str, Any]:
    """A line of a run whose steps take `seconds`, the first one ten times as long."""
    return {
        "step": step,
        "loss": 2.0 / (1 + step),
        "step_time_s": seconds if step > 1 else 10 * seconds,
        "images_per_second": 32 / seconds if step > 1 else 3.2 / seconds,
        "peak_memory_gib": 4.0 + 0.1 * (step == 2),
        "elapsed_s": (step + 9) * seconds,
        **others,
    }


def write_run(
    folder: Path,
    lines: list[dict[str, Any]] | None = None,
    *,
    hardware: dict[str, Any] = CPU,
    options: dict[str, Any] | None = None,
    picture: int | None = None,
    state: str = "completed",
    **content: Any,
) -> Path:
    """A run directory as the trainer leaves it; `options` change its config, and what its trajectory has of them."""
    config, trajectory = copy.deepcopy(CONFIG), dict(TRAJECTORY)
    for name, value in (options or {}).items():
        section, key = name.split(".")
        config.setdefault(section, {})[key] = value
        if name in trajectory:
            trajectory[name] = value
    folder.mkdir(parents=True)
    now = "2026-11-20T10:00:00+00:00"
    written = {
        "run_id": folder.name,
        "created": now,
        "started": now,
        "config": config,
        "trajectory": trajectory,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git_commit": "3976addf00d",
        "hardware": hardware,
        **content,
    }
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "status.json").write_text(json.dumps({"state": state, "reason": None, "step": 0}))
    lines = [line(step) for step in range(1, 21)] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    if picture is not None:
        (folder / "samples").mkdir()
        Image.new("RGB", (16, 8)).save(folder / "samples" / f"step_{picture:08d}.png")
    return folder


def sampled(steps: range, *, every: int, seconds: float = 1.0, **others: Any) -> list[dict[str, Any]]:
    """Lines of which each `every`-th has scores: a PSNR of its step, an SSIM of a hundredth."""
    scores = {step: {"psnr": float(step), "ssim": step / 100, "seconds_per_image": 0.5} for step in steps}
    return [line(step, seconds=seconds, **(scores[step] if step % every == 0 else {}), **others) for step in steps]


def compared(*folders: Path) -> Data:
    return Data(read_runs(folders, None))


def text_of(page: str) -> str:
    """What a reader sees, on one line."""
    page = re.sub(r"<(script|style|svg).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_noise_is_that_of_a_mean_however_often_a_run_logs(tmp_path: Path) -> None:
    speeds = [30.0, 34.0] * 500  # images/s of each record
    for every in (1, 50):
        steps = range(every, 1000 * every + 1, every)
        records = [line(step, images_per_second=speed) for step, speed in zip(steps, speeds, strict=True)]
        for name, lr in (("a", 1e-4), ("b", 2e-4)):
            write_run(tmp_path / f"{every}" / name, records, options={"optimizer.lr": lr})
    found = [Data(grids=read_grids([tmp_path / str(every)])).effects for every in (1, 50)]
    noise = [one[one["metric"] == "images_per_second_mean"]["noise_percent"].item() for one in found]
    deviation = 2 / 32 / math.sqrt(200)  # of the mean of the last fifth of the records
    assert noise == pytest.approx([200 * math.sqrt(2) * deviation] * 2, rel=0.01)


def test_one_job_on_two_machines(tmp_path: Path, run_script: RunScript) -> None:
    """Four A40s take a quarter of the time of a CPU; both draw samples at every fifth step."""
    steps = range(1, 21)
    cpu = write_run(tmp_path / "cpu", sampled(steps, every=5), picture=20)
    gpu = write_run(tmp_path / "gpu", sampled(steps, every=5, seconds=0.25), hardware=A40, picture=20)
    code, out, err = run_script(SCRIPT, "--compare", cpu, gpu, "--labels", "desk", "<b>A40</b>")
    file = tmp_path / "compare" / "compare.html"
    assert (code, out, err) == (0, f"report: {file}\n", "")
    page = file.read_text()
    text = text_of(page)
    for expected in (
        "Total training time: &lt;b&gt;A40&lt;/b&gt; is 4.00 times as fast as desk (20 steps in 7.25 s instead of 29",
        "Runs of one job have the same losses.",
        "time for 20 steps 29 s 7.25 s times as fast 1.00 4.00 speed-up of images/s 1.00 4.00",
        "PSNR at step 20 20.00 dB 20.00 dB SSIM at step 20 0.2000 0.2000",
        "CPU, 2 processes 4 x NVIDIA A40",
    ):
        assert expected in text, expected
    for expected in ("Training loss over time", "Time over steps", "PSNR over time", "SSIM over time"):
        assert f">{expected}<" in page
    assert "<b>A40" not in page and page.count('<img src="data:image/png;base64,') == 2
    plots = {f"{name}.{end}" for name in ("loss", "scores", "speed") for end in ("svg", "png")}
    assert {"compare.html", "compare.csv"} | plots <= {path.name for path in file.parent.iterdir()}
    first, second = csv.DictReader((tmp_path / "compare" / "compare.csv").read_text().splitlines())
    assert (first["label"], second["hardware"], second["world_size"]) == ("desk", "4 x NVIDIA A40", "4")
    assert (float(second["speed_up"]), float(second["training_time_ratio"])) == (4.0, 4.0)
    assert (first["psnr_at_equal_step"], first["elapsed_s_at_equal_step"]) == ("20.0", "29.0")


def test_hardware_and_parallel_mode_are_those_of_the_world(tmp_path: Path) -> None:
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
    cases = [
        (CPU, (1, -1, 1), "CPU, 2 processes", "FSDP"),
        ({**CPU, "device_count": 1}, (1, -1, 1), "CPU, 1 process", "one process"),
        ({**A40, "device_count": 1}, (1, -1, 1), "NVIDIA A40", "one process"),
        *((A40, (*mesh, 1), "4 x NVIDIA A40", "DDP") for mesh in ((4, 1), (4, -1))),
        *((A40, (*mesh, 1), "4 x NVIDIA A40", "HSDP") for mesh in ((2, -1), (2, 2))),
        (A40, (2, 1, 2), "4 x NVIDIA A40", "HSDP, context parallelism over 2"),  # two share the parameters, too
    ]
    folders = []
    for number, (machine, values, *_) in enumerate(cases):
        options = {f"training.{name}": value for name, value in zip(degrees, values, strict=True)}
        folders.append(write_run(tmp_path / str(number), hardware=machine, options=options))
    found = [[run.hardware, run.parallel_mode] for run in compared(*folders).runs]
    assert found == [list(case[2:]) for case in cases]


def test_times_are_compared_over_the_steps_that_all_reached(tmp_path: Path) -> None:
    part = [line(step, seconds=0.5) for step in range(1, 11)]
    found = compared(write_run(tmp_path / "whole"), write_run(tmp_path / "part", part))
    columns = found.table[["common_step", "training_time_s", "training_time_ratio"]]
    assert columns.to_numpy().tolist() == [[10, 19.0, 1.0], [10, 9.5, 2.0]]
    seldom = [line(step) for step in (1, 8, 16)]
    found = compared(tmp_path / "part", write_run(tmp_path / "seldom", seldom))
    columns = found.table[["common_step", "training_time_s", "training_time_ratio"]]
    assert columns.to_numpy().tolist() == [[8, 8.5, 2.0], [8, 17.0, 1.0]], "a line of a later step is of more steps"


def test_equal_steps_are_the_last_step_at_which_all_sampled(tmp_path: Path) -> None:
    often = write_run(tmp_path / "often", sampled(range(1, 31), every=5))
    seldom = write_run(tmp_path / "seldom", sampled(range(1, 30), every=10))
    never = write_run(tmp_path / "never", [line(step) for step in (1, 7, 14)])
    columns = ["equal_step", "psnr_at_equal_step", "elapsed_s_at_equal_step"]
    found = compared(often, seldom, never).table[columns].to_numpy().tolist()
    assert found == [[20, 20.0, 29.0], [20, 20.0, 29.0], [20, None, None]]
    assert compared(never, write_run(tmp_path / "unsampled")).table["equal_step"].tolist() == [14, 14]


def test_own_prompts_are_compared_with_the_original(tmp_path: Path) -> None:
    folders = []
    for name, psnr in (("cpu", 30.0), ("gpu", 29.5)):
        lines = [line(1), line(2, psnr_to_original=psnr, ssim_to_original=0.9, seconds_per_image=0.5)]
        folders.append(write_run(tmp_path / name, lines, options={"sampling.prompts": ["a cat"]}))
    found = compared(*folders).table[["psnr_at_equal_step", "scored_against"]]
    assert found.to_numpy().tolist() == [[30.0, "original"], [29.5, "original"]]


def test_one_job_may_run_otherwise_and_only_its_curves_should_agree(tmp_path: Path) -> None:
    path = {"model.path": "/home/b/FLUX.1-dev"}
    changed = {"training.compile": True, "sampling.guidance_scale": 1.0, "metrics.experiment_name": "b", **path}
    folders = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", hardware=A40, options=changed, trajectory={**TRAJECTORY, **path}),
        write_run(tmp_path / "c", options={"optimizer.lr": 3e-4}),
    ]
    found = compared(*folders)
    assert [(setting.name, setting.kind.split(";")[0]) for setting in differing_settings(found.runs)] == [
        ("optimizer.lr", "training"),
        ("model.path", "a path"),
        ("sampling.guidance_scale", "sampling"),
        ("training.compile", "execution"),
    ]
    assert [(pair.first.label, pair.second.label) for pair in found.curve_pairs] == [("a", "b")]


@pytest.mark.parametrize(("factor", "parted_at"), [(1.0, None), (1.0009, None), (1.0011, 12), (0.9, 12)])
def test_curves_part_where_losses_differ_by_more_than_a_thousandth(
    tmp_path: Path, factor: float, parted_at: int | None
) -> None:
    changed = [line(step) for step in range(2, 21, 2)]  # another frequency of logging
    changed[5]["loss"] *= factor  # of step 12
    found = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", changed))
    (pair,) = found.curve_pairs
    assert (pair.difference, pair.parted_at) == (pytest.approx(abs(factor - 1) / max(1.0, factor)), parted_at)
    assert ["step 12 (a and b)" in warning for warning in page_of(found).warnings] == [True] * (parted_at is not None)
    assert len(page_of(found).headlines) == 1 + (parted_at is None)


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_measured_is_none_and_never_zero(tmp_path: Path, run_script: RunScript) -> None:
    bare = [{"step": 1, "loss": None, "psnr": None}, {"step": 2, "loss": math.nan}]
    a = write_run(tmp_path / "a", bare, hardware={}, config={"training": {}}, trajectory={})
    b = write_run(tmp_path / "b", [], state="running", started="2026-11-21T10:00:00+00:00")
    names = ("loss", "validation_loss", "elapsed_s", "training_time_s", "steps_per_second", "images_per_second")
    names += ("seconds_per_image", "peak_memory_gib", "speed_up", "psnr_at_equal_step", "world_size")
    assert run_script(SCRIPT, "--compare", a, b)[0] == 0
    first, _ = csv.DictReader((tmp_path / "compare" / "compare.csv").read_text().splitlines())
    assert [first[name] for name in names] == [""] * len(names)
    text = text_of((tmp_path / "compare" / "compare.html").read_text())
    assert "running, or killed, resumed" in text and not re.search(r"\bnan\b|\bNone\b|\binf\b|PSNR", text)


@pytest.mark.usefixtures("undrawn")
def test_a_grid_is_compared_run_by_run_in_the_order_of_its_ledger(tmp_path: Path, run_script: RunScript) -> None:
    grid = tmp_path / "grid"
    for name in ("rank-1", "rank-16", "rank-2"):
        write_run(grid / "runs" / name, run_id=name, state="oom" if name == "rank-16" else "completed")
    names = ("rank-1", "rank-2", "gone", "rank-16")
    (grid / "runs_summary.csv").write_text("\n".join(("run_name", *names, "")))
    (grid / "grid.json").write_text("{}")
    code, out, _ = run_script(SCRIPT, "--compare", grid)
    assert (code, out) == (0, f"report: {grid}/compare/compare.html\n")
    assert "status completed completed out of memory" in text_of((grid / "compare" / "compare.html").read_text())
    rows = list(csv.DictReader((grid / "compare" / "compare.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == ["rank-1", "rank-2", "rank-16"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["--compare", "{a}"], '--compare = "{a}"', ["single", "two or more"]),
        (["--compare", "{a}", "{a}/../copyed"], "{a}/../copyed", ["{a}/../copied?"]),
        (["--compare", "{a}", "{b}", "--labels", "x"], '--labels = "x"', ["2 names"]),
        (["--compare", "{a}", "{b}", "--out={a}/config.json"], '--out = "{a}/config.json"', ["writable folder"]),
        (["{b}", "--compare", "{a}", "{b}"], "--compare", ["{b}", "grid folders"]),
        (["{a}/..", "--labels", "x"], '--labels = "x"', ["runs", "grids"]),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    tmp_path: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    folders = {name: write_run(tmp_path / name, run_id=name) for name in ("a", "b", "copied")}
    folders["grid"] = tmp_path / "grid"
    folders["grid"].mkdir()
    (tmp_path / "grid/grid.json").write_text("{}")
    code, out, err = run_script(SCRIPT, *(argument.format(**folders) for argument in arguments))
    assert (code, out) == (2, "")
    assert_refused(err, about.format(**folders), [mention.format(**folders) for mention in mentions])
    assert not (tmp_path / "compare").exists()
