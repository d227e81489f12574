# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""optimization_analysis.py --compare: exactly known numbers, missing data, and runs of different jobs."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from refusals import assert_refused, refused

from torchditan.report.compare import Comparison, compare, comparison_csv
from torchditan.report.compare_page import comparison_page
from torchditan.report.page import html_of

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
    pictures: tuple[int, ...] = (),
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
    for step in pictures:
        path = folder / "samples" / f"step_{step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 8), (step, 0, 0)).save(path)
    return folder


def sampled(steps: range, *, every: int, seconds: float = 1.0, **others: Any) -> list[dict[str, Any]]:
    """Lines of which each `every`-th has scores: a PSNR of its step, an SSIM of a hundredth."""
    scores = {step: {"psnr": float(step), "ssim": step / 100, "seconds_per_image": 0.5} for step in steps}
    return [line(step, seconds=seconds, **(scores[step] if step % every == 0 else {}), **others) for step in steps]


@pytest.fixture
def two(tmp_path: Path) -> Comparison:
    """A CPU and four A40s that take a quarter of its time, both sampling every fifth step."""
    steps = range(1, 21)
    cpu = write_run(tmp_path / "cpu", sampled(steps, every=5), pictures=(5, 10, 15, 20))
    gpu = write_run(tmp_path / "gpu", sampled(steps, every=5, seconds=0.25), hardware=A40, pictures=(5, 10, 15, 20))
    return compare([cpu, gpu])


def text_of(page: str) -> str:
    """What a reader sees, on one line."""
    page = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_own_prompts_are_compared_with_the_original(tmp_path: Path) -> None:
    for name, psnr in (("cpu", 30.0), ("gpu", 29.5)):
        lines = [line(1), line(2, psnr_to_original=psnr, ssim_to_original=0.9, seconds_per_image=0.5)]
        write_run(tmp_path / name, lines, options={"sampling.prompts": ["a cat"]})
    comparison = compare([tmp_path / "cpu", tmp_path / "gpu"])
    assert [run.samplings[0].psnr for run in comparison.runs] == [30.0, 29.5]
    rows = list(csv.DictReader(comparison_csv(comparison).decode().splitlines()))
    assert [(row["psnr_at_equal_step"], row["scored_against"]) for row in rows] == [
        ("30.0", "original"),
        ("29.5", "original"),
    ]
    text = text_of(html_of(comparison_page(comparison)))
    assert "against samples of the original model: how far the run moved" in text
    assert "cpu 21 s" not in text and "cpu 11 s" in text and "30.00 0.9000" in text


def test_speed_is_the_median_over_steps_without_the_first(two: Comparison) -> None:
    cpu, gpu = two.runs
    assert (cpu.steps_per_second, cpu.images_per_second) == (1.0, 32.0)
    assert (gpu.steps_per_second, gpu.images_per_second) == (4.0, 128.0)
    assert (two.speed_up(cpu), two.speed_up(gpu)) == (1.0, 4.0)
    assert (cpu.elapsed_s, gpu.elapsed_s) == (29.0, 7.25)
    assert cpu.peak_memory_gib == pytest.approx(4.1)
    assert cpu.loss == pytest.approx(2 / 21)
    assert cpu.seconds_per_image == 0.5


def test_every_step_counts_once_however_often_it_is_logged(tmp_path: Path) -> None:
    often = [line(step, seconds=3.0) for step in (1, 2, 3, 4)]  # three steps of 3 s, then sixteen of 1 s in one window
    folder = write_run(tmp_path / "a", [*often, line(20, seconds=1.0)])
    other = write_run(tmp_path / "b")
    assert compare([folder, other]).runs[0].steps_per_second == 1.0


def test_the_first_step_does_not_count_and_is_no_speed(tmp_path: Path) -> None:
    two_steps = write_run(tmp_path / "a", [line(1), line(2)])
    one_step = write_run(tmp_path / "b", [line(1)])
    assert [run.steps_per_second for run in compare([two_steps, one_step]).runs] == [1.0, None]


def test_processes_of_a_cpu_are_not_called_devices(tmp_path: Path) -> None:
    cases = [
        (CPU, "CPU, 2 processes"),
        ({**CPU, "device_count": 1}, "CPU, 1 process"),
        (A40, "4 x NVIDIA A40"),
        ({**A40, "device_count": 1}, "NVIDIA A40"),
    ]
    folders = [write_run(tmp_path / f"run{index}", hardware=machine) for index, (machine, _) in enumerate(cases)]
    assert [run.hardware for run in compare(folders).runs] == [name for _, name in cases]


@pytest.mark.parametrize(
    ("replicate", "shard", "mode"), [(1, -1, "FSDP"), (4, 1, "DDP"), (4, -1, "DDP"), (2, -1, "HSDP"), (2, 2, "HSDP")]
)
def test_the_parallel_mode_is_that_of_the_world(tmp_path: Path, replicate: int, shard: int, mode: str) -> None:
    name = "training.data_parallel_{}_degree"
    options = {name.format("replicate"): replicate, name.format("shard"): shard}
    folder = write_run(tmp_path / "a", hardware=A40, options=options)
    alone = write_run(tmp_path / "b", hardware={**CPU, "device_count": 1})
    assert [run.parallel_mode for run in compare([folder, alone]).runs] == [mode, "one process"]


def test_the_parallel_mode_names_a_context_degree(tmp_path: Path) -> None:
    degrees = {"replicate_degree": 2, "shard_degree": 1}
    options = {f"training.data_parallel_{name}": degree for name, degree in degrees.items()}
    options["training.context_parallel_degree"] = 2  # of 4 ranks; two share the parameters, too
    folders = [write_run(tmp_path / name, hardware=A40, options=options) for name in "ab"]
    modes = [run.parallel_mode for run in compare(folders).runs]
    assert modes == 2 * ["HSDP, context parallelism over 2"]


def test_equal_time_is_the_last_time_that_all_reached(two: Comparison) -> None:
    cpu, gpu = two.runs
    assert two.equal_time_s == 7.25
    assert (two.at_equal_time(gpu).step, two.at_equal_time(gpu).loss) == (20, pytest.approx(2 / 21))
    behind = two.at_equal_time(cpu)  # its first line came after 10 s
    assert (behind.step, behind.loss, behind.sampling) == (None, None, None)


def test_the_score_at_equal_time_is_that_of_the_last_sampling_by_then(tmp_path: Path) -> None:
    steps = range(1, 41)
    slow = write_run(tmp_path / "slow", sampled(steps, every=5))
    fast = write_run(tmp_path / "fast", sampled(steps, every=5, seconds=0.5))
    found = compare([slow, fast])
    assert found.equal_time_s == 24.5
    standing = found.at_equal_time(found.runs[0])
    assert (standing.step, standing.elapsed_s) == (15, 24.0)
    assert standing.sampling is not None
    assert (standing.sampling.step, standing.sampling.psnr, standing.sampling.ssim) == (15, 15.0, 0.15)
    other = found.at_equal_time(found.runs[1]).sampling
    assert other is not None
    assert other.step == 40


def test_equal_steps_are_the_last_step_at_which_all_sampled(tmp_path: Path) -> None:
    often = write_run(tmp_path / "often", sampled(range(1, 31), every=5))
    seldom = write_run(tmp_path / "seldom", sampled(range(1, 30), every=10))
    never = write_run(tmp_path / "never")
    found = compare([often, seldom, never])
    assert found.equal_step == 20
    assert [found.at_equal_step(run).sampling is None for run in found.runs] == [False, False, True]
    first = found.at_equal_step(found.runs[0])
    assert (first.elapsed_s, first.sampling and first.sampling.psnr) == (29.0, 20.0)


def test_without_scores_the_steps_of_the_pictures_and_else_the_logged_ones_are_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", pictures=(0, 5, 10))
    b = write_run(tmp_path / "b", pictures=(0, 5, 15))
    c = write_run(tmp_path / "c", [line(step) for step in (1, 7, 14)])
    found = compare([a, b])
    assert (found.equal_step, found.picture_step) == (5, 5)
    assert found.runs[0].samplings[0].elapsed_s == 0.0
    for folder in (a, b):
        for picture in (folder / "samples").iterdir():
            picture.unlink()
    found = compare([a, b, c])
    assert (found.equal_step, found.picture_step) == (14, None)


def test_a_sampling_that_was_never_logged_has_no_time(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [line(step) for step in (1, 10)], pictures=(5, 15))
    found = compare([a, write_run(tmp_path / "b")]).runs[0]
    assert [(sampling.step, sampling.elapsed_s) for sampling in found.samplings] == [(5, 19.0), (15, None)]


def test_runs_of_one_job_share_what_is_learned_and_may_run_otherwise(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(
        tmp_path / "b",
        hardware=A40,
        options={"training.compile": True, "sampling.guidance_scale": 1.0, "metrics.experiment_name": "b"},
    )
    found = compare([a, b])
    kinds = {setting.name: (setting.kind, setting.values) for setting in found.settings}
    assert kinds == {
        "sampling.guidance_scale": ("drawing", [2.0, 1.0]),
        "training.compile": ("running", [False, True]),
    }
    assert len(found.curves) == 1


def test_another_learning_rate_is_another_job_and_its_curve_need_not_agree(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    c = write_run(tmp_path / "c", options={"optimizer.lr": 3e-4, "training.global_batch_size": 64})
    found = compare([a, b, c])
    assert [(setting.name, setting.kind) for setting in found.settings] == [
        ("optimizer.lr", "job"),
        ("training.global_batch_size", "job"),
    ]
    assert [(pair.first.label, pair.second.label) for pair in found.curves] == [("a", "b")]


def test_weights_at_another_place_may_be_the_same(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        path = f"/home/{name}/FLUX.1-dev"
        trajectory = {**TRAJECTORY, "model.path": path}
        runs.append(write_run(tmp_path / name, options={"model.path": path}, trajectory=trajectory))
    found = compare(runs)
    assert [(setting.name, setting.kind) for setting in found.settings] == [("model.path", "path")]
    assert len(found.curves) == 1


@pytest.mark.parametrize(("factor", "parted_at"), [(1.0, None), (1.0009, None), (1.0011, 12), (0.9, 12)])
def test_curves_part_where_losses_differ_by_more_than_a_thousandth(
    tmp_path: Path, factor: float, parted_at: int | None
) -> None:
    a = write_run(tmp_path / "a", [line(step) for step in range(1, 21)])
    changed = [line(step) for step in range(2, 21, 2)]  # another frequency of logging
    changed[5]["loss"] *= factor  # of step 12
    (pair,) = compare([a, write_run(tmp_path / "b", changed)]).curves
    assert (pair.num_steps, pair.parted_at) == (10, parted_at)
    assert pair.difference == pytest.approx(abs(factor - 1) / max(1.0, factor))


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    torn = write_run(tmp_path / "torn", run_id="other")
    text = (torn / "metrics.jsonl").read_text()
    (torn / "metrics.jsonl").write_text(text[:-30])
    with open(whole / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\x00{"step": 21\n7\n[1]\n{"loss": 3}\n')
    found = compare([whole, torn])
    assert [run.steps for run in found.runs] == [20, 19]
    assert found.equal_time_s == 28.0


def test_what_was_not_measured_is_none_and_never_zero(tmp_path: Path) -> None:
    bare = [{"step": 1, "loss": None, "psnr": None}, {"step": 2, "loss": math.nan, "peak_memory_gib": True}]
    a = write_run(tmp_path / "a", bare, hardware={}, config={"training": {}}, trajectory={})
    b = write_run(tmp_path / "b", [])
    found = compare([a, b])
    for run in found.runs:
        values = (run.loss, run.elapsed_s, run.steps_per_second, run.images_per_second, run.seconds_per_image)
        assert values == (None,) * 5
        assert (run.peak_memory_gib, run.validation_loss, found.speed_up(run)) == (None, None, None)
    assert (found.equal_time_s, found.equal_step) == (None, 2)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found).decode())))
    empty = [rows[0][name] for name in ("loss", "elapsed_s", "speed_up", "psnr_at_equal_time", "world_size")]
    assert empty == [""] * 5


def test_the_page_says_what_was_not_measured(tmp_path: Path, run_script: RunScript) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", [{"step": 1, "elapsed_s": 5.0}])
    assert run_script(SCRIPT, "--compare", a, b)[0] == 0
    text = text_of((tmp_path / "compare" / "compare.html").read_text())
    assert "b CPU, 2 processes FSDP 32 bfloat16 1 of 20 5 s 2.00" + 5 * " not measured" + " completed" in text
    assert "PSNR" not in text and "Samples side by side" not in text, "no run has any"


def test_the_csv_has_one_row_per_run(two: Comparison) -> None:
    cpu, gpu = csv.DictReader(io.StringIO(comparison_csv(two).decode()))
    assert (cpu["label"], gpu["hardware"], gpu["world_size"]) == ("cpu", "4 x NVIDIA A40", "4")
    assert (float(gpu["speed_up"]), float(gpu["psnr_at_equal_time"])) == (4.0, 20.0)
    assert (cpu["psnr_at_equal_time"], cpu["psnr_at_equal_step"], cpu["elapsed_s_at_equal_step"]) == (
        "",
        "20.0",
        "29.0",
    )


def test_the_page_says_it_all_and_opens_offline(two: Comparison, run_script: RunScript, tmp_path: Path) -> None:
    code, out, err = run_script(SCRIPT, "--compare", *(run.path for run in two.runs), "--labels", "desk", "<b>A40</b>")
    assert (code, err) == (0, "")
    file = tmp_path / "compare" / "compare.html"
    assert out == f"report: {file}\n"
    assert (tmp_path / "compare" / "compare.csv").exists()
    page = file.read_text()
    text = text_of(page)
    for expected in (
        "Total training time: &lt;b&gt;A40&lt;/b&gt; is 4.00 times as fast as desk (20 steps in 7.25 s instead of 29",
        "Runs of one job have the same losses.",
        "CPU, 2 processes",
        "After 7.25 s, the largest time that all runs reached.",
        "At step 20, the last common step with scored samples.",
        "20.00",
    ):
        assert expected in text, expected
    assert "<b>A40" not in page
    assert page.count('<img src="data:image/png;base64,') == 3  # at step 20 of both, and after 7.25 s of the GPUs
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.?http", page)
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text)
    titles = ("loss over steps", "loss over time", "time over steps", "SSIM over time", "PSNR, dB over time")
    assert [title for title in titles if title not in page] == []
    plots = {f"{name}.{end}" for name in ("curves", "psnr", "ssim") for end in ("svg", "png")}
    assert {path.name for path in file.parent.iterdir()} == {"compare.html", "compare.csv"} | plots


def test_times_are_compared_over_the_steps_that_all_reached(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    part = write_run(tmp_path / "part", [line(step, seconds=0.5) for step in range(1, 11)])
    found = compare([whole, part])
    assert (found.common_step, [found.training_time(run) for run in found.runs]) == (10, [19.0, 9.5])
    assert [found.time_ratio(run) for run in found.runs] == [1.0, 2.0]
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found).decode())))
    assert [row["training_time_ratio"] for row in rows] == ["1.0", "2.0"]


def test_the_page_tells_of_another_job_and_of_other_curves(run_script: RunScript, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", [line(step, loss=1.0) for step in range(1, 21)])
    c = write_run(tmp_path / "c", options={"training.global_batch_size": 64})
    assert run_script(SCRIPT, "--compare", a, b, c, f"--out={tmp_path / 'out'}")[0] == 0
    text = text_of((tmp_path / "out" / "compare.html").read_text())
    assert "These are different jobs. They differ in training.global_batch_size" in text
    assert "The losses of 1 of 1 pair of runs of one job differ by more than 0.001, first at step 2 (a and b)." in text
    assert "the same losses" not in text


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "metrics.jsonl").unlink(),
        lambda folder: (folder / "status.json").unlink(),
        lambda folder: (folder / "status.json").write_text('{"state": "runn'),
        lambda folder: (folder / "samples" / "step_00000020.png").write_bytes(b"\x89PNG\r\n\x1a\n half of it"),
        lambda folder: (folder / "samples" / "step_00000020.png").unlink(),
        lambda folder: [path.unlink() for path in (folder / "samples").iterdir()],
    ],
    ids=["no metrics", "no status", "half a status", "half a picture", "no last picture", "no samples"],
)
def test_a_run_that_is_not_whole_is_compared_by_what_is_there(
    run_script: RunScript, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    a = write_run(tmp_path / "a", sampled(range(1, 21), every=5), pictures=(10, 20))
    b = write_run(tmp_path / "b", sampled(range(1, 21), every=5), pictures=(10, 20), state="running")
    change(b)
    code, _, err = run_script(SCRIPT, "--compare", a, b)
    assert (code, err) == (0, "")
    text = text_of((tmp_path / "compare" / "compare.html").read_text())
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", text)


def test_runs_that_go_on_and_runs_that_were_resumed_are_named_so(run_script: RunScript, tmp_path: Path) -> None:
    lines = [line(step, elapsed_s=100.0 + step) for step in range(1, 16)]  # what it ran before is in its clock
    a = write_run(tmp_path / "a", lines, state="running", started="2026-11-21T10:00:00+00:00")
    b = write_run(tmp_path / "b", state="oom")
    assert run_script(SCRIPT, "--compare", a, b)[0] == 0
    text = text_of((tmp_path / "compare" / "compare.html").read_text())
    assert "running, or killed, resumed" in text
    assert "out of memory" in text
    assert "15 of 20" in text
    assert "1 min 55 s" in text
    assert compare([a, b]).equal_time_s == 29.0


def test_large_pictures_are_scaled_down_and_long_curves_thinned(run_script: RunScript, tmp_path: Path) -> None:
    steps = range(1, 30_001)
    a, b = (write_run(tmp_path / name, [line(step) for step in steps], pictures=(20,)) for name in "ab")
    Image.effect_noise((4000, 2000), 50).save(a / "samples" / "step_00000020.png")
    assert run_script(SCRIPT, "--compare", a, b)[0] == 0
    assert (tmp_path / "compare" / "compare.html").stat().st_size < 4_000_000


def test_folders_that_cannot_be_compared_are_refused_in_one_line(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    copied = write_run(tmp_path / "copied", run_id="a")
    grid = tmp_path / "grid"
    grid.mkdir()
    (grid / "grid.json").write_text("{}")
    again = tmp_path / "b" / ".." / "a"
    gone, misspelt = tmp_path / "gone", tmp_path / "copyed"
    for folders, labels, about, mentions in (
        ([a], None, f'--compare = "{a}"', ["single", "two or more"]),
        ([a, b, again], None, f'--compare = "{a}"', ["twice"]),
        ([a, copied], None, f'--compare = "{copied}"', [str(a), "copy"]),
        ([a, gone], None, str(gone), ["run directory"]),
        ([a, misspelt], None, str(misspelt), [f"{copied}?"]),
        ([a, tmp_path], None, str(tmp_path), ["run directory", "config.json"]),
        ([a, grid], None, f'--compare = "{a}"', ["single"]),
        ([a, b], ["one"], '--labels = "one"', ["2 names"]),
        ([a, b], ["one", "one"], '--labels = "one"', ["two runs"]),
    ):
        with refused(about, *mentions):
            compare(folders, labels)


def test_a_grid_is_compared_run_by_run_in_the_order_of_its_ledger(tmp_path: Path, run_script: RunScript) -> None:
    grid = tmp_path / "grid"
    for name in ("rank-1", "rank-16", "rank-2"):
        write_run(grid / "runs" / name, run_id=name, state="oom" if name == "rank-16" else "completed")
    names = ("rank-1", "rank-2", "gone", "rank-16")
    (grid / "runs_summary.csv").write_text("\n".join(("run_name", *names, "")))
    (grid / "grid.json").write_text("{}")
    assert [run.label for run in compare([grid]).runs] == ["rank-1", "rank-2", "rank-16"]
    code, out, _ = run_script(SCRIPT, "--compare", grid)
    assert (code, out) == (0, f"report: {grid}/compare/compare.html\n")


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / machine / "run", run_id=machine) for machine in ("cpu", "a40")]
    assert [run.label for run in compare(folders).runs] == ["cpu/run", "a40/run"]
    assert [run.label for run in compare(folders, ["CPU", "A40"]).runs] == ["CPU", "A40"]


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["--compare", "{a}"], '--compare = "{a}"', ["single", "two or more"]),
        (["--compare", "{a}", "{a}"], '--compare = "{a}"', ["twice"]),
        (["{b}", "--compare", "{a}", "{b}"], "--compare", ["{b}", "grid folders"]),
        (["--compare", "{a}", "{b}", "--out=out", "{b}"], "--compare", ["{b}", "grid folders"]),
        (["{a}/..", "--labels", "x"], '--labels = "x"', ["runs", "grids"]),
        (["--compare", "{a}", "{b}", "--labels", "x"], '--labels = "x"', ["2 names"]),
        (["--compare", "{a}", "{b}", "--out={a}/config.json"], '--out = "{a}/config.json"', ["writable folder"]),
        (["--compare"], "--compare", ["at least one"]),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    tmp_path: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    folders = {name: write_run(tmp_path / name) for name in ("a", "b")}
    code, out, err = run_script(SCRIPT, *(argument.format(**folders) for argument in arguments))
    assert (code, out) == (2, "")
    assert_refused(err, about.format(**folders), [mention.format(**folders) for mention in mentions])
    assert not (tmp_path / "compare").exists()


def test_no_grid_folder_is_overlooked(tmp_path: Path, run_script: RunScript) -> None:
    """One behind an option was."""
    grid = tmp_path / "grid"
    grid.mkdir()
    (grid / "grid.json").write_text('{"schema_version": 1}')
    code, _, err = run_script(SCRIPT, grid, "--out=out", "gone")
    assert code == 2
    assert_refused(err, "gone", ["grid folder"])
