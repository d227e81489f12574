# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""User errors visible in the configuration: one line with option, value and the right value."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import assert_refused

from torchditan.config.loader import load_config
from torchditan.config.options import FLAVOR_NAMES, Config
from torchditan.errors import ConfigError

SECTIONS = ", ".join(vars(Config()))

FLAVORS = ", ".join(FLAVOR_NAMES)


def message_of(flags: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def message_of_toml(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return message_of(["--job.config_file", str(path)])


@pytest.mark.parametrize(
    ("flag", "about", "mentions"),
    [
        ("--training.lr=1", "training.lr", ["optimizer.lr?"]),
        ("--training.batch-size=1", "training.batch-size", ["training.batch_size?"]),
        ("--steps=1", "steps", ["training.steps?"]),
        ("--TRAINING.STEPS=1", "TRAINING.STEPS", ["training.steps?"]),
        ("--ema.zzz=1", "ema.zzz", ["enable, decay, warmup"]),
        ("quickstart.toml", "quickstart.toml", ["--section.key value", "--job.config_file quickstart.toml?"]),
    ],
)
def test_unknown_flag_names_the_nearest_option(flag: str, about: str, mentions: list[str]) -> None:
    assert_refused(message_of([flag]), about, mentions)


def test_flag_of_no_section_lists_the_sections() -> None:
    assert_refused(message_of(["--zzz.qqq=1"]), "zzz.qqq", ["job, model, dataset, autoencoder, diffusion, training"])


@pytest.mark.parametrize(
    ("flag", "about", "mentions"),
    [
        ("--training.steps=abc", 'training.steps = "abc"', ["integer"]),
        ("--optimizer.lr=fast", 'optimizer.lr = "fast"', ["number"]),
        ("--optimizer.lr=nan", "optimizer.lr = NaN", ["number", "finite"]),
        ("--training.compile=yes", 'training.compile = "yes"', ["true", "false"]),
        ("--training.steps=none", 'training.steps = "none"', ["integer"]),
        ("--training.steps=", 'training.steps = ""', ["integer"]),
        ("--training.steps", "training.steps", ["--training.steps=VALUE", "integer"]),
        ("--dataset.image_size=32x32", 'dataset.image_size = ["32x32"]', ["[32, 48]"]),
        (
            "--lr_scheduler.schedule=cosin",
            'lr_scheduler.schedule = "cosin"',
            ["constant, cosine, linear, wsd", "cosine?"],
        ),
    ],
)
def test_wrong_type_or_choice_on_the_command_line(flag: str, about: str, mentions: list[str]) -> None:
    assert_refused(message_of([flag]), about, mentions)


@pytest.mark.parametrize(
    ("text", "about", "mentions"),
    [
        ("[training]\nsteps = 'abc'", 'training.steps = "abc"', ["integer"]),
        ("[training]\nsteps = true", "training.steps = true", ["integer"]),
        ("[training]\nsteps = {a = 1}", 'training.steps = {"a": 1}', ["integer"]),
        ("[training]\ncompile = 1", "training.compile = 1", ["true", "false"]),
        ("[optimizer]\nlr = '1e-4'", 'optimizer.lr = "1e-4"', ["number"]),
        ("[optimizer]\nlr = nan", "optimizer.lr = NaN", ["number", "finite"]),
        ("[metrics]\nexperiment_name = 3", "metrics.experiment_name = 3", ["text"]),
        ("[dataset]\nimage_size = [32.0]", "dataset.image_size = [32.0]", ["[32, 48]"]),
        ("[model]\nnorm_type = 3", "model.norm_type = 3", ["rmsnorm, layernorm, np_layernorm, fused_rmsnorm"]),
        ("[trainning]\nsteps = 1", "trainning.steps", ["training.steps?"]),
        ("[[training]]\nsteps = 1", "training", ["[training]"]),
        ("steps = 1", "steps", ["training.steps?"]),
    ],
)
def test_wrong_key_or_type_in_toml(tmp_path: Path, text: str, about: str, mentions: list[str]) -> None:
    assert_refused(message_of_toml(tmp_path, text), about, mentions)


@pytest.mark.parametrize(
    ("text", "place"),
    [("[training]\nsteps = = 5\n", "line 2, column 9"), ("[training\nsteps = 5\n", "line 1, column 10")],
)
def test_toml_that_does_not_parse_names_file_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    assert_refused(message_of_toml(tmp_path, text), str(tmp_path / "job.toml"), [place])


def test_toml_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe[training]")
    message = message_of(["--job.config_file", str(path)])
    assert_refused(message, f'job.config_file = "{path}"', ["UTF-8"])


def test_missing_config_file_lists_the_names_and_the_nearest() -> None:
    message = message_of(["--job.config_file=quikstart.toml"])
    assert "earth, earth_official_dit, " in message
    assert_refused(message, 'job.config_file = "quikstart.toml"', ["train_configs/", "quickstart?"])


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        ("--training.steps=0", "training.steps = 0", ["1"]),
        (
            "--training.global_batch_size=100 --training.batch_size=16",
            "training.global_batch_size = 100",
            ["training.batch_size = 16", "number"],
        ),
        ("--training.seed=-1", "training.seed = -1", ["0", "2^63"]),
        ("--training.data_parallel_shard_degree=0", "training.data_parallel_shard_degree = 0", ["1", "-1"]),
        ("--training.max_norm=-1", "training.max_norm = -1.0", ["0"]),
        ("--model.timestep_scale=0", "model.timestep_scale = 0.0", ["0"]),
        ("--diffusion.label_dropout=1.5", "diffusion.label_dropout = 1.5", ["0", "1"]),
        ("--autoencoder.scale=0", "autoencoder.scale = [0.0]", ["0"]),
        ("--optimizer.beta2=1", "optimizer.beta2 = 1.0", ["0", "1"]),
        ("--sampling.guidance_interval=0.8,0.2", "sampling.guidance_interval = [0.8, 0.2]", ["0", "1"]),
        ("--dataset.image_size=1,2,3", "dataset.image_size = [1, 2, 3]", ["[32, 48]"]),
        ("--dataset.image_size=30 --model.patch_size=4", "dataset.image_size = [30, 30]", ["model.patch_size = 4"]),
        ("--model.flavor=DiT-XXL", 'model.flavor = "DiT-XXL"', [FLAVORS, "DiT-XL?"]),
        ("--model.flavor=DiT-S/2 --model.patch_size=4", 'model.flavor = "DiT-S/2"', ["model.patch_size", "4"]),
        ("--model.learn_sigma", "model.learn_sigma = true", ["--model.learn_sigma=false"]),
        ("--model.preset=official", 'model.preset = "official"', ["--model.learn_sigma=false"]),
        (
            "--activation_checkpoint.selective_ac_option=ops",
            'activation_checkpoint.selective_ac_option = "ops"',
            ["1", "op"],
        ),
        ("--checkpoint.folder=../elsewhere", 'checkpoint.folder = "../elsewhere"', ["`..`"]),
        ("--checkpoint.folder=samples", 'checkpoint.folder = "samples"', ["no file of the run"]),
        ("--metrics.experiment_name=a/b", 'metrics.experiment_name = "a/b"', ["200"]),
    ],
)
def test_value_out_of_range_or_at_odds_with_another(flags: str, about: str, mentions: list[str]) -> None:
    assert_refused(message_of(flags.split()), about, mentions)


SDXL = "--model.name=sdxl --model.flavor=debugmodel --diffusion.objective=ddpm"
SD3 = "--model.name=sd3 --model.flavor=debugmodel"
FLUX = "--model.name=flux --model.flavor=debugmodel"


@pytest.mark.parametrize(
    ("job", "flag", "mentions"),
    [
        (SDXL, "--sampling.sampler=heun", ["ddpm"]),
        (SDXL, "--diffusion.timestep_shift=3", ["ddpm"]),
        (SDXL, "--sampling.embedded_guidance=2", ["sdxl"]),
        (SD3, "--diffusion.embedded_guidance=2", ["sd3"]),
        ("", "--diffusion.embedded_guidance=2", ["dit"]),
        (SD3, "--model.preset=official", ["published"]),
        (SD3, "--model.patch_size=4", ["published"]),
        (FLUX, "--lora.alpha=4", ["lora.rank"]),
        ("", "--lora.alpha=4", ["published"]),
        ("", "--lora.rank=4", ["published"]),
        ("", "--sampling.prompts=cat", ["model.text"]),
    ],
)
def test_an_option_without_effect_is_refused(job: str, flag: str, mentions: list[str]) -> None:
    load_config(job.split())
    option = flag.removeprefix("--").split("=")[0]
    assert_refused(message_of([*job.split(), flag]), f"{option} =", mentions)


@pytest.mark.parametrize(
    "flags",
    [
        f"{SDXL} --diffusion.timestep_shift=1 --model.patch_size=2",  # as a run fills them in
        f"{FLUX} --diffusion.embedded_guidance=2 --sampling.embedded_guidance=4",
        f"{FLUX} --lora.rank=4 --lora.alpha=8 --lora.target_modules=to_q",
        "--model.text=in_context --sampling.prompts=cat",
    ],
)
def test_an_option_with_effect_is_accepted(flags: str) -> None:
    load_config(flags.split())


@pytest.mark.parametrize(
    ("flag", "about", "mentions"),
    [
        ("--training.tensor_parallel_degree=2", "training.tensor_parallel_degree = 2", ["tensor"]),
        ("--experimental.pipeline_parallel_degree=true", "experimental.pipeline_parallel_degree = true", ["pipeline"]),
        ("--checkpoint.interval_type=minutes", 'checkpoint.interval_type = "minutes"', ["checkpoint.interval"]),
        ("--checkpoint.model_weights_only", "checkpoint.model_weights_only = true", []),
        ("--experimental.zzz=1", "experimental.zzz", [SECTIONS]),
    ],
)
def test_course_project_key_that_asks_for_what_is_not_supported(flag: str, about: str, mentions: list[str]) -> None:
    assert_refused(message_of([flag]), about, mentions)
