# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A user's mistake that the configuration alone shows: one line with option, value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchditan.config.errors import ConfigError
from torchditan.config.loader import load_config
from torchditan.config.options import FLAVOR_NAMES, Config

SECTIONS = ", ".join(vars(Config()))

FLAVORS = ", ".join(FLAVOR_NAMES)
INNER_FOLDER = "must be a plain folder name inside the run directory, without `..`"


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
    ("flag", "message"),
    [
        ("--training.lr=1", "training.lr is no option; did you mean optimizer.lr?"),
        ("--trainning.steps=1", "trainning.steps is no option; did you mean training.steps?"),
        ("--training.step=1", "training.step is no option; did you mean training.steps?"),
        ("--training.batch-size=1", "training.batch-size is no option; did you mean training.batch_size?"),
        ("--steps=1", "steps is no option; did you mean training.steps?"),
        ("--TRAINING.STEPS=1", "TRAINING.STEPS is no option; did you mean training.steps?"),
        ("--compile", "compile is no option; did you mean training.compile?"),
        ("--ema.zzz=1", "ema.zzz is no option; [ema] has enable, decay, warmup"),
        (
            "quickstart.toml",
            "quickstart.toml belongs to no option; options are written --section.key value; "
            "did you mean --job.config_file quickstart.toml?",
        ),
    ],
)
def test_unknown_flag_names_the_nearest_option(flag: str, message: str) -> None:
    assert message_of([flag]) == message


def test_flag_of_no_section_lists_the_sections() -> None:
    assert message_of(["--zzz.qqq=1"]).startswith(
        "zzz.qqq is no option; the sections are job, model, dataset, autoencoder, diffusion, training, "
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--training.steps=abc", 'training.steps = "abc": must be an integer'),
        ("--training.steps=1.5", 'training.steps = "1.5": must be an integer'),
        ("--optimizer.lr=fast", 'optimizer.lr = "fast": must be a number'),
        ("--optimizer.lr=nan", "optimizer.lr = NaN: must be a finite number"),
        ("--optimizer.lr=inf", "optimizer.lr = Infinity: must be a finite number"),
        ("--training.compile=yes", 'training.compile = "yes": must be true or false'),
        ("--training.steps=none", 'training.steps = "none": must be an integer'),
        ("--training.steps=", 'training.steps = "": must be an integer'),
        ("--training.steps", "training.steps has no value: must be an integer; write --training.steps=VALUE"),
        ("--dataset.image_size=32x32", 'dataset.image_size = ["32x32"]: must be integers: 32, or [32, 48]'),
        (
            "--lr_scheduler.schedule=cosin",
            'lr_scheduler.schedule = "cosin": must be one of constant, cosine, linear, wsd; did you mean cosine?',
        ),
        (
            "--checkpoint.async_mode=thread",
            'checkpoint.async_mode = "thread": must be one of disabled, async, async_with_pinned_mem',
        ),
    ],
)
def test_wrong_type_or_choice_on_the_command_line(flag: str, message: str) -> None:
    assert message_of([flag]) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nsteps = 'abc'", 'training.steps = "abc": must be an integer'),
        ("[training]\nsteps = '100'", 'training.steps = "100": must be an integer'),
        ("[training]\nsteps = 1.5", "training.steps = 1.5: must be an integer"),
        ("[training]\nsteps = true", "training.steps = true: must be an integer"),
        ("[training]\nsteps = {a = 1}", 'training.steps = {"a": 1}: must be an integer'),
        ("[training]\ncompile = 1", "training.compile = 1: must be true or false"),
        ("[optimizer]\nlr = '1e-4'", 'optimizer.lr = "1e-4": must be a number'),
        ("[optimizer]\nlr = true", "optimizer.lr = true: must be a number"),
        ("[optimizer]\nlr = nan", "optimizer.lr = NaN: must be a finite number"),
        ("[metrics]\nexperiment_name = 3", "metrics.experiment_name = 3: must be text"),
        ("[dataset]\nimage_size = '32'", 'dataset.image_size = "32": must be integers: 32, or [32, 48]'),
        ("[dataset]\nimage_size = [32.0]", "dataset.image_size = [32.0]: must be integers: 32, or [32, 48]"),
        (
            "[model]\nnorm_type = 3",
            "model.norm_type = 3: must be one of rmsnorm, layernorm, np_layernorm, fused_rmsnorm",
        ),
        ("[training]\nlr = 1", "training.lr is no option; did you mean optimizer.lr?"),
        ("[trainning]\nsteps = 1", "trainning.steps is no option; did you mean training.steps?"),
        ("[trainning]", "[trainning] is no section; did you mean training?"),
        ("[[training]]\nsteps = 1", "training must be one section, [training]"),
        ("steps = 1", "steps = 1: stands outside a section; did you mean steps under [training]?"),
    ],
)
def test_wrong_key_or_type_in_toml(tmp_path: Path, text: str, message: str) -> None:
    assert message_of_toml(tmp_path, text) == message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[training]\nsteps = = 5\n", "line 2, column 9: "),
        ("[training]\nsteps 5\n", "line 2, column 7: "),
        ("[training\nsteps = 5\n", "line 1, column 10: "),
        ("[training]\nsteps = [1,", "line 2, column 12: "),
    ],
)
def test_toml_that_does_not_parse_names_file_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    assert message_of_toml(tmp_path, text).startswith(f"{tmp_path / 'job.toml'}, {place}")


def test_toml_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe[training]")
    message = message_of(["--job.config_file", str(path)])
    assert message == f'job.config_file = "{path}": cannot be read: is not UTF-8 text'


def test_missing_config_file_lists_the_names_and_the_nearest() -> None:
    message = message_of(["--job.config_file=quikstart.toml"])
    assert message.startswith('job.config_file = "quikstart.toml": no such file; train_configs/ has ')
    assert "earth, earth_latent, " in message
    assert message.endswith("; did you mean quickstart?")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--training.steps=0", "training.steps = 0: must be at least 1"),
        ("--training.batch_size=-2", "training.batch_size = -2: must be at least 1"),
        ("--training.global_batch_size=0", "training.global_batch_size = 0: must be at least 1"),
        (
            "--training.global_batch_size=100 --training.batch_size=16",
            "training.global_batch_size = 100: must be a multiple of training.batch_size = 16 "
            "times the number of ranks",
        ),
        ("--training.seed=-1", "training.seed = -1: must be 0 or more and below 2^63"),
        (
            "--training.data_parallel_shard_degree=0",
            "training.data_parallel_shard_degree = 0: must be at least 1, or -1 for all ranks left",
        ),
        (
            "--training.data_parallel_replicate_degree=0",
            "training.data_parallel_replicate_degree = 0: must be at least 1",
        ),
        ("--training.max_norm=-1", "training.max_norm = -1.0: must be 0 or more"),
        ("--metrics.log_freq=0", "metrics.log_freq = 0: must be at least 1"),
        ("--model.patch_size=0", "model.patch_size = 0: must be at least 1"),
        ("--model.rope_theta=0", "model.rope_theta = 0.0: must be greater than 0"),
        ("--diffusion.label_dropout=1.5", "diffusion.label_dropout = 1.5: must be between 0 and 1"),
        ("--optimizer.beta2=1", "optimizer.beta2 = 1.0: must be 0 or more and below 1"),
        ("--optimizer.lr=-1", "optimizer.lr = -1.0: must be 0 or more"),
        ("--ema.decay=1", "ema.decay = 1.0: must be 0 or more and below 1"),
        (
            "--sampling.guidance_interval=0.8,0.2",
            "sampling.guidance_interval = [0.8, 0.2]: must be two numbers, 0 <= from <= to <= 1",
        ),
        (
            "--sampling.guidance_interval=0.8",
            "sampling.guidance_interval = [0.8]: must be two numbers, 0 <= from <= to <= 1",
        ),
        (
            "--dataset.image_size=1,2,3",
            "dataset.image_size = [1, 2, 3]: must be one or two positive integers, 32 or [32, 48]",
        ),
        (
            "--dataset.image_size=[]",
            "dataset.image_size = []: must be one or two positive integers, 32 or [32, 48]",
        ),
        (
            "--dataset.image_size=30 --model.patch_size=4",
            "dataset.image_size = [30, 30]: must be a multiple of model.patch_size = 4",
        ),
        ("--model.flavor=DiT-XXL", f'model.flavor = "DiT-XXL": must be one of {FLAVORS}; did you mean DiT-XL?'),
        ("--model.flavor=dit-l", f'model.flavor = "dit-l": must be one of {FLAVORS}; did you mean DiT-L?'),
        (
            "--model.learn_sigma",
            "model.learn_sigma = true: flow matching predicts no variance; set --model.learn_sigma=false",
        ),
        (
            "--model.preset=official",
            'model.preset = "official": learns sigma, and flow matching predicts no variance; '
            "set --model.learn_sigma=false",
        ),
        (
            "--activation_checkpoint.selective_ac_option=0",
            'activation_checkpoint.selective_ac_option = "0": must be an integer of at least 1, or op',
        ),
        (
            "--activation_checkpoint.selective_ac_option=ops",
            'activation_checkpoint.selective_ac_option = "ops": must be an integer of at least 1, or op',
        ),
        ("--checkpoint.folder=../elsewhere", f'checkpoint.folder = "../elsewhere": {INNER_FOLDER}'),
        ("--metrics.save_tb_folder=/elsewhere", f'metrics.save_tb_folder = "/elsewhere": {INNER_FOLDER}'),
        ("--profiling.save_traces_folder=", f'profiling.save_traces_folder = "": {INNER_FOLDER}'),
        (
            "--metrics.experiment_name=a/b",
            'metrics.experiment_name = "a/b": must be a plain folder name without slashes, of at most 200 bytes',
        ),
        (
            "--metrics.experiment_name=..",
            'metrics.experiment_name = "..": must be a plain folder name without slashes, of at most 200 bytes',
        ),
    ],
)
def test_value_out_of_range_or_at_odds_with_another(flags: str, message: str) -> None:
    assert message_of(flags.split()) == message


SDXL = "--model.name=sdxl --model.flavor=debugmodel --diffusion.objective=ddpm"
SD3 = "--model.name=sd3 --model.flavor=debugmodel"
FLUX = "--model.name=flux --model.flavor=debugmodel"


@pytest.mark.parametrize(
    ("job", "flag", "message"),
    [
        (SDXL, "--sampling.sampler=heun", "has no effect with ddpm"),
        (SDXL, "--diffusion.timestep_shift=3", "has no effect with ddpm"),
        (SDXL, "--diffusion.timestep_sampling=uniform", "has no effect with ddpm"),
        (SDXL, "--diffusion.logit_normal_mean=-0.5", "has no effect with ddpm"),
        (SDXL, "--diffusion.logit_normal_std=2", "has no effect with ddpm"),
        (SDXL, "--sampling.embedded_guidance=2", "sdxl embeds no guidance scale"),
        (SD3, "--diffusion.embedded_guidance=2", "sd3 embeds no guidance scale"),
        ("", "--diffusion.embedded_guidance=2", "dit embeds no guidance scale"),
        (SD3, "--model.preset=official", "sd3 has its own"),
        (SD3, "--model.rope_theta=500", "sd3 has its own"),
        (SD3, "--model.patch_size=4", "sd3 has its own"),
        (SD3, "--model.qk_norm=true", "sd3 has its own"),
        (FLUX, "--lora.alpha=4", "has no effect with lora.rank 0"),
        ("", "--lora.alpha=4", "is for published models"),
        ("", "--lora.rank=4", "is for published models"),
        ("", "--lora.target_modules=to_q", "is for published models"),
        ("", "--sampling.prompts=cat", "has no effect without model.text"),
        ("", "--model.text_width=8", "has no effect without model.text"),
    ],
)
def test_an_option_without_effect_is_refused(job: str, flag: str, message: str) -> None:
    load_config(job.split())
    option = flag.removeprefix("--").split("=")[0]
    told = message_of([*job.split(), flag])
    assert told.startswith(f"{option} = ") and f": {message}" in told


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


def test_official_preset_without_learned_sigma_is_accepted() -> None:
    assert load_config(["--model.preset=official", "--model.learn_sigma=false"]).model.preset == "official"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--training.tensor_parallel_degree=2",
            "training.tensor_parallel_degree = 2: tensor parallelism is not supported; leave it out",
        ),
        (
            "--experimental.context_parallel_degree=2",
            "experimental.context_parallel_degree = 2: context parallelism is not supported; leave it out",
        ),
        (
            "--experimental.pipeline_parallel_degree=true",
            "experimental.pipeline_parallel_degree = true: pipeline parallelism is not supported; leave it out",
        ),
        (
            "--checkpoint.interval_type=minutes",
            'checkpoint.interval_type = "minutes": checkpoint.interval counts steps; leave it out',
        ),
        (
            "--checkpoint.model_weights_only",
            "checkpoint.model_weights_only = true: a checkpoint holds all that a resume needs; leave it out",
        ),
        (
            "--experimental.zzz=1",
            f"experimental.zzz is no option; the sections are {SECTIONS}",
        ),
    ],
)
def test_course_project_key_that_asks_for_what_is_not_supported(flag: str, message: str) -> None:
    assert message_of([flag]) == message


def test_warmup_given_under_both_names_is_refused(tmp_path: Path) -> None:
    text = "[training]\nwarmup_steps = 5\n[lr_scheduler]\nwarmup_steps = 6\n"
    assert message_of_toml(tmp_path, text) == (
        "training.warmup_steps is lr_scheduler.warmup_steps here, and both are given; keep lr_scheduler.warmup_steps"
    )
