# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A grid file defines exactly the expected runs; invalid grids are refused in one line."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from refusals import assert_refused

from torchditan.config.loader import as_flags, load_config
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import load_grid, run_name

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = """
steps = 4
window = 2
[axes]
model.flavor = ["debugmodel"]
training.batch_size = [8, 2, 4]
training.compile = [false, true]
"""


def write_grid(folder: Path, text: str = SMALL) -> str:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def message_of(folder: Path, text: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_grid(write_grid(folder, text), **options).runs()  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("0.5B", 252, "dit-l_bs16_ps8_actnone_ctrue_dbfloat16_p1,8"),
        ("7B", 396, "dit-7b_bs1_ps8_actnone_ctrue_dbfloat16_p1,8"),
        ("7B_autotune", 72, "dit-7b_bsauto_ps8_actnone_ctrue_dbfloat16_f8_p1,8"),
    ],
)
def test_the_course_projects_grids_have_its_runs(name: str, count: int, first: str) -> None:
    runs = load_grid(name).runs()
    assert (len(runs), len({run.name for run in runs}), runs[0].name) == (count, count, first)
    assert {run.num_devices for run in runs} == {8}
    assert {run.axes["parallel"] for run in runs} == {"1,8", "8,1", "2,4"}
    assert {run.config.training.steps for run in runs} == {50}
    assert {run.config.dataset.dummy_fill for run in runs} == {"normal"}
    assert {tuple(run.config.dataset.image_size or ()) for run in runs} == {(64, 64)}


def test_a_run_has_the_course_projects_name() -> None:
    axes = {"model.flavor": "DiT-L", "model.patch_size": 2, "training.batch_size": 16, "parallel": "1,8"}
    axes |= {"activation_checkpoint.mode": "selective", "training.compile": True, "precision": "bfloat16"}
    assert run_name(axes) == "dit-l_bs16_ps2_actselective_ctrue_dbfloat16_p1,8"
    further = {"dataset.image_size": [32, 48], "optimizer.lr": 1e-4, "ema.enable": False}
    assert run_name(axes | further).endswith("_p1,8_image_size-32x48_lr-0.0001_enable-false")
    warmups = {"lr_scheduler.warmup_steps": 5, "optimizer.warmup_steps": 5}
    names = [run_name(axes | warmups, left_out={axis}).partition("_p1,8_")[2] for axis in warmups]
    assert names == ["optimizer.warmup_steps-5", "lr_scheduler.warmup_steps-5"], "different names for different changes"


def test_batches_grow_innermost_and_repeats_go_round_the_whole_grid(tmp_path: Path) -> None:
    axes = {"training.batch_size": [16, 2, 4]}
    runs = load_grid(write_grid(tmp_path), axes=axes, overrides={"repeats": 2}).runs()
    batches = [(run.axes["training.compile"], run.axes["training.batch_size"]) for run in runs]
    assert batches[:6] == [(False, 2), (False, 4), (False, 16), (True, 2), (True, 4), (True, 16)]
    assert batches[6:] == batches[:6]
    assert [run.repeat for run in runs] == [1] * 6 + [2] * 6
    assert runs[6].name == f"{runs[0].name}_r2"
    assert runs[0].cell == runs[8].cell != runs[3].cell


def test_a_run_without_a_batch_size_has_its_share_of_the_global_batch(tmp_path: Path) -> None:
    text = 'steps = 4\nwindow = 2\n[axes]\nparallel = ["1,1", "2,2"]\n[settings]\ntraining.global_batch_size = 32\n'
    runs = load_grid(write_grid(tmp_path, text)).runs()
    assert [run.axes["training.batch_size"] for run in runs] == [32, 8]
    assert [run.name.split("_")[1] for run in runs] == ["bs32", "bs8"]


def test_seeds_are_repetitions_that_go_round_the_whole_grid(tmp_path: Path) -> None:
    axes = {"training.batch_size": [2, 4], "training.seed": [0, 7]}
    runs = load_grid(write_grid(tmp_path), axes=axes).runs()
    assert [run.axes["training.seed"] for run in runs] == [0] * 4 + [7] * 4
    assert [run.axes["training.batch_size"] for run in runs] == [2, 4] * 4
    assert all(run.name.endswith(f"_seed-{run.axes['training.seed']}") for run in runs)
    assert len({run.name for run in runs}) == 8
    assert [run.cell for run in runs[:4]] == [run.cell for run in runs[4:]], "memory does not depend on the seed"
    assert [(run.config.training.seed, run.config.evaluation.seed) for run in runs[3:5]] == [(0, 1), (7, 8)]


def test_quality_is_measured_on_request(tmp_path: Path) -> None:
    settings = (
        "[settings]\nevaluation.freq = 4\nevaluation.seed = 5\nsampling.num_steps = 10\nvalidation.num_images = 8\n"
    )
    text = 'base = "quickstart"\n' + SMALL + "training.seed = [3]\n" + settings
    config = load_grid(write_grid(tmp_path, text)).runs()[0].config
    assert (config.evaluation.freq, config.sampling.num_steps, config.validation.num_images) == (4, 10, 8)
    assert config.validation.freq == 0, "off, though the base file has it on"
    assert config.evaluation.seed == 5, "as it was set"
    assert "axes: evaluation.freq cannot be set in a grid" in message_of(tmp_path, SMALL + "evaluation.freq = [4]")
    wrong = SMALL + "[settings]\nmetrics.log_freq = 2\n"
    assert "settings: metrics.log_freq cannot be set in a grid" in message_of(tmp_path, wrong)


def test_one_at_a_time_changes_one_axis_of_the_first_values(tmp_path: Path) -> None:
    lines = (
        "training.seed = [0, 1]\nmodel.mlp = ['gelu', 'swiglu']\nmodel.position = ['sincos', 'rope', 'rope_sincos']\n"
    )
    text = "one_at_a_time = true\n" + SMALL.replace("[8, 2, 4]", "[2]") + lines
    runs = load_grid(write_grid(tmp_path, text)).runs()
    first = (False, "gelu", "sincos")
    keys = ("training.compile", "model.mlp", "model.position")
    values = [tuple(run.axes[key] for key in keys) for run in runs]
    assert len(values) == 10 and values[:5] == values[5:], "for each seed"
    assert set(values[:5]) == {
        first, (True, *first[1:]), (False, "swiglu", "sincos"), (False, "gelu", "rope"), (False, "gelu", "rope_sincos")
    }  # fmt: skip
    changes = sorted(run.name.partition("_p")[2].partition("_p")[2].partition("_")[2] for run in runs[:5])
    names = ["mlp-swiglu_seed-0", "position-rope-sincos_seed-0", "position-rope_seed-0", "seed-0", "seed-0"]
    assert changes == names, "names say what changes"
    assert len({run.name for run in runs}) == 10
    assert 'one_at_a_time = "yes": must be true or false' in message_of(tmp_path, "one_at_a_time = 'yes'\n" + SMALL)


def test_the_command_line_replaces_and_adds_axes(tmp_path: Path) -> None:
    axes = {"training.batch_size": [1, 2], "parallel": ["1,2", "2,1"], "precision": ["float32", "bfloat16_f8"]}
    runs = load_grid(write_grid(tmp_path), axes=axes).runs()
    assert len(runs) == 16
    one = next(run for run in runs if run.name == "debugmodel_bs2_ps2_actnone_ctrue_dbfloat16_f8_p2,1")
    assert one.config.training.data_parallel_replicate_degree == 2
    assert one.config.training.data_parallel_shard_degree == 1
    assert one.config.float8.enable_float8_linear
    assert one.config.training.mixed_precision_param == "bfloat16"


def test_train_py_reads_the_flags_of_a_run_as_the_grid_meant_them(tmp_path: Path) -> None:
    text = SMALL + "dataset.image_size = [[16, 32]]\n[settings]\noptimizer.lr = 3e-5\nmodel.qk_norm = false\n"
    (tmp_path / "base.toml").write_text(
        '[dataset]\ndataset_name = "dummy"\n[model]\nflavor = "DiT-Ti/4"\n[diffusion]\nobjective = "imf"\n'
    )
    base = f"--job.config_file={tmp_path / 'base.toml'}"
    for flags, grid in (([], text), ([base], f'base = "{tmp_path / "base.toml"}"{SMALL}')):
        for run in load_grid(write_grid(tmp_path, grid)).runs():
            config = load_config([*flags, *as_flags({**run.flags, "metrics.experiment_name": "x"})])
            others = {"metrics.experiment_name": "x", "job.config_file": config.job.config_file}
            assert config == run.config.replace(others)
    assert (config.model.patch_size, config.model.timestep_scale) == (4, 1)


def test_a_base_file_is_the_ground_and_gives_the_dataset(tmp_path: Path) -> None:
    runs = load_grid(write_grid(tmp_path, 'base = "quickstart"\n' + SMALL)).runs()
    assert runs[0].config.dataset.dataset_name == "digits"
    assert not runs[0].config.metrics.enable_sampling
    assert not runs[0].config.checkpoint.enable_checkpoint and not runs[0].config.checkpoint.save_final
    assert (runs[0].config.validation.freq, runs[0].config.metrics.log_freq) == (0, 1)


def test_impossible_combinations_are_left_out_with_one_line_and_mistakes_refused(tmp_path: Path) -> None:
    grid = load_grid("sd3_study", overrides={"dataset.root_dir": "photos"})
    runs = grid.runs()
    found = [(run.config.lora.rank, run.config.quantize.base, run.config.optimizer.lr) for run in runs]
    assert found[0] == (0, "float32", 1e-5)
    assert found[1:] == [(rank, base, 1e-4) for rank in (1, 16, 64) for base in ("bfloat16", "int8")]
    assert all(run.config.metrics.enable_sampling and run.config.metrics.sample_freq == 0 for run in runs)
    assert grid.left_out is not None and "\n" not in grid.left_out
    for part in ("2 of 9", "lora.rank 0", "quantize.base bfloat16", "needs lora.rank"):
        assert part in grid.left_out
    with pytest.raises(ConfigError, match=r"batch_size 3.*global_batch_size = 16"):  # 3 is possible nowhere
        text = SMALL.replace("[8, 2, 4]", "[2, 3]") + "[settings]\ntraining.global_batch_size = 16\n"
        load_grid(write_grid(tmp_path, text)).runs()
    assert load_grid(write_grid(tmp_path)).left_out is None


def test_exclusions_take_out_what_they_match_alone(tmp_path: Path) -> None:
    rule = "exclude = [{training.compile = true, training.batch_size = [2, 4]}]\n"
    runs = load_grid(write_grid(tmp_path, rule + SMALL)).runs()
    kept = [(run.axes["training.compile"], run.axes["training.batch_size"]) for run in runs]
    assert kept == [(False, 2), (False, 4), (False, 8), (True, 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("training.batchsize = [1]", "axes: training.batchsize is not an option; did you mean training.batch_size?"),
        ("float8.recipe_name = ['rowwise']", "has no effect in any run: it needs float8.enable_float8_linear"),
        (
            "activation_checkpoint.selective_ac_option = ['1']",
            "has no effect in any run: it needs activation_checkpoint.mode = selective",
        ),
        (
            "training.mixed_precision_param = ['float32']",
            "training.mixed_precision_param is set by precision; use that",
        ),
        ("parallel = ['8']", 'parallel = "8": must be "replicate,shard", for example "2,4"'),
        ("model.patch_size = [0]", "training.batch_size 2: model.patch_size = 0: must be an integer, at least 1"),
    ],
)
def test_an_axis_that_cannot_be_is_one_line(line: str, message: str, tmp_path: Path) -> None:
    assert message in message_of(tmp_path, SMALL + line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("window = 2", "window = 4"), "window = 4: must be less than steps = 4"),
        ("exclude = [{model.flavor = 'debugmodel'}]\n" + SMALL, "small is an empty grid: every run is excluded"),
        ("autotune = 'biggest'\n" + SMALL, 'autotune = "biggest": must be one of largest, fastest'),
        ("autotune = 'largest'\n" + SMALL, "training.batch_size is set by autotune; leave it out of the grid"),
        (SMALL + "[settings]\ntraining.compile = true", "training.compile is an axis and a setting; keep one"),
    ],
)
def test_a_grid_that_cannot_be_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    assert message in message_of(tmp_path, text)


COMMAND = "torchditan/extras/ablation/__main__.py"


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ("run debug --stepz 5", "--stepz", ["--steps?"]),
        ("run debug --axes.parallel", "--axes.parallel", ["value"]),
        ("run debug --name ../x", "--name = '../x'", ["folder"]),
        ("run debug --launcher slrum", '--launcher = "slrum"', ["module:name", "slurm?"]),
        (
            "run debug --launcher pathlib:Path",
            '--launcher = "pathlib:Path"',
            ["torchditan.extras.ablation.launch.Launcher"],
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exits_with_2(
    arguments: str, about: str, mentions: list[str], tmp_path: Path, run_script: RunScript
) -> None:
    result = run_script(COMMAND, *shlex.split(arguments))
    assert (result.code, result.out) == (2, "")
    assert_refused(result.err, about, mentions)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_runs_and_commands_and_writes_nothing(tmp_path: Path, run_script: RunScript) -> None:
    write_grid(tmp_path)
    result = run_script(COMMAND, "run", "small.toml", "--dry-run", "--axes.training.batch_size", "auto,2")
    assert result.code == 2, "auto belongs to autotune"
    result = run_script(COMMAND, "run", "small.toml", "--dry-run", "--device=h10")
    assert result.code == 2
    assert_refused(result.err, '--device = "h10"', ["h100"])
    result = run_script(COMMAND, "run", "small.toml", "--dry-run", "--axes.parallel", "1,2")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "small: 6 runs of 4 steps, the last 2 measured, into outputs/small"
    assert [line.split()[1] for line in lines[1::2]] == [run.name for run in _runs(tmp_path)]
    assert all("--nproc_per_node=2" in line and "--training.steps=4" in line for line in lines[2::2])
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def _runs(folder: Path) -> list:
    return load_grid(write_grid(folder), axes={"parallel": ["1,2"]}).runs()


@pytest.mark.parametrize("name", ["0.5B", "debug"])
def test_the_scripts_name_their_grids(name: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "NGPU": "4"}
    command = [str(REPOSITORY / "scripts" / f"run_ablations_{name}.sh"), "--dry-run"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    parallel = ["1,4", "4,1"] if name == "debug" else ["1,4", "4,1", "2,2"]
    file = REPOSITORY / "train_configs" / "ablations" / f"{name}.toml"
    expected = ["-m", "torchditan.ablation", "run", str(file), "--axes.parallel", *parallel, "--dry-run"]
    assert result.stdout.splitlines() == expected
    assert file.exists()


def test_the_script_of_any_grid_asks_for_one() -> None:
    result = subprocess.run([str(REPOSITORY / "scripts" / "run_ablations.sh")], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert_refused(result.stderr, "GRID", ["train_configs/ablations/", "run_ablations.sh 0.5B"])
