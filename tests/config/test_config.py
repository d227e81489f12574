# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options from TOML and command line: accepted values, their parsed form, and the output of --help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchditan.config.loader import TRAIN_CONFIGS, from_dict, load_config, to_dict, to_toml
from torchditan.config.options import FLAVOR_NAMES, flatten
from torchditan.config.schema import options
from torchditan.config.trajectory import trajectory
from torchditan.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]

# The flags that the course project's ablation scripts pass.
ABLATION_FLAGS = [
    "--training.mixed_precision_param=bfloat16",
    "--training.data_parallel_replicate_degree=2",
    "--training.data_parallel_shard_degree=4",
    "--model.flavor=DiT-L",
    "--model.patch_size=8",
    "--training.batch_size=16",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=2",
    "--metrics.experiment_name=dit-l_bs16_ps8_actselective_ctrue_dbfloat16_p2,4",
    "--metrics.enable_tensorboard",
    "--metrics.save_tb_folder=dit-l_bs16_ps8_actselective_ctrue_dbfloat16_p2,4",
    "--metrics.log_freq=10",
    "--training.compile",
    "--float8.enable_float8_linear",
]


def write_toml(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def run_python(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_flags_of_the_ablation_scripts_parse_as_they_are() -> None:
    config = load_config(ABLATION_FLAGS)
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.training.data_parallel_replicate_degree == 2
    assert config.training.data_parallel_shard_degree == 4
    assert config.model.flavor == "DiT-L"
    assert config.model.patch_size == 8
    assert config.training.batch_size == 16
    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "2"
    assert config.metrics.experiment_name == "dit-l_bs16_ps8_actselective_ctrue_dbfloat16_p2,4"
    assert config.metrics.save_tb_folder == config.metrics.experiment_name
    assert config.metrics.enable_tensorboard is True
    assert config.metrics.log_freq == 10
    assert config.training.compile is True
    assert config.float8.enable_float8_linear is True


def test_only_rank_0_warns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    load_config(["--training.tensor_parallel_degree=1"])
    assert capsys.readouterr().err == ""


def test_keys_of_the_course_project_work_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--training.warmup_steps=7", "--training.tensor_parallel_degree", "1", "--model.tokenizer_path=a b"]
    config = load_config([*flags, "--job.use_for_integration_test"])
    assert config.lr_scheduler.warmup_steps == 7
    assert capsys.readouterr().err.startswith("warning: ignored, no effect here: ")


def test_batch_size_left_to_the_command_line_is_taken_from_it(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "[training]\nbatch_size = -1\n")
    assert load_config(["--job.config_file", file, "--training.batch_size=4"]).training.batch_size == 4
    assert load_config(["--job.config_file", file]).training.batch_size is None
    with pytest.raises(ConfigError, match=r"training\.batch_size = -2: .*least 1"):
        load_config(["--job.config_file", file, "--training.batch_size=-2"])


@pytest.mark.parametrize(
    ("flags", "option", "expected"),
    [
        (["--training.compile"], "training.compile", True),
        (["--cache_only"], "cache.only", True),
        (["--training.compile", "true"], "training.compile", True),
        (["--training.compile", "false"], "training.compile", False),
        (["--metrics.enable_sampling=false"], "metrics.enable_sampling", False),
        (["--training.compile", "--training.steps=3"], "training.compile", True),
        (["--training.steps", "3", "--training.steps=4"], "training.steps", 4),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["--diffusion.logit_normal_mean", "-0.5"], "diffusion.logit_normal_mean", -0.5),
        (["--dataset.image_size", "32", "48"], "dataset.image_size", [32, 48]),
        (["--dataset.image_size=32"], "dataset.image_size", [32, 32]),
        (["--dataset.image_size=32,48"], "dataset.image_size", [32, 48]),
        (["--dataset.image_size", "[32,", "48]"], "dataset.image_size", [32, 48]),
        (["--dataset.image_size", "none"], "dataset.image_size", None),
        (["--sampling.guidance_interval", "0.3", "1"], "sampling.guidance_interval", [0.3, 1.0]),
        (["--model.qk_norm=none"], "model.qk_norm", None),
        (["--model.qk_norm"], "model.qk_norm", True),
        (["--dataset.root_dir=100%"], "dataset.root_dir", "100%"),
        (["--activation_checkpoint.selective_ac_option=op"], "activation_checkpoint.selective_ac_option", "op"),
        (["--training.reshard_after_forward=true"], "training.reshard_after_forward", "always"),
    ],
)
def test_flag_becomes_typed_value(flags: list[str], option: str, expected: object) -> None:
    value = flatten(load_config(flags))[option]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("line", "option", "expected"),
    [
        ("[optimizer]\nlr = 1", "optimizer.lr", 1.0),
        ("[dataset]\nimage_size = 32", "dataset.image_size", [32, 32]),
        ("[sampling]\nguidance_interval = [0, 1]", "sampling.guidance_interval", [0.0, 1.0]),
        ("[dataset]\nroot_dir = 'none'", "dataset.root_dir", None),
        ("[training]\nreshard_after_forward = true", "training.reshard_after_forward", "always"),
        ("[activation_checkpoint]\nselective_ac_option = 3", "activation_checkpoint.selective_ac_option", "3"),
    ],
)
def test_toml_becomes_typed_value(tmp_path: Path, line: str, option: str, expected: object) -> None:
    value = flatten(load_config(["--job.config_file", write_toml(tmp_path, line)]))[option]
    assert value == expected
    assert type(value) is type(expected)


def test_a_toml_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "\ufeff[training]\nsteps = 5\n")
    assert load_config(["--job.config_file", file]).training.steps == 5


def test_flags_go_over_the_toml(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "[training]\nsteps = 5\nbatch_size = 3\n")
    config = load_config(["--training.steps=7", "--job.config_file", file])
    assert (config.training.steps, config.training.batch_size) == (7, 3)


@pytest.mark.parametrize(
    ("line", "flags", "keeps_weights"),
    [
        ("", [], True),
        ("enable_checkpoint = false", [], False),
        ("enable = false", [], False),  # the older name
        ("enable_checkpoint = false", ["--checkpoint.enable_checkpoint"], True),
    ],
)
def test_no_checkpoints_are_no_weights_if_you_say_so(
    tmp_path: Path, line: str, flags: list[str], keeps_weights: bool
) -> None:
    config = load_config(["--job.config_file", write_toml(tmp_path, f"[checkpoint]\n{line}\n"), *flags])
    assert config.checkpoint.save_final == keeps_weights
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml"])
def test_config_is_found_by_name_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--job.config_file", name])
    assert config.dataset.dataset_name == "digits"
    assert config.job.config_file == str(TRAIN_CONFIGS / "quickstart.toml")


def test_local_file_comes_before_a_name_in_train_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.toml").write_text("[training]\nsteps = 3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_config(["--job.config_file", "quickstart.toml"]).training.steps == 3


@pytest.mark.parametrize("name", sorted(path.stem for path in TRAIN_CONFIGS.glob("*.toml")))
def test_shipped_config_loads_without_a_warning(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config(["--job.config_file", name]).metrics.experiment_name == name
    assert capsys.readouterr().err == ""


def test_run_is_named_after_the_config_file_or_dataset_and_flavor() -> None:
    assert load_config(["--job.config_file", "quickstart"]).metrics.experiment_name == "quickstart"
    assert load_config(["--model.flavor=DiT-B"]).metrics.experiment_name == "digits-dit-b"
    assert load_config(["--metrics.experiment_name=mine"]).metrics.experiment_name == "mine"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    words = capsys.readouterr().out.split()
    assert [option for option in options() if f"--{option}" not in words] == []


def test_flavor_names_are_those_of_the_model_file() -> None:
    from torchditan.models.dit import FLAVORS

    assert tuple(FLAVORS) == FLAVOR_NAMES


def test_a_flavor_with_a_patch_size_sets_both(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nflavor = "DiT-B/8"\n', encoding="utf-8")
    for flags, expected in (
        ([], ("DiT-B", 8)),
        (["--model.flavor=DiT-Ti/4"], ("DiT-Ti", 4)),
        (["--model.patch_size=2"], ("DiT-B", 2)),
        (["--model.flavor=DiT-Ti"], ("DiT-Ti", 8)),
    ):
        model = load_config([f"--job.config_file={file}", *flags]).model
        assert (model.flavor, model.patch_size) == expected


START = """
import runpy, sys

class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            print("imports torch")
            sys.exit(0)

sys.meta_path.insert(0, Stop())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script until it imports torch."""


@pytest.mark.parametrize(
    ("command", "code", "out", "error"),
    [
        ("train.py", 2, "  quickstart   ", "job.config_file = none: "),
        (
            "train.py --dataset.dataset_name=folder --dataset.root_dir=gone",
            2,
            "",
            'dataset.root_dir = "gone": does not',
        ),
        ("train.py --job.config_file=quickstart", 0, "starting outputs/quickstart\nimports torch\n", ""),
        ("torchditan/__main__.py generate gone", 2, "", "gone does not exist; must be "),
    ],
)
def test_the_first_line_and_a_missing_folder_need_no_torch(
    command: str, code: int, out: str, error: str, tmp_path: Path
) -> None:
    script, *arguments = command.split()
    result = run_python(START, tmp_path, str(REPOSITORY / script), *arguments)
    assert result.returncode == code, result.stderr
    assert out in result.stdout and ("imports torch" in result.stdout) == (code == 0)
    assert result.stderr.removeprefix("error: ").startswith(error) and result.stderr.count("\n") == bool(code)


def test_resolved_config_survives_json() -> None:
    config = load_config(["--job.config_file", "earth", "--training.seed=7"])
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_trajectory_changes_with_what_is_learned_and_with_nothing_else() -> None:
    before = trajectory(load_config([]))
    for flag in (
        "--model.flavor=DiT-B",
        "--dataset.image_size=16",
        "--diffusion.label_dropout=0",
        "--optimizer.lr=1",
        "--lr_scheduler.warmup_steps=5",
        "--training.global_batch_size=32",
        "--training.seed=1",
        "--training.max_norm=2",
        "--training.mixed_precision_param=float32",
        "--ema.decay=0.9",
        "--float8.enable_float8_linear",
    ):
        assert trajectory(load_config([flag])) != before, flag
    for flag in (
        "--dataset.root_dir=elsewhere",
        "--dataset.num_workers=7",
        "--training.data_parallel_replicate_degree=2",
        "--training.compile",
        "--training.steps=7",
        "--training.batch_size=8",
        "--activation_checkpoint.mode=full",
        "--checkpoint.interval=3",
        "--metrics.log_freq=3",
    ):
        assert trajectory(load_config([flag])) == before, flag


def test_the_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(
        ["--optimizer.lr=3e-5", "--dataset.image_size=8", '--job.description=say "a\\b" é', "--ema.enable=false"]
    )
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    again = load_config(["--job.config_file", str(path)])
    assert again.replace({"job.config_file": None}) == config
