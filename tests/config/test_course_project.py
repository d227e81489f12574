# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files, flags and names of the course project keep their meaning."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from torchditan.config.legacy_keys import FLAVORS
from torchditan.config.loader import load_config
from torchditan.config.options import Config
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import load_grid
from torchditan.models import build_model_spec
from torchditan.models.dit import LLAMA3_FLAVORS
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

FILES = Path(__file__).resolve().parents[1] / "fixtures" / "course"
NEWEST, ABLATION, PIXELS = (
    str(FILES / f"{name}.toml")
    for name in ("llama3_latent_diffusion", "llama3_latent_diffusion_ablate", "llama3_diffusion")
)
QUICK = ["--model.flavor=debugmodel", "--training.steps=2", "--training.batch_size=2", "--dataset.num_workers=0"]
QUICK += ["--metrics.enable_sampling=false"]


def load(file: str | None, *flags: str) -> Config:
    return load_config([*([f"--job.config_file={file}"] if file else []), *flags])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]


def test_the_newest_file_loads_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(NEWEST)
    warning, recipe, dataset = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ignored") and "dataset.batch_size" in warning
    assert "optimizer.beta2 = 0.95, optimizer.weight_decay = 0.1" in recipe and "uniform" in recipe
    assert (config.optimizer.beta2, config.optimizer.weight_decay) == (0.95, 0.1)
    assert (config.lr_scheduler.schedule, config.diffusion.timestep_sampling) == ("linear", "uniform")
    assert load(NEWEST, "--optimizer.beta2=0.99").optimizer.beta2 == 0.99
    assert "dataset.dataset_name imagenet" in dataset and "latents" in dataset
    assert (config.model.name, config.model.flavor, config.model.preset) == ("dit", "DiT-L", "torchditan")
    assert (config.dataset.dataset_name, config.lr_scheduler.warmup_steps) == ("latents", 100)
    assert (config.training.batch_size, config.metrics.save_tb_folder) == (16, "tb_new")


def test_the_ablation_file_leaves_its_batch_open_and_its_flavor_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(ABLATION)
    assert config.training.batch_size is None
    assert config.model.flavor == "DiT-L"
    assert (config.dataset.dataset_name, config.dataset.dummy_fill) == ("dummy", "zeros")
    flavor, _, batch_size, dataset = notes(capsys)
    assert "DiT-0.5B" in flavor and "batch_size -1" in batch_size and "imagenet_dummy" in dataset


def test_its_flavor_is_known_with_its_model_alone() -> None:
    with pytest.raises(ConfigError, match=r'model\.flavor = "DiT-0\.5B"'):
        load(None, "--model.flavor=DiT-0.5B")


def test_a_key_that_changed_nothing_is_ignored_at_any_value(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset.batch_size=16", "--training.seq_len=-1", "--checkpoint.export_dtype=bfloat16"]
    flags += ["--metrics.disable_color_printing"]
    load(NEWEST, *flags)
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert all(flag.partition("=")[0].removeprefix("--") in warning for flag in flags)


def test_a_key_that_asks_for_what_is_not_supported_is_refused_unless_a_flag_overrides_it(tmp_path: Path) -> None:
    text = Path(NEWEST).read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2")
    file = tmp_path / "two.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"training\.tensor_parallel_degree = 2: .*not supported"):
        load(str(file))
    load(str(file), "--training.tensor_parallel_degree=1")
    for part in ("input", "weight", "grad_output"):
        load(NEWEST, f"--float8.scaling_type_{part}=dynamic")
        with pytest.raises(ConfigError, match=rf'float8\.scaling_type_{part} = "delayed"'):
            load(NEWEST, f"--float8.scaling_type_{part}=delayed")
    for key in ("optimizer.early_step_in_backward", "memory_estimation.enabled", "checkpoint.model_weights_only"):
        with pytest.raises(ConfigError, match=key):
            load(NEWEST, f"--{key}")


@pytest.mark.parametrize("file", [NEWEST, ABLATION, PIXELS])
def test_a_flag_overrides_any_key(file: str, tmp_path: Path) -> None:
    config = load(
        file, "--dataset.batch_size=4", "--training.batch_size=2", "--training.warmup_steps=7", "--dataset.root_dir=x"
    )
    assert (config.training.batch_size, config.lr_scheduler.warmup_steps, config.dataset.root_dir) == (2, 7, "x")
    assert load(file, "--lr_scheduler.warmup_steps=8").lr_scheduler.warmup_steps == 8
    ours = tmp_path / "ours.toml"
    ours.write_text("[lr_scheduler]\nwarmup_steps = 3\n")
    assert load(str(ours), "--training.warmup_steps=9").lr_scheduler.warmup_steps == 9


def test_both_names_in_one_place_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"training\.warmup_steps .*lr_scheduler\.warmup_steps"):
        load(NEWEST, "--training.warmup_steps=7", "--lr_scheduler.warmup_steps=8")


def test_one_by_one_ranks_in_its_files_are_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(NEWEST).training.data_parallel_shard_degree == -1
    assert not any("shard_degree" in line for line in notes(capsys)), "on one rank it is the same"
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load(NEWEST)
    assert (config.training.data_parallel_replicate_degree, config.training.data_parallel_shard_degree) == (1, -1)
    assert any("data_parallel_shard_degree 1" in line for line in notes(capsys))
    assert load(NEWEST, "--training.data_parallel_shard_degree=1").training.data_parallel_shard_degree == 1
    assert not any("shard_degree" in line for line in notes(capsys)), "a flag is taken as it is"


@pytest.mark.parametrize(
    ("name", "root", "expected", "word"),
    [
        ("imagenet", "/data/latents.safetensors", "latents", "latents"),
        ("imagenet", "/data/imagenet", "imagenet", "pixels"),
        ("imagenet_pixel", "/data/imagenet", "imagenet", "pixels"),
        ("imagenet_dummy", None, "dummy", "zeros"),
    ],
)
def test_its_dataset_names_mean_what_they_meant(
    name: str, root: str | None, expected: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--dataset.dataset_name={name}", *([f"--dataset.root_dir={root}"] if root else [])]
    config = load(None, "--model.name=llama3_diffusion", *flags)
    assert config.dataset.dataset_name == expected
    *_, line = notes(capsys)
    assert name in line and word in line


def test_our_own_names_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    load(None, "--dataset.dataset_name=digits", "--model.preset=official", "--model.learn_sigma=false")
    load(None, "--dataset.dataset_name=imagenet", "--dataset.root_dir=images")
    assert capsys.readouterr().err == ""


def test_its_flavors_have_its_head_counts() -> None:
    sizes = {}
    for flavor in ("debugmodel", "DiT-S", "DiT-L", "DiT-1B", "DiT-7B"):
        section = load(NEWEST, f"--model.flavor={flavor}").model
        config: Any = build_model_spec(section, sample_shape=(16, 32, 32), num_classes=1000).config
        sizes[flavor] = (config.depth, config.width, config.num_heads)
    assert sizes == {
        "debugmodel": (8, 256, 16),
        "DiT-S": (12, 384, 8),
        "DiT-L": (24, 1024, 16),
        "DiT-1B": (32, 1536, 32),
        "DiT-7B": (60, 2560, 64),
    }
    assert tuple(LLAMA3_FLAVORS) == FLAVORS
    ours: Any = build_model_spec(load(None).model, sample_shape=(16, 32, 32), num_classes=1000).config
    assert (ours.depth, ours.width, ours.num_heads) == (12, 384, 6), "our own flavors stay as they are"


def write_public(path: Path, size: int = 32) -> None:
    """A small file with the contents of the public one."""
    latents = torch.randint(-128, 128, (8, 16, size, size), dtype=torch.int8)
    save_file({"latents": latents, "labels": torch.arange(8, dtype=torch.int16)}, path)


def test_the_newest_file_trains_on_its_latents_and_the_pixel_file_on_images(
    run_script: RunScript, tmp_path: Path
) -> None:
    write_public(tmp_path / "imagenet_ci8x8.safetensors")
    small = [*QUICK, "--model.patch_size=8", "--metrics.experiment_name=latents"]
    latents = run_script(
        "train.py", f"--job.config_file={NEWEST}", "--dataset.root_dir=imagenet_ci8x8.safetensors", *small
    )
    assert latents.code == 0, latents.err
    assert read_config(tmp_path / "outputs" / "latents")["config"]["autoencoder"]["name"] == "cosmos-ci8x8"
    for number in range(4):
        path = tmp_path / "imagenet" / "train" / f"n{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (70, 70), (60 * number, 0, 0)).save(path)
    small = [*QUICK, "--model.patch_size=16", "--metrics.experiment_name=pixels"]
    pixels = run_script("train.py", f"--job.config_file={PIXELS}", "--dataset.root_dir=imagenet", *small)
    assert pixels.code == 0, pixels.err
    assert "images of 3x64x64" in pixels.out


@pytest.mark.slow
def test_its_files_run_on_two_ranks(run_distributed: RunDistributed, tmp_path: Path) -> None:
    """One job after another of the same ranks: to start them takes longer than two steps."""
    dummy = ["--dataset.dataset_name=dummy"]
    files = {"newest": (NEWEST, dummy), "ablation": (ABLATION, []), "pixels": (PIXELS, dummy)}
    small = ["--model.flavor=debugmodel", "--training.steps=2", "--metrics.enable_sampling=false"]
    small += ["--model.patch_size=8", "--dataset.num_workers=0"]
    jobs = [
        [f"--job.config_file={file}", f"--metrics.experiment_name={name}", *flags, *small]
        for name, (file, flags) in files.items()
    ]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("FSDP over 2 ranks") == len(files)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for name in files:
        run = tmp_path / "outputs" / name
        stored = read_config(run)["config"]
        assert stored["training"]["global_batch_size"] == 32, "16 images per rank"
        assert all(math.isfinite(record["loss"]) for record in read_metrics(run))
        events = accumulator.EventAccumulator(str(run / stored["metrics"]["save_tb_folder"])).Reload()
        mean, largest = (events.Scalars(f"loss_metrics/global_{name}_loss")[-1].value for name in ("avg", "max"))
        assert largest > mean == pytest.approx(read_metrics(run)[-1]["loss"]), "two ranks have other images"


def test_a_grid_takes_its_ablation_file_as_base(tmp_path: Path) -> None:
    grid = tmp_path / "mine.toml"
    grid.write_text(f'base = "{ABLATION}"\nsteps = 6\nwindow = 2\n[axes]\ntraining.batch_size = [4, 8]\n')
    small, large = load_grid(str(grid)).runs()
    assert small.name == "dit-l_bs4_ps2_actselective_cfalse_dbfloat16_p1,1"
    assert (large.config.training.batch_size, large.config.model.flavor) == (8, "DiT-L")


def test_adam_is_adamw_without_decay(capsys: pytest.CaptureFixture[str]) -> None:
    for file in (NEWEST, None):
        config = load(file, "--optimizer.name=Adam")
        assert (config.optimizer.name, config.optimizer.weight_decay) == ("AdamW", 0.0)
        assert [line for line in notes(capsys) if "Adam" in line and "AdamW" in line][1:] == []
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay = 0\.1: .*Adam"):
        load(NEWEST, "--optimizer.name=Adam", "--optimizer.weight_decay=0.1")


def test_its_tags_are_written_by_default_with_its_keys_or_preset(tmp_path: Path) -> None:
    ours = tmp_path / "ours.toml"
    for text in ("[model]\nnorm_type = 'rmsnorm'", "[model]\npreset = 'llama3_diffusion'", "[training]\nseq_len = -1"):
        ours.write_text(f"{text}\n")
        expected = "norm_type" not in text
        assert load(str(ours), "--metrics.enable_tensorboard").metrics.legacy_tags == expected
        assert not load(str(ours)).metrics.legacy_tags, "without TensorBoard"
        assert not load(str(ours), "--metrics.enable_tensorboard", "--metrics.legacy_tags=false").metrics.legacy_tags
    assert all(load(file).metrics.legacy_tags for file in (NEWEST, ABLATION, "llama3_latent_diffusion"))
