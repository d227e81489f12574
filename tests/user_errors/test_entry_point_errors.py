# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Jobs that cannot be, run by their real entry points: the whole line of each, exit code 2, and nothing written.

What the configuration alone shows is in test_configuration_errors.py too, and other jobs in test_job_errors.py; no
row here repeats one of theirs.
"""

from __future__ import annotations

import json
import pickle
import runpy
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

from torchditan.config.loader import load_config, to_dict

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2", "--training.steps=1"]
SMALL += ["--metrics.enable_sampling=false"]
SCRIPTS = {
    "train": "train.py",
    "ablation": "torchditan/ablation/__main__.py",
    "plan": "torchditan/planner/__main__.py",
    "analysis": "optimization_analysis.py",
}
"""First word of a row, where it is no script of scripts/."""

ROWS = [
    (
        "train --job.config_file=twice.toml",
        "{place}/twice.toml, line 3, column 10: Cannot overwrite a value",
    ),
    (
        "train --job.config_file=sections.toml",
        "{place}/sections.toml, line 5, column 10: Cannot declare ('training',) twice",
    ),
    (
        "train --job.config_file=date.toml",
        'training.seed = "2026-01-01": must be an integer',
    ),
    (
        "train --job.config_file=inner.toml",
        "training.inner is no option; did you mean checkpoint.interval?",
    ),
    (
        "train --training.seed=99999999999999999999",
        "training.seed = 99999999999999999999: must be 0 or more and below 2^63",
    ),
    (
        "train --training.steps=1e3",
        'training.steps = "1e3": must be an integer',
    ),
    (
        "train --autoencoder.scale=0",
        "autoencoder.scale = [0.0]: must be greater than 0",
    ),
    (
        "train --training.loss_spike_factor=0.5",
        "training.loss_spike_factor = 0.5: must be above 1, or 0 for none",
    ),
    (
        "train --checkpoint.enable_checkpoint --checkpoint.save_final=false",
        "checkpoint.save_final = false: checkpoint.enable_checkpoint saves the last step too; leave it out, or set "
        "both to false",
    ),
    (
        "train --training.on_nonfinite=rollback",
        'training.on_nonfinite = "rollback": needs checkpoint.enable_checkpoint to return to',
    ),
    (
        "train --training.on_nonfinite=rollback --checkpoint.enable_checkpoint --dataset.streaming",
        'training.on_nonfinite = "rollback": skips data, which dataset.streaming cannot; must be stop',
    ),
    (
        "train --training.on_nonfinite=retry",
        'training.on_nonfinite = "retry": must be one of stop, rollback',
    ),
    (
        "train --autotune.steps=1",
        "autotune.steps = 1: must be at least 2: the first step warms up",
    ),
    (
        "train --autotune.memory_margin=1",
        "autotune.memory_margin = 1.0: must be 0 or more and below 1",
    ),
    (
        "train --checkpoint.async_mode=async_with_pinned_mem",
        'checkpoint.async_mode = "async_with_pinned_mem": pinned memory is for copies from a GPU, and this '
        "machine has none; must be disabled or async",
    ),
    (
        "train --checkpoint.async_mode=asynk",
        'checkpoint.async_mode = "asynk": must be one of disabled, async, async_with_pinned_mem; did you mean async?',
    ),
    (
        "train --checkpoint.initial_load_path=gone",
        'checkpoint.initial_load_path = "gone": no such file or folder; must be a .safetensors file, a run '
        "directory, or a checkpoint in one",
    ),
    (
        "train --profiling.save_memory_snapshot_folder=a/../b",
        'profiling.save_memory_snapshot_folder = "a/../b": must be a plain folder name inside the run directory, '
        "without `..`",
    ),
    (
        'train "--metrics.experiment_name=a\\b"',
        'metrics.experiment_name = "a\\\\b": must be a plain folder name without slashes, of at most 200 bytes',
    ),
    (
        "train --metrics.experiment_name=",
        'metrics.experiment_name = "": must be a plain folder name without slashes, of at most 200 bytes',
    ),
    (
        'train "--metrics.experiment_name=a\tb"',
        'metrics.experiment_name = "a\\tb": must be a plain folder name without slashes, of at most 200 bytes',
    ),
    (
        "train --training.batch_size=many",
        'training.batch_size = "many": must be an integer, or auto',
    ),
    (
        "train --diffusion.objective=ddpm",
        'diffusion.objective = "ddpm": is for models that were trained so (sdxl); must be flow_matching',
    ),
    (
        "train --diffusion.timestep_shift=0",
        "diffusion.timestep_shift = 0.0: must be greater than 0",
    ),
    (
        "train --lr_scheduler.decay_ratio=2",
        "lr_scheduler.decay_ratio = 2.0: must be between 0 and 1",
    ),
    (
        "train --activation_checkpoint.mode=selectiv",
        'activation_checkpoint.mode = "selectiv": must be one of none, full, selective, fraction; did you mean '
        "selective?",
    ),
    (
        "train --model.qk_norm=maybe",
        'model.qk_norm = "maybe": must be true or false',
    ),
    (
        "train --model.preset=offical",
        'model.preset = "offical": must be one of torchditan, official, llama3_diffusion; did you mean official?',
    ),
    (
        "train --sampling.guidance_interval=a,b",
        'sampling.guidance_interval = ["a", "b"]: must be numbers: [0.3, 1.0]',
    ),
    (
        "train --job.dump_folder=file/inner",
        'job.dump_folder = "file/inner": file/inner/digits-debugmodel is no folder that can be written (Not a '
        "directory); choose another",
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=notes",
        'dataset.root_dir = "notes": holds no train images',
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=hollow",
        'dataset.root_dir = "hollow": c of its 3 classes holds no image; remove the folder, or fill it',
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=stray",
        'dataset.root_dir = "stray": 2.png is in no folder of a training class (a, ...)',
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=cut --dataset.image_size=8 "
        "--dataset.corrupt_images=skip",
        'dataset.dataset_name = "folder": has no readable image',
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=images --dataset.hub_name=a/b",
        'dataset.hub_name = "a/b": folder does not read it; leave it out',
    ),
    (
        "train --dataset.dataset_name=imagenet --dataset.root_dir=bare",
        'dataset.root_dir = "bare": train/ must hold one subfolder per class',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=file",
        'dataset.root_dir = "file": has no data_batch_*.bin and no parquet; cifar10 needs a folder of '
        "data_batch_*.bin, a parquet file or folder, or dataset.hub_name uoft-cs/cifar10",
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=python",
        'dataset.root_dir = "python": is the python version, whose pickles can run code; download '
        "cifar-10-binary.tar.gz instead",
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=short",
        'dataset.root_dir = "short/data_batch_1.bin": has 3000 bytes, not a multiple of 3073',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/words",
        'dataset.label_key = "label": holds string; must be integers from 0',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/gaps",
        'dataset.label_key = "label": holds 1 row(s) without a label; must be integers from 0',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/names",
        'dataset.image_key = "image": holds string; must be images as the hub stores them, their bytes and their path',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/pictures",
        'dataset.image_key = "image": must be one of the columns of tables/pictures/train.parquet: picture, label',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/empty_rows",
        "tables/empty_rows/train.parquet, row 1: not a readable image (there is none); repair or remove it, or "
        "skip such with --dataset.corrupt_images skip",
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/whole --dataset.label_key=class",
        'dataset.label_key = "class": must be one of the columns of tables/whole/train.parquet: image, label',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=tables/whole --validation.freq=1",
        'dataset.root_dir = "tables/whole": has no test-*.parquet for the validation images',
    ),
    (
        "train --dataset.dataset_name=cifar10 --dataset.root_dir=short --dataset.streaming",
        "dataset.streaming = true: needs the hub; set --dataset.hub_name uoft-cs/cifar10",
    ),
    (
        "train --dataset.dataset_name=digits --dataset.streaming",
        "dataset.streaming = true: digits is not read from the hub; only cifar10, imagenet_hub can stream",
    ),
    (
        "train --dataset.root_dir=images",
        'dataset.root_dir = "images": digits does not read it; leave it out',
    ),
    (
        "train --dataset.crop=random",
        'dataset.crop = "random": digits is never cropped; leave it out',
    ),
    (
        "train --dataset.fingerprint=latents-0123",
        'dataset.fingerprint = "latents-0123": the data here is of no known identity; leave it out, or give the '
        "data it belongs to",
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/numbers",
        'dataset.image_key = "image": holds int64; must be images',
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/gaps",
        'dataset.label_key = "label": holds 1 row(s) without a label; must be integers from 0',
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/words",
        'dataset.label_key = "label": holds string; must be integers from 0',
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/pictures",
        'dataset.image_key = "image": must be one of the columns of tables/pictures: picture, label',
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --dataset.root_dir=images",
        'dataset.root_dir = "images": imagenet_hub does not read it; leave it out',
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --dataset.streaming "
        "--dataset.crop=random",
        'dataset.crop = "random": is keyed to an image\'s number, which a streamed dataset does not know; center '
        "and adm work",
    ),
    (
        "train --dataset.dataset_name=imagenet_hub --dataset.hub_name=tables/whole --validation.freq=1",
        'dataset.hub_name = "tables/whole": has no validation split; must have one of validation, val, test',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=nothing",
        'dataset.root_dir = "nothing": holds no latents (it has no index.json); encode them with '
        "scripts/encode_latents.py",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=file",
        "file is no safetensors file",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=unfinished",
        'dataset.root_dir = "unfinished/train": its encoding is not finished; rerun the command that encoded it',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=cut_index",
        "cut_index/train/index.json is damaged; restore it, or delete it and encode the latents again",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=newer_latents",
        "newer_latents/train/index.json is of format 2, and this TorchDiTan reads up to 1; update TorchDiTan",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=outside",
        "outside/train/index.json is damaged; restore it, or delete it and encode the latents again",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=cut_shard",
        'dataset.root_dir = "cut_shard/train": shard-00000.safetensors has 5 bytes, not 144224; rerun the '
        "command that encoded it",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=no_shard",
        'dataset.root_dir = "no_shard/train": shard-00000.safetensors is missing; rerun the command that encoded it',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=header",
        "header/train/shard-00000.safetensors is no safetensors file",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=pickled",
        'dataset.root_dir = "pickled/train": labels.npy is damaged; rerun the command that encoded it',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=no_labels",
        'dataset.root_dir = "no_labels/train": labels.npy is missing; rerun the command that encoded it',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=floats",
        'dataset.root_dir = "floats/train": labels.npy holds float64 [10], not a list of integers; rerun the '
        "command that encoded it",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=few_labels",
        'dataset.root_dir = "few_labels/train": labels.npy has 3 labels, not 1498; rerun the command that encoded it',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=strange_labels",
        "dataset.num_classes = none: the labels of latents run from 7 to 16; must be 0 to 9, its 10 classes",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=no_validation --validation.freq=1",
        'dataset.root_dir = "no_validation": has no validation latents; encode them with --split validation, or '
        "set --validation.freq 0",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --dataset.horizontal_flip",
        "dataset.horizontal_flip = true: these latents hold no mirrored images; encode them without --no_flip, "
        "or leave it out",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.online",
        "autoencoder.online = true: latents holds latents, which are encoded already; leave it out",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.sample_posterior",
        "autoencoder.sample_posterior = true: these latents hold no variance; encode them with --posterior, or "
        "leave it out",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.fingerprint=haar-8-1",
        'autoencoder.fingerprint = "haar-8-1": these latents come from haar-2-1; leave it out, or give the '
        "latents it belongs to",
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --autoencoder.name=sdxl",
        'autoencoder.name = "sdxl": these latents come from haar; leave it out',
    ),
    (
        "train --dataset.dataset_name=latents --dataset.root_dir=latents --model.input_channels=3",
        "model.input_channels = 3: latents has 4 channel(s); leave it out",
    ),
    (
        "train --autoencoder.online",
        "autoencoder.name = none: must be given to encode pixels (autoencoder.online)",
    ),
    (
        "train --autoencoder.online --autoencoder.name=haarr",
        'autoencoder.name = "haarr": must be one of haar, patch, cosmos, diffusers, sd-vae, sdxl, sd3, flux, '
        "dc-ae, cosmos-ci8x8, cosmos-ci16x16; did you mean haar?",
    ),
    (
        "train --autoencoder.online --autoencoder.name=patch",
        "autoencoder.path = none: must be given: a folder that scripts/train_autoencoder.py wrote, or one of "
        "train_configs/autoencoders/, earth say",
    ),
    (
        "train --autoencoder.name=haar",
        'autoencoder.name = "haar": digits holds pixels; encode them first, or at each step with --autoencoder.online',
    ),
    (
        "train --autoencoder.online --autoencoder.name=haar --autoencoder.downsampling=2",
        "autoencoder.scale = none: haar publishes no normalisation; set shift and scale, which "
        "scripts/reconstruct.py prints for a dataset",
    ),
    (
        "train --autoencoder.online --autoencoder.name=haar --autoencoder.downsampling=2 --autoencoder.shift=0 "
        "--autoencoder.scale=1,2",
        "autoencoder.scale = [1.0, 2.0]: must be one number, or one for each of the 4 latent channels",
    ),
    (
        "train --autoencoder.online --autoencoder.name=cosmos --autoencoder.path=nothing "
        "--dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8",
        'autoencoder.path = "nothing": has no encoder.jit; must hold encoder.jit and decoder.jit',
    ),
    (
        "train --autoencoder.online --autoencoder.name=diffusers --autoencoder.path=nothing "
        "--dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8",
        'autoencoder.path = "nothing": has no config.json; must hold config.json and '
        "diffusion_pytorch_model.safetensors",
    ),
    (
        "train --metrics.experiment_name=unknown --job.dump_folder=.",
        "unknown holds metrics.jsonl but no config.json, so what made it is unknown; name this run with "
        "--metrics.experiment_name",
    ),
    (
        "train --metrics.experiment_name=torn --job.dump_folder=.",
        "torn/config.json does not parse: Expecting property name enclosed in double quotes: line 1 column 13 "
        "(char 12)",
    ),
    (
        "train --metrics.experiment_name=list --job.dump_folder=.",
        "list/config.json is not that of a run: it holds no configuration",
    ),
    (
        "generate list",
        "list/config.json is not that of a run: it holds no configuration",
    ),
    (
        "generate flat",
        "flat/config.json is not that of a run: it holds no configuration",
    ),
    (
        "generate newer",
        "training.speed is no option; did you mean training.seed?",
    ),
    (
        "generate run --autoencoder.path=gone",
        'autoencoder.path = "gone": this run was trained on pixels, and has nothing to decode; leave it out',
    ),
    (
        "generate run --out=file/x.png",
        '--out = "file/x.png": must be a file in a folder that can be written to',
    ),
    (
        "evaluate run --samples_per_class=0",
        "--samples_per_class: '0' must be an integer of at least 1",
    ),
    (
        "convert_checkpoint",
        "the first argument is missing; must be export or import, or --help",
    ),
    (
        "convert_checkpoint export run weights.pt",
        'OUT = "weights.pt": must be a file that ends in .safetensors',
    ),
    (
        "convert_checkpoint export nothing weights2.safetensors",
        "nothing is not a run directory: it has no config.json",
    ),
    (
        "convert_checkpoint import gone.safetensors imported",
        "gone.safetensors cannot be read: No such file or directory",
    ),
    (
        "convert_checkpoint import weights.safetensors imported",
        "weights.safetensors is no safetensors file, or cut short; copy or export it again",
    ),
    (
        "encode_latents out --autoencoder.name=haar --shard_size=0",
        "--shard_size: '0' must be an integer of at least 1",
    ),
    (
        "encode_latents outside --verify",
        "outside/train/index.json is damaged; restore it, or delete it and encode the latents again",
    ),
    (
        "encode_latents header --verify",
        "header/train/shard-00000.safetensors is not what was encoded (its sha256 differs); delete it and rerun "
        "the command that encoded it",
    ),
    (
        "encode_latents latents --autoencoder.name=haar --dataset.num_workers=0",
        "latents/train holds latents with other settings: autoencoder.downsampling is 2 there and 4 here; "
        "autoencoder.fingerprint is haar-2-1 there and haar-4-1 here; latent_shape is (4, 4, 4) there and (16, "
        "2, 2) here; shard_size is 1000 there and 4096 here. Use its settings to go on with it, else another folder",
    ),
    (
        "reconstruct --autoencoder.name=haar --autoencoder.downsampling=3",
        "autoencoder.downsampling = 3: must be one of 2, 4, 8 for haar",
    ),
    (
        "train_autoencoder out --dataset.dataset_name=latents --dataset.root_dir=latents",
        'dataset.dataset_name = "latents": its samples have 4 channels; must be a dataset of pictures',
    ),
    (
        "ablation run gone",
        "gone is no grid file; train_configs/ablations/ has 0.5B, 7B, 7B_autotune, convergence, debug, flux_benchmark, "
        "published_debug, published_models",
    ),
    (
        "ablation run grid.toml",
        "grid.toml: repeat is no key of a grid; did you mean repeats?",
    ),
    (
        "ablation run debug --steps 0",
        "steps = 0: must be an integer of at least 1",
    ),
    (
        "ablation run debug --memory_limit_gib nan",
        "memory_limit_gib = NaN: must be a number greater than 0",
    ),
    (
        "ablation show grids/list",
        "grids/list is no grid folder: its grid.json is not that of a grid",
    ),
    (
        "ablation run",
        "the following arguments are required: grid",
    ),
    (
        "plan quickstart --device h100 --num_devices 0",
        "--num_devices: '0' must be an integer of at least 1",
    ),
    (
        "plan quickstart --device cpu --training.batch_size auto",
        'training.batch_size = "auto": needs a device whose memory is known; name one, or give a number',
    ),
    (
        "plan nowhere.toml --device h100",
        "model.input_channels = none: must be given: the planner does not open the dataset folder",
    ),
    (
        "plan quickstart --device h100 --autoencoder.online",
        "autoencoder.online = true: the planner counts no encoder; plan its latents with false, "
        "model.input_channels and dataset.image_size",
    ),
    (
        "train --dataset.dataset_name=folder --dataset.root_dir=images --dataset.image_size=8 --dataset.num_classes=1",
        "dataset.num_classes = 1: folder has 2 classes; must be at least that, or 0 to train without labels",
    ),
    (
        "reconstruct --autoencoder.name=haar --out=file/x.png",
        '--out = "file/x.png": must be a file in a folder that can be written to',
    ),
    (
        "train --training.global_batch_size=3",
        "training.global_batch_size = 3: must be a multiple of training.batch_size = 2 times the number of ranks",
    ),
    (
        "train --sampling.guidance_channels=0",
        "sampling.guidance_channels = 0: must be at least 1",
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
        make(patch, "scripts/encode_latents.py", "latents", *haar, "--shard_size=1000", "--no_flip")
    write_run(folder / "run")
    write_files(folder)
    write_images(folder)
    write_tables(folder)
    write_latents(folder)
    return folder


def make(patch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run a script that succeeds."""
    patch.setattr(sys, "argv", [script, *arguments])
    patch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    assert stop.value.code == 0


def write_run(folder: Path) -> None:
    config = to_dict(load_config(["--model.flavor=debugmodel"]))
    config["dataset"] |= {"image_size": [8, 8], "num_classes": 10}
    config["model"]["input_channels"] = 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": config}))


def write_files(folder: Path) -> None:
    texts = {
        "file": "",
        "twice.toml": "[training]\nsteps = 1\nsteps = 2\n",
        "sections.toml": "[training]\nsteps = 1\n[optimizer]\nlr = 1.0\n[training]\nseed = 1\n",
        "date.toml": "[training]\nseed = 2026-01-01\n",
        "inner.toml": "[training.inner]\nsteps = 1\n",
        "grid.toml": "steps = 4\nwindow = 2\nrepeat = 3\n[axes]\nmodel.patch_size = [2]\n",
        "nowhere.toml": "[dataset]\ndataset_name = 'folder'\n",
        "unknown/metrics.jsonl": '{"step": 1}\n',
        "torn/config.json": '{"config": {',
        "list/config.json": "[1, 2]",
        "flat/config.json": '{"config": {"training": 3}}',
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

    def edit_index(name: str, **changes: Any) -> None:
        path = copy(name) / "index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    shards = json.loads((folder / "latents" / "train" / "index.json").read_text())["shards"]
    edit_index("newer_latents", format_version=2)
    edit_index("outside", shards=[{**shards[0], "file": "../validation/shard-00000.safetensors"}, *shards[1:]])
    edit_index("typed", dtype="float4")
    (copy("cut_index") / "index.json").write_text('{"format_version": 1,')
    (copy("cut_shard") / shards[0]["file"]).write_bytes(b"short")
    (copy("no_shard") / shards[0]["file"]).unlink()
    header = copy("header") / shards[0]["file"]
    header.write_bytes(b"\xff" * header.stat().st_size)
    (copy("pickled") / "labels.npy").write_bytes(pickle.dumps([0] * 10))
    (copy("no_labels") / "labels.npy").unlink()
    np.save(copy("floats") / "labels.npy", np.zeros(10))
    np.save(copy("few_labels") / "labels.npy", np.zeros(3, dtype=np.int32))
    labels = np.load(folder / "latents" / "train" / "labels.npy")
    np.save(copy("strange_labels") / "labels.npy", labels + 7)
    (copy("unfinished") / "index.json").rename(folder / "unfinished" / "train" / "encoding.json")
    shutil.rmtree(copy("no_validation").parent / "validation")


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Everything in a folder: size and time of files, None for folders."""
    found = ((path, path.stat()) for path in sorted(folder.rglob("*")))
    return {
        str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if path.is_file() else None
        for path, stat in found
    }


@pytest.mark.parametrize(("command", "line"), ROWS, ids=[command for command, _ in ROWS])
def test_a_bad_job_is_one_line_and_writes_nothing(
    command: str, line: str, place: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    monkeypatch.chdir(place)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    before = contents(place)
    name, *arguments = shlex.split(command)
    script = SCRIPTS.get(name, f"scripts/{name}.py")
    code, _, errors = run_script(script, *(SMALL if name == "train" else ()), *arguments)
    assert (code, errors) == (2, f"error: {line.replace('{place}', str(place))}\n")
    assert contents(place) == before
