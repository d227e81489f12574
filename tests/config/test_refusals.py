# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A command with a mistake ends with one line that names it, with exit code 2, and writes nothing.

A kind of declaration (declarations.py) has one row, whatever number of options use it. What readers of data and
weights refuse is tested next to them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from refusals import assert_refused

from torchditan.config.loader import load_config, to_dict
from torchditan.config.options import FLAVOR_NAMES

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript
    from tests.zoo import Zoo

SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2", "--training.steps=1"]
SMALL += ["--metrics.enable_sampling=false"]
SCRIPTS = {
    "ablation": "torchditan/extras/ablation/__main__.py",
    "plan": "torchditan/extras/planner/__main__.py",
    "analysis": "optimization_analysis.py",
}
"""First word of a row that is not a command of `torchditan`."""
SDXL = "--model.name=sdxl --diffusion.objective=ddpm"

ROWS: list[tuple[str, str, list[str]]] = [
    # Commands, configurations and names of options
    ("trian", "trian", ["train?"]),
    ("export-lora", "export-lora", ["export_lora?"]),
    ("list extra", "", ["extra"]),
    (
        "train quikstart",
        'job.config_file = "quikstart"',
        ["train_configs/", "earth, earth_official_dit", "quickstart?"],
    ),
    ("train quickstart earth", "earth", ["--section.key value"]),
    ("train quickstart earth.toml", "earth.toml", ["--job.config_file earth.toml?"]),
    ("train --job.config_file=notes", 'job.config_file = "notes"', ["folder", "TOML"]),
    ("train --job.config_file=bytes.toml", 'job.config_file = "{place}/bytes.toml"', ["UTF-8"]),
    ("[training]\nsteps = = 5", "{place}/job.toml", ["line 2, column 9"]),
    ("[[training]]\nsteps = 1", "training", ["[training]"]),
    ("[trainning]\nsteps = 1", "trainning.steps", ["training.steps?"]),
    ("steps = 1", "steps", ["training.steps?"]),
    ("train --training.lr=1", "training.lr", ["optimizer.lr?"]),
    ("train --training.batch-size=1", "training.batch-size", ["training.batch_size?"]),
    ("train --TRAINING.STEPS=1", "TRAINING.STEPS", ["training.steps?"]),
    ("train --ema.zzz=1", "ema.zzz", ["enable, decay, warmup"]),
    ("train --zzz.qqq=1", "zzz.qqq", ["job, model, dataset, autoencoder, diffusion, training"]),
    # Types
    ("train --training.steps", "training.steps", ["--training.steps=VALUE", "integer"]),
    ("train --training.steps=none", 'training.steps = "none"', ["integer"]),
    ("train --training.batch_size=many", 'training.batch_size = "many"', ["auto", "integer"]),
    ("train --optimizer.lr=nan", "optimizer.lr = NaN", ["number", "finite"]),
    ("train --training.compile=", 'training.compile = ""', ["true", "false"]),
    ("train --training.compile=yes", 'training.compile = "yes"', ["true", "false"]),
    ("train --dataset.image_size=32x32", 'dataset.image_size = ["32x32"]', ["[32, 48]"]),
    ("train --lr_scheduler.schedule=cosin", 'lr_scheduler.schedule = "cosin"', ["cosine, linear, wsd", "cosine?"]),
    ("[training]\nsteps = true", "training.steps = true", ["integer"]),
    ("[training]\nsteps = {a = 1}", 'training.steps = {"a": 1}', ["integer"]),
    ("[optimizer]\nlr = '1e-4'", 'optimizer.lr = "1e-4"', ["number"]),
    ("[metrics]\nexperiment_name = 3", "metrics.experiment_name = 3", ["text"]),
    ("[dataset]\nimage_size = [32.0]", "dataset.image_size = [32.0]", ["[32, 48]"]),
    ("[model]\nmlp = 3", "model.mlp = 3", ["swiglu, gelu"]),
    # What a value must be: each kind of declaration
    ("train --training.steps=0", "training.steps = 0", ["1"]),
    ("train --training.data_parallel_shard_degree=0", "training.data_parallel_shard_degree = 0", ["1", "-1"]),
    ("train --model.timestep_scale=0", "model.timestep_scale = 0.0", ["0"]),
    ("train --optimizer.beta2=1", "optimizer.beta2 = 1.0", ["0", "1"]),
    ("train --diffusion.label_dropout=1.5", "diffusion.label_dropout = 1.5", ["0", "1"]),
    ("train --autoencoder.scale=0", "autoencoder.scale = [0.0]", ["0"]),
    ("train --dataset.image_size=1,2,3", "dataset.image_size = [1, 2, 3]", ["[32, 48]"]),
    ("train --sampling.guidance_interval=0.8,0.2", "sampling.guidance_interval = [0.8, 0.2]", ["ascending"]),
    ("train --training.seed=-1", "training.seed = -1", ["0", "2^63"]),
    (
        "train --activation_checkpoint.selective_ac_option=ops",
        'activation_checkpoint.selective_ac_option = "ops"',
        ["1", "op"],
    ),
    ("train --checkpoint.folder=../elsewhere", 'checkpoint.folder = "../elsewhere"', ["`..`"]),
    ("train --checkpoint.folder=samples", 'checkpoint.folder = "samples"', ["no file of the run"]),
    ("train --metrics.experiment_name=a/b", 'metrics.experiment_name = "a/b"', ["200"]),
    # What an option needs
    ("train --sampling.prompts=cat", "sampling.prompts =", ["model.text"]),
    ("train --lora.rank=4", "lora.rank = 4", ["published"]),
    ("train --model.name=sd3 --model.patch_size=4", "model.patch_size = 4", ["published"]),
    ("train --model.name=flux --lora.alpha=4", "lora.alpha = 4.0", ["lora.rank"]),
    ("train --diffusion.embedded_guidance=2", "diffusion.embedded_guidance = 2.0", ["dit"]),
    (f"train {SDXL} --sampling.embedded_guidance=2", "sampling.embedded_guidance = 2.0", ["sdxl"]),
    (f"train {SDXL} --sampling.sampler=heun", 'sampling.sampler = "heun"', ["ddpm"]),
    (f"train {SDXL} --diffusion.timestep_shift=3", "diffusion.timestep_shift = 3.0", ["ddpm"]),
    ("train --training.on_nonfinite=rollback", 'training.on_nonfinite = "rollback"', ["checkpoint.enable_checkpoint"]),
    # Several options
    ("train --model.flavor=DiT-XXL", 'model.flavor = "DiT-XXL"', [", ".join(FLAVOR_NAMES), "DiT-XL?"]),
    ("train --model.flavor=DiT-S/2 --model.patch_size=4", 'model.flavor = "DiT-S/2"', ["model.patch_size", "4"]),
    ("train --model.learn_sigma", "model.learn_sigma = true", ["--model.learn_sigma=false"]),
    ("train --model.preset=official", 'model.preset = "official"', ["--model.learn_sigma=false"]),
    (
        "train --training.global_batch_size=100 --training.batch_size=16",
        "training.global_batch_size = 100",
        ["training.batch_size = 16", "number"],
    ),
    (
        "train --training.on_nonfinite=rollback --checkpoint.enable_checkpoint --dataset.streaming",
        'training.on_nonfinite = "rollback"',
        ["dataset.streaming", "stop"],
    ),
    ("train --dataset.streaming --validation.freq=5", "validation.freq = 5", ["dataset.streaming", "0"]),
    (
        "train --checkpoint.enable_checkpoint --checkpoint.save_final=false",
        "checkpoint.save_final = false",
        ["checkpoint.enable_checkpoint", "false"],
    ),
    # Keys of the course project
    ("train --checkpoint.interval_type=minutes", 'checkpoint.interval_type = "minutes"', ["checkpoint.interval"]),
    (
        "train --experimental.pipeline_parallel_degree=true",
        "experimental.pipeline_parallel_degree = true",
        ["pipeline"],
    ),
    # Data, folders and the machine
    ("train --dataset.dataset_name=folder", "dataset.root_dir = none", ["images"]),
    ("train --dataset.dataset_name=folder --dataset.root_dir=hollow", 'dataset.root_dir = "hollow"', ["c", "3"]),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=cut --dataset.image_size=8 "
        "--dataset.corrupt_images=skip",
        'dataset.dataset_name = "folder"',
        ["readable"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=words.parquet",
        'dataset.label_key = "label"',
        ["string"],
    ),
    ("train --dataset.dataset_name=cifar10 --dataset.root_dir=gaps.parquet", 'dataset.label_key = "label"', ["1", "0"]),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=names.parquet",
        'dataset.image_key = "image"',
        ["string", "images"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=elsewhere.parquet",
        "elsewhere.parquet",
        ["row 1", "--dataset.corrupt_images skip"],
    ),
    ("train --dataset.dataset_name=latents --dataset.root_dir=model.pt", "", ["model.pt", ".safetensors"]),
    ("train --dataset.fingerprint=latents-0123", 'dataset.fingerprint = "latents-0123"', []),
    ("train --model.patch_size=3", "model.patch_size = 3", ["8 x 8"]),
    ("train --model.input_channels=3", "model.input_channels = 3", ["1"]),
    ("train --checkpoint.initial_load_path=gone", 'checkpoint.initial_load_path = "gone"', [".safetensors"]),
    ("train --float8.enable_float8_linear", "float8.enable_float8_linear = true", ["8.9", "4090", "--float8.emulate"]),
    ("train --job.dump_folder=file/inner", 'job.dump_folder = "file/inner"', ["file/inner/digits-debugmodel"]),
    ("train --metrics.experiment_name=unknown --job.dump_folder=.", "unknown", ["metrics.jsonl", "config.json"]),
    ("train --metrics.experiment_name=torn --job.dump_folder=.", "torn/config.json", ["line 1 column 13"]),
    (
        "train --metrics.experiment_name=trained --job.dump_folder=. --training.steps=6",
        "trained",
        ["optimizer.lr is 0.001 there and 0.0001 here", "--metrics.experiment_name"],
    ),
    # Ranks
    (
        "WORLD_SIZE=8 train --training.data_parallel_replicate_degree=3",
        "training.data_parallel_replicate_degree = 3",
        ["8"],
    ),
    (
        "WORLD_SIZE=8 train --training.data_parallel_replicate_degree=2 --training.data_parallel_shard_degree=2",
        "training.data_parallel_shard_degree = 2",
        ["data_parallel_replicate_degree", "2", "4", "8", "-1"],
    ),
    (
        "WORLD_SIZE=4 train --training.batch_size=8 --training.global_batch_size=16",
        "training.global_batch_size = 16",
        ["32", "4", "8", "1, 2 ranks"],
    ),
    (
        "WORLD_SIZE=3 train --training.batch_size=none --training.global_batch_size=20",
        "training.global_batch_size = 20",
        ["3", "1, 2, 4, 5, 10, 20 ranks"],
    ),
    # Commands for runs
    ("generate", "", ["run", "outputs/quickstart"]),
    ("generate run", "run/checkpoint", ["checkpoint.save_final = false", "--checkpoint.enable_checkpoint"]),
    ("generate list", "list/config.json", ["configuration"]),
    ("generate newer", "training.speed", ["training.seed?"]),
    ("generate quickstart", "quickstart", ["outputs/quickstart?"]),
    ("generate trained/config.json", "trained/config.json", ["trained?"]),
    ("generate trained/metrics.jsonl/x", "trained/metrics.jsonl/x", ["run directory"]),
    ("generate notes", "notes", ["config.json"]),
    ("evaluate trainde", "trainde", ["trained?"]),
    ("export trainde weights.safetensors", "trainde", ["trained?"]),
    ("export_lora trainde lora.safetensors", "trainde", ["trained?"]),
    ("analysis --compare trainde trained", "trainde", ["trained?"]),
    ("generate trained --step=7", "--step = 7", ["trained/checkpoint", "[3, 6]"]),
    ("generate trained --step=x", "--step", ["value"]),
    ("generate trained --stepp=1", "--stepp", ["--step?"]),
    ("generate trained extra", "extra", ["--section.key"]),
    ("generate trained --sampling.num_step=1", "sampling.num_step", ["sampling.num_steps?"]),
    ("generate trained --sampling.num_steps=0", "sampling.num_steps = 0", ["1"]),
    ("generate trained --guidance_scale=4", "--guidance_scale", ["--sampling.guidance_scale?"]),
    ("generate trained --training.steps=3", "--training.steps", ["--step", "--classes", "--out", "--sampling.key"]),
    ("generate trained --classes=3,x", 'classes = "x"', ["no class x", "0 to 9"]),
    ("generate trained --classes=3,10", "classes = [3, 10]", ["0 to 9"]),
    ("generate trained --batch_size=0", "--batch_size", ["0", "1"]),
    ("generate trained --out=file/x.png", '--out = "file/x.png"', ["folder"]),
    ("export trained weights.pt", 'OUT = "weights.pt"', [".safetensors"]),
    # Grids and plans
    ("ablation run", "", ["grid"]),
    (
        "ablation run gone",
        "gone",
        ["train_configs", "0.5B, 0.5B_one_gpu, 7B, 7B_autotune, captions, convergence, debug, eight_gpus"],
    ),
    ("ablation run grid.toml", "grid.toml", ["repeats?"]),
    ("ablation show grids/list", "grids/list", ["grid.json"]),
    ("plan nowhere.toml --device h100", "dataset.num_classes = none", ["folder"]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, zoo: Zoo) -> Path:
    """A folder with a trained run, the settings of another one, and much that is damaged."""
    folder = tmp_path_factory.mktemp("place")
    config = to_dict(load_config(["--model.flavor=debugmodel"]))
    config["dataset"] |= {"image_size": [8, 8], "num_classes": 10}
    config["model"]["input_channels"] = 1
    texts = {
        "file": "",
        "grid.toml": "steps = 4\nwindow = 2\nrepeat = 3\n[axes]\nmodel.patch_size = [2]\n",
        "nowhere.toml": "[dataset]\ndataset_name = 'folder'\n",
        "unknown/metrics.jsonl": '{"step": 1}\n',
        "run/config.json": json.dumps({"config": config}),
        "torn/config.json": '{"config": {',
        "list/config.json": "[1, 2]",
        "newer/config.json": '{"config": {"training": {"speed": 3}}}',
        "outputs/quickstart/config.json": "{}",
        "grids/list/grid.json": "[1]",
        "notes/readme.txt": "no image",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bytes.toml").write_bytes(b"\xff\xfe[training]")
    (folder / "model.pt").write_bytes(b"PK\x03\x04" + bytes(60))
    shutil.copytree(zoo("digits"), folder / "trained")
    write_images(folder)
    return folder


def write_images(folder: Path) -> None:
    """Folders and parquet files with images, each damaged in one way."""
    for name in ("hollow/a/1", "hollow/a/2", "hollow/b/1"):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    png = path.read_bytes()
    shutil.copytree(folder / "hollow", folder / "cut")
    for path in (folder / "cut").rglob("*.png"):
        path.write_bytes(png[:40])
    (folder / "hollow" / "c").mkdir()
    images = [{"bytes": png, "path": None}] * 4
    tables: dict[str, dict[str, Any]] = {
        "words": {"image": images, "label": ["cat"] * 4},
        "gaps": {"image": images, "label": pyarrow.array([0, None, 1, 2])},
        "names": {"image": ["1.png"] * 4, "label": [0, 1, 2, 3]},
        "elsewhere": {"image": [{"bytes": None, "path": "/etc/passwd"}] * 4, "label": [0, 1, 2, 3]},
    }
    for name, table in tables.items():
        parquet.write_table(pyarrow.table(table), folder / f"{name}.parquet")


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Everything in a folder: size and time of files, None for folders."""
    found = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    return {str(path): (stat.st_size, stat.st_mtime_ns) if path.is_file() else None for path, stat in found}


@pytest.mark.parametrize(("command", "about", "mentions"), ROWS, ids=[row[0] for row in ROWS])
def test_a_mistake_is_one_line_and_nothing_is_written(
    command: str, about: str, mentions: list[str], place: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without a command is a TOML file, which `train` reads."""
    monkeypatch.chdir(place)
    small = SMALL if command.partition(" --")[0].endswith("train") else []
    if " = " in command:
        (place / "job.toml").write_text(command)
        command = "train --job.config_file=job.toml"
    if ranks := re.match(r"WORLD_SIZE=(\d+) ", command):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks[1])
        command = command[ranks.end() :]
    name, *arguments = shlex.split(command)
    before = contents(place)
    start = [SCRIPTS[name]] if name in SCRIPTS else ["torchditan", name]
    outcome = run_script(*start, *small, *arguments)
    assert outcome.code == 2 and outcome.err.startswith("error: ") and outcome.err.endswith("\n"), outcome.err
    assert_refused(outcome.err, about.replace("{place}", str(place)), mentions)
    assert contents(place) == before


def test_every_rank_finds_the_mistake_and_rank_0_says_it_once(tmp_path: Path, run_distributed: RunDistributed) -> None:
    result = run_distributed(["train.py", *SMALL, "--training.data_parallel_shard_degree=3"], 2, cwd=tmp_path)
    assert result.returncode != 0
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error:")]
    assert_refused(line, "training.data_parallel_shard_degree = 3", ["2 rank", "-1"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        f"{SDXL} --model.flavor=debugmodel --diffusion.timestep_shift=1 --model.patch_size=2",  # as a run fills them in
        "--model.name=flux --model.flavor=debugmodel --diffusion.embedded_guidance=2 --sampling.embedded_guidance=4",
        "--model.name=flux --model.flavor=debugmodel --lora.rank=4 --lora.alpha=8 --lora.target_modules=to_q",
        "--model.text=in_context --sampling.prompts=cat",
    ],
)
def test_what_an_option_needs_is_accepted(flags: str) -> None:
    load_config(flags.split())
