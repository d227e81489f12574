# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The configurations in train_configs/ and train_configs/recipes/ train."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from torchditan import trainer
from torchditan.config.options import Model
from torchditan.extras.published.resolutions import latent_channels
from torchditan.models.flops import ModelFlops

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGURATIONS = [
    file for folder in (".", "recipes") for file in (REPOSITORY / "train_configs" / folder).glob("*.toml")
]


@pytest.mark.parametrize("file", sorted(CONFIGURATIONS), ids=lambda file: file.stem)
def test_every_configuration_trains_a_step(
    file: Path, tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model on random samples: the options of each file go together. Nothing is compiled."""
    monkeypatch.setattr(trainer, "count_model_flops", lambda *_: ModelFlops(1, 1))
    with file.open("rb") as stream:
        tables = tomllib.load(stream)
    size = max(16, tables["model"].get("patch_size", 1))
    flags = ["--dataset.dataset_name=dummy", f"--dataset.image_size={size}", "--model.flavor=debugmodel"]
    flags += ["--training.steps=1", "--training.batch_size=2", "--training.global_batch_size=2"]
    flags += ["--validation.freq=0", "--metrics.enable_sampling=false", "--checkpoint.enable_checkpoint=false"]
    flags += ["--dataset.num_workers=0", f"--job.dump_folder={tmp_path}"]
    if tables["model"].get("overrides"):
        flags += ["--model.overrides=depth=2"]
    if tables["model"].get("text") and "text_width" not in tables["model"]:  # captions set the sizes
        flags += ["--model.text_tokens=4", "--model.text_width=8"]
    name = tables["model"].get("name", "dit")
    flags += [f"--model.name={re.sub('head_width=[0-9]+', 'head_width=64', name)}"]
    if tables.get("autoencoder", {}).get("online"):
        flags += ["--autoencoder.online=false"]
    if "encoder=" in str(ingredients := tables.get("diffusion", {}).get("ingredients")):  # of images, not of latents
        method = ingredients[0].split()[0]
        flags += [f"--diffusion.ingredients={method} encoder=efficientnet-lite0 block=1", "--model.input_channels=3"]
    if tables["model"].get("path"):  # a published model, whose weights are drawn
        for module in ("diffusers", "peft", "torchao"):
            pytest.importorskip(module)
        channels = latent_channels(Model(tables["model"]["name"], "debugmodel"))
        flags += ["--model.path=none", "--lora.assistant_path=none", f"--model.input_channels={channels}"]
        flags += ["--dataset.aspect_buckets=false", "--optimizer.name=AdamW"]
    with torch.compiler.set_stance("force_eager"):
        result = run_script("train.py", "--job.config_file", str(file), *flags)
    assert result.code == 0, result.err
    assert (tmp_path / file.stem / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["quickstart_one_step", "earth", "scenes"])
def test_a_configuration_whose_data_ships_trains_a_step_on_it(name: str, run_script: RunScript) -> None:
    flags = ["--model.flavor=debugmodel", "--training.steps=1", "--training.global_batch_size=2", "--validation.freq=0"]
    flags += ["--metrics.enable_sampling=false", "--checkpoint.enable_checkpoint=false", "--dataset.num_workers=0"]
    result = run_script("torchditan", "train", name, *flags)
    assert result.code == 0, result.err
