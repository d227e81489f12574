# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The model tests of diffusers' DiTTransformer2DModel on a transformer that `torchditan export` wrote.

    python tests/foreign/diffusers_dit.py --source DIFFUSERS_CHECKOUT

A run of two steps is exported. Each model that a test builds has the configuration and the weights of that folder, and
what a test saves and opens again is our transformer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_suite
from safetensors.torch import load_file

TRAIN = (
    "--model.flavor=debugmodel",
    "--model.preset=official",
    "--model.timestep_frequencies=diffusers",
    "--model.input_channels=4",
    "--diffusion.objective=ddpm",
    "--dataset.dataset_name=dummy",
    "--dataset.num_workers=0",
    "--dataset.dummy_size=8",
    "--dataset.image_size=8",
    "--dataset.num_classes=10",
    "--training.batch_size=2",
    "--training.steps=2",
    "--training.mixed_precision_param=float32",
    "--optimizer.lr=1e-2",
    "--metrics.enable_sampling=false",
    "--checkpoint.enable_checkpoint=true",
    "--job.dump_folder=.",
    "--metrics.experiment_name=run",
)
NETWORK = "needs a network"
SKIPPED = {"*::test_correct_class_remapping_from_pretrained_config": NETWORK}


def export(folder: Path) -> Path:
    """Train and export. Returns the folder of the transformer."""
    for arguments in (("train", *TRAIN), ("export", "run", "out", "--format=diffusers")):
        command = [sys.executable, "-m", "torchditan", *arguments]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "out"  # the transformer alone: the run has no autoencoder


def replace(module: ModuleType, transformer: Path) -> None:
    """Their tests build and open our transformer."""
    config = json.loads((transformer / "config.json").read_text())
    options = {name: value for name, value in config.items() if not name.startswith("_")}
    (weights,) = transformer.glob("*.safetensors")

    class DiTTransformer2DModel(module.DiTTransformer2DModel):  # type: ignore[misc,name-defined]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.load_state_dict(load_file(weights))

    # diffusers reads the options of a model from the signature.
    DiTTransformer2DModel.__init__.__wrapped__ = module.DiTTransformer2DModel.__init__  # type: ignore[attr-defined]
    tested = module.DiTTransformer2DTesterConfig
    tested.model_class = property(lambda self: DiTTransformer2DModel)
    tested.get_init_dict = lambda self: dict(options)
    channels, size = options["in_channels"], options["sample_size"]
    tested.input_shape = property(lambda self: (channels, size, size))
    tested.output_shape = property(lambda self: (options["out_channels"], size, size))


if __name__ == "__main__":
    tests = ["tests/models/transformers/test_models_dit_transformer2d.py"]
    with tempfile.TemporaryDirectory() as folder:
        written: list[Path] = []

        def replace_once(module: ModuleType) -> None:
            written.append(export(Path(folder)))
            replace(module, written[0])

        sys.exit(foreign_suite.main(__doc__ or "", tests=tests, replace=replace_once, skipped=SKIPPED))
