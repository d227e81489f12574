# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Invalid jobs, run by their real entry points: one line with the reason, exit code 2, and no files.

Errors visible in the configuration are also in test_configuration_errors.py, other jobs in test_job_errors.py. No row
here repeats one of theirs.
"""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from refusals import assert_refused

import torchditan.__main__
from torchditan.config.loader import load_config, to_dict

if TYPE_CHECKING:
    from tests.conftest import RunScript

SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2", "--training.steps=1"]
SMALL += ["--metrics.enable_sampling=false"]
SCRIPTS = {
    "train": "train.py",
    "ablation": "torchditan/extras/ablation/__main__.py",
    "plan": "torchditan/extras/planner/__main__.py",
    "analysis": "optimization_analysis.py",
}
"""First word of a row that is not a command of `torchditan`."""

ROWS: list[tuple[str, str, list[str]]] = [
    ("train --job.config_file=sections.toml", "{place}/sections.toml", ["line 5", "column 10"]),
    ("train --job.config_file=date.toml", 'training.seed = "2026-01-01"', ["integer"]),
    ("train --job.config_file=inner.toml", "training.inner", ["checkpoint.interval?"]),
    (
        "train --ema.width=0.3",
        "ema.width = 0.3",
        ["0", "0.2887"],
    ),
    (
        "train --checkpoint.enable_checkpoint --checkpoint.save_final=false",
        "checkpoint.save_final = false",
        ["checkpoint.enable_checkpoint", "false"],
    ),
    ("train --training.on_nonfinite=rollback", 'training.on_nonfinite = "rollback"', ["checkpoint.enable_checkpoint"]),
    (
        "train --training.on_nonfinite=rollback --checkpoint.enable_checkpoint --dataset.streaming",
        'training.on_nonfinite = "rollback"',
        ["dataset.streaming", "stop"],
    ),
    ("train --checkpoint.initial_load_path=gone", 'checkpoint.initial_load_path = "gone"', [".safetensors"]),
    ('train "--metrics.experiment_name=a\\b"', 'metrics.experiment_name = "a\\\\b"', ["200"]),
    ("train --training.batch_size=many", 'training.batch_size = "many"', ["auto", "integer"]),
    ("train --model.qk_norm=maybe", 'model.qk_norm = "maybe"', ["true", "false"]),
    ("train --job.dump_folder=file/inner", 'job.dump_folder = "file/inner"', ["file/inner/digits-debugmodel"]),
    ("train --dataset.dataset_name=folder --dataset.root_dir=notes", 'dataset.root_dir = "notes"', ["train"]),
    ("train --dataset.dataset_name=folder --dataset.root_dir=hollow", 'dataset.root_dir = "hollow"', ["c", "3"]),
    ("train --dataset.dataset_name=folder --dataset.root_dir=stray", 'dataset.root_dir = "stray"', ["2.png"]),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=cut --dataset.image_size=8 "
        "--dataset.corrupt_images=skip",
        'dataset.dataset_name = "folder"',
        ["readable"],
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=images --dataset.hub_name=a/b",
        'dataset.hub_name = "a/b"',
        ["folder"],
    ),
    ("train --dataset.dataset_name=imagenet --dataset.root_dir=bare", 'dataset.root_dir = "bare"', ["train"]),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=file",
        'dataset.root_dir = "file"',
        ["data_batch_*.bin", "dataset.hub_name", "uoft-cs/cifar10"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=python",
        'dataset.root_dir = "python"',
        ["cifar-10-binary.tar.gz"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=short",
        'dataset.root_dir = "short/data_batch_1.bin"',
        ["3000", "3073"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/words",
        'dataset.label_key = "label"',
        ["string", "0"],
    ),
    ("train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/gaps", 'dataset.label_key = "label"', ["1", "0"]),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/names",
        'dataset.image_key = "image"',
        ["string", "images"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/pictures",
        'dataset.image_key = "image"',
        ["picture, label"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/empty_rows",
        "tables/empty_rows/train.parquet",
        ["row 1", "--dataset.corrupt_images skip"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/whole --dataset.label_key=class",
        'dataset.label_key = "class"',
        ["image, label"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/whole --validation.freq=1",
        'dataset.root_dir = "tables/whole"',
        ["test-*.parquet"],
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=short --dataset.streaming",
        "dataset.streaming = true",
        ["--dataset.hub_name", "uoft-cs/cifar10"],
    ),
    ("train --dataset.dataset_name=digits --dataset.streaming", "dataset.streaming = true", ["digits", "false"]),
    ("train --dataset.root_dir=images", 'dataset.root_dir = "images"', ["digits"]),
    ("train --dataset.crop=random", 'dataset.crop = "random"', ["digits"]),
    ("train --dataset.fingerprint=latents-0123", 'dataset.fingerprint = "latents-0123"', []),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/numbers",
        'dataset.image_key = "image"',
        ["int64", "images"],
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --dataset.root_dir=images",
        'dataset.root_dir = "images"',
        ["imagenet_hub"],
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --dataset.streaming "
        "--dataset.crop=random",
        'dataset.crop = "random"',
        ["center", "adm"],
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --validation.freq=1",
        'dataset.hub_name = "tables/whole"',
        ["validation", "train"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=nothing",
        'dataset.root_dir = "nothing"',
        ["index.json", "torchditan encode"],
    ),
    ("train --dataset.dataset_name=latents --dataset.root_dir=file", "file", ["safetensors"]),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=cut_shard",
        'dataset.root_dir = "cut_shard/train"',
        ["shard-00000.safetensors", "5", "144224"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=floats",
        'dataset.root_dir = "floats/train"',
        ["labels.npy", "damaged"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=strange_labels",
        "dataset.num_classes = none",
        ["7", "16", "9", "10"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=no_validation --validation.freq=1",
        'dataset.root_dir = "no_validation"',
        ["--split validation", "--validation.freq 0"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --dataset.horizontal_flip",
        "dataset.horizontal_flip = true",
        ["--no_flip"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.online",
        "autoencoder.online = true",
        ["latents"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.sample_posterior",
        "autoencoder.sample_posterior = true",
        ["--posterior"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.fingerprint=haar-8-1",
        'autoencoder.fingerprint = "haar-8-1"',
        ["haar-2-1"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.name=sdxl",
        'autoencoder.name = "sdxl"',
        ["haar"],
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --model.input_channels=3",
        "model.input_channels = 3",
        ["4"],
    ),
    ("train --autoencoder.online", "autoencoder.name = none", ["autoencoder.online"]),
    (
        "train --autoencoder.online --autoencoder.name=haarr",
        'autoencoder.name = "haarr"',
        ["haar, cosmos, diffusers, sd-vae, sdxl, sd3, flux, dc-ae, cosmos-ci8x8, cosmos-ci16x16", "haar?"],
    ),
    ("train --autoencoder.name=haar", 'autoencoder.name = "haar"', ["--autoencoder.online"]),
    (
        "train --autoencoder.online --autoencoder.name=haar --autoencoder.downsampling=2",
        "autoencoder.scale = none",
        ["torchditan encode", "--preview"],
    ),
    (
        "train --autoencoder.online --autoencoder.name=haar --autoencoder.downsampling=2 --autoencoder.shift=0 "
        "--autoencoder.scale=1,2",
        "autoencoder.scale = [1.0, 2.0]",
        ["4", "number"],
    ),
    (
        "train --autoencoder.online --autoencoder.name=cosmos --autoencoder.path=nothing "
        "--dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8",
        'autoencoder.path = "nothing"',
        ["encoder.jit", "decoder.jit"],
    ),
    (
        "train --autoencoder.online --autoencoder.name=diffusers --autoencoder.path=nothing "
        "--dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8",
        'autoencoder.path = "nothing"',
        ["config.json", "diffusion_pytorch_model.safetensors"],
    ),
    (
        "train --metrics.experiment_name=unknown --job.dump_folder=.",
        "unknown",
        ["metrics.jsonl", "config.json", "--metrics.experiment_name"],
    ),
    ("train --metrics.experiment_name=torn --job.dump_folder=.", "torn/config.json", ["line 1 column 13"]),
    ("train --metrics.experiment_name=list --job.dump_folder=.", "list/config.json", ["configuration"]),
    ("generate list", "list/config.json", ["configuration"]),
    ("generate newer", "training.speed", ["training.seed?"]),
    ("generate run --out=file/x.png", '--out = "file/x.png"', ["folder"]),
    ("evaluate run --samples_per_class=0", "--samples_per_class", ["0", "1"]),
    ("export run weights.pt", 'OUT = "weights.pt"', [".safetensors"]),
    ("export nothing weights2.safetensors", "nothing", ["config.json"]),
    ("import gone.safetensors imported", "gone.safetensors", ["run directory", ".safetensors"]),
    ("import weights.safetensors imported", "weights.safetensors", ["safetensors"]),
    ("encode header --verify", "header/train/shard-00000.safetensors", ["sha256"]),
    (
        "encode latents --autoencoder.name=haar --dataset.num_workers=0",
        "latents/train",
        [
            "autoencoder.downsampling",
            "2",
            "autoencoder.fingerprint",
            "latent_shape",
            "16",
            "shard_size",
            "1000",
            "4096",
        ],
    ),
    (
        "ablation run gone",
        "gone",
        [
            "train_configs",
            "0.5B, 7B, 7B_autotune, captions, convergence, debug, flux_benchmark, published_debug, published_models",
        ],
    ),
    ("ablation run grid.toml", "grid.toml", ["repeats?"]),
    ("ablation run debug --memory_limit_gib nan", "memory_limit_gib = NaN", ["number"]),
    ("ablation show grids/list", "grids/list", ["grid.json"]),
    ("ablation run", "", ["grid"]),
    ("plan nowhere.toml --device h100", "dataset.num_classes = none", ["folder"]),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8 --dataset.num_classes=1",
        "dataset.num_classes = 1",
        ["2", "0"],
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the settings of a run, latents, and much that is damaged."""
    folder = tmp_path_factory.mktemp("place")
    import datasets

    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("torch.cuda.is_available", lambda: False)
        haar = ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--dataset.num_workers=0"]
        patch.setattr(sys, "argv", ["torchditan", "encode", "latents", *haar, "--shard_size=1000", "--no_flip"])
        assert torchditan.__main__.main() == 0
    write_run(folder / "run")
    write_files(folder)
    write_images(folder)
    write_tables(folder)
    write_latents(folder)
    return folder


def write_run(folder: Path) -> None:
    config = to_dict(load_config(["--model.flavor=debugmodel"]))
    config["dataset"] |= {"image_size": [8, 8], "num_classes": 10}
    config["model"]["input_channels"] = 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": config}))


def write_files(folder: Path) -> None:
    texts = {
        "file": "",
        "sections.toml": "[training]\nsteps = 1\n[optimizer]\nlr = 1.0\n[training]\nseed = 1\n",
        "date.toml": "[training]\nseed = 2026-01-01\n",
        "inner.toml": "[training.inner]\nsteps = 1\n",
        "grid.toml": "steps = 4\nwindow = 2\nrepeat = 3\n[axes]\nmodel.patch_size = [2]\n",
        "nowhere.toml": "[dataset]\ndataset_name = 'folder'\n",
        "unknown/metrics.jsonl": '{"step": 1}\n',
        "torn/config.json": '{"config": {',
        "list/config.json": "[1, 2]",
        "newer/config.json": '{"config": {"training": {"speed": 3}}}',
        "grids/list/grid.json": "[1]",
        "weights.safetensors": "no weights",
        "notes/readme.txt": "no image",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "nothing").mkdir()


def write_images(folder: Path) -> None:
    for name in ("images/a/1", "images/a/2", "images/b/1", "stray/a/1", "stray/2", "bare/train/1", "other/train/1"):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    shutil.copytree(folder / "images", folder / "hollow")
    (folder / "hollow" / "c").mkdir()
    shutil.copytree(folder / "images", folder / "cut")
    for path in (folder / "cut").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:40])
    (folder / "python").mkdir()
    (folder / "python" / "data_batch_1").write_bytes(pickle.dumps({"data": []}))
    (folder / "short").mkdir()
    (folder / "short" / "data_batch_1.bin").write_bytes(bytes(3000))


def write_tables(folder: Path) -> None:
    """Parquet files, and folders as the hub has them."""
    png = (folder / "images" / "a" / "1.png").read_bytes()
    images = [{"bytes": png, "path": None}] * 4
    tables: dict[str, dict[str, Any]] = {
        "words": {"image": images, "label": ["cat"] * 4},
        "gaps": {"image": images, "label": pyarrow.array([0, None, 1, 2])},
        "names": {"image": ["1.png"] * 4, "label": [0, 1, 2, 3]},
        "empty_rows": {"image": [{"bytes": None, "path": "/etc/passwd"}] * 4, "label": [0, 1, 2, 3]},
        "numbers": {"image": [1, 2, 3, 4], "label": [0, 1, 2, 3]},
        "pictures": {"picture": images, "label": [0, 1, 2, 3]},
        "whole": {"image": images, "label": [0, 1, 2, 3]},
    }
    for name, table in tables.items():
        (folder / "tables" / name).mkdir(parents=True)
        parquet.write_table(pyarrow.table(table), folder / "tables" / name / "train.parquet")


def write_latents(folder: Path) -> None:
    """Copies of the latents, each damaged in one way."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "latents", folder / name) / "train")

    shards = json.loads((folder / "latents" / "train" / "index.json").read_text())["shards"]
    (copy("cut_shard") / shards[0]["file"]).write_bytes(b"short")
    header = copy("header") / shards[0]["file"]
    header.write_bytes(b"\xff" * header.stat().st_size)
    np.save(copy("floats") / "labels.npy", np.zeros(10))
    labels = np.load(folder / "latents" / "train" / "labels.npy")
    np.save(copy("strange_labels") / "labels.npy", labels + 7)
    shutil.rmtree(copy("no_validation").parent / "validation")


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Everything in a folder: size and time of files, None for folders."""
    found = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    return {
        str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if path.is_file() else None
        for path, stat in found
    }


@pytest.mark.parametrize(("command", "about", "mentions"), ROWS, ids=[row[0] for row in ROWS])
def test_a_bad_job_is_one_line_and_writes_nothing(
    command: str,
    about: str,
    mentions: list[str],
    place: Path,
    run_script: RunScript,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import datasets

    monkeypatch.chdir(place)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    before = contents(place)
    name, *arguments = shlex.split(command)
    start = [SCRIPTS[name]] if name in SCRIPTS else ["torchditan", name]
    code, _, errors = run_script(*start, *(SMALL if name == "train" else ()), *arguments)
    assert code == 2 and errors.startswith("error: ") and errors.endswith("\n"), errors
    assert_refused(errors, about.replace("{place}", str(place)), mentions)
    assert contents(place) == before
