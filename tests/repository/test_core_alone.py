# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The core without `torchditan/extras/`: it trains, resumes, draws and leaves its final weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    *("--model.flavor=debugmodel", "--training.global_batch_size=4", "--dataset.num_workers=0"),
    *("--sampling.num_steps=2", "--sampling.max_classes=2", "--sampling.images_per_class=1", "--metrics.sample_freq=4"),
    *(
        "--validation.freq=0",
        "--metrics.experiment_name=run",
        "--checkpoint.enable_checkpoint",
        "--checkpoint.interval=2",
    ),
)


WITHOUT_EDITABLE_INSTALLS = """
import sys

is_editable = lambda finder: getattr(finder, "__module__", "").startswith("__editable__")
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_editable(finder)]
"""
"""Else Python finds the missing `torchditan.extras` in the checkout that is installed."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without extras."""
    root = tmp_path_factory.mktemp("core")
    ignored = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(REPOSITORY / "torchditan", root / "torchditan", ignore=ignored)
    (root / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALLS)
    command = [sys.executable, "-c", "import torchditan, torchditan.extras"]
    found = subprocess.run(command, cwd=root, env=environment_of(root), capture_output=True, text=True)
    assert "No module named 'torchditan.extras'" in found.stderr
    return root


def environment_of(core: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(core), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def train(core: Path, *flags: str, ranks: int = 1) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "torchditan", "train", "quickstart", *SMALL, *flags]
    run = subprocess.run(command, cwd=core, env=environment_of(core), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def made_data(name: str, folder: Path) -> list[str]:
    """Flags of a small dataset."""
    rng = np.random.default_rng(0)
    if name == "digits":
        return []
    if name == "folder":
        for label in ("a", "b"):
            for number in range(4):
                file = folder / label / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
        return ["--dataset.dataset_name=folder", f"--dataset.root_dir={folder}", "--dataset.image_size=8"]
    if name == "cifar10":
        folder.mkdir()
        for file in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
            rows = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
            rows[:, 0] %= 10
            (folder / file).write_bytes(rows.tobytes())
        return ["--dataset.dataset_name=cifar10", f"--dataset.root_dir={folder}"]
    command = [sys.executable, "-m", "torchditan", "encode", str(folder), "--dataset.dataset_name=digits"]
    subprocess.run([*command, "--autoencoder.name=haar"], cwd=REPOSITORY, check=True, capture_output=True)
    return ["--dataset.dataset_name=latents", f"--dataset.root_dir={folder}", "--model.patch_size=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "ranks"), [("digits", 1), ("digits", 2), ("folder", 1), ("cifar10", 1), ("latents", 1)]
)
def test_the_core_trains_resumes_draws_and_leaves_its_weights(
    data: str, ranks: int, core: Path, tmp_path: Path
) -> None:
    flags = [*made_data(data, tmp_path / "data"), f"--job.dump_folder={tmp_path}"]
    run = tmp_path / "run"
    train(core, *flags, "--training.steps=2", ranks=ranks)
    train(core, *flags, "--training.steps=4", ranks=ranks)
    assert (run / "checkpoint/step-00000004/manifest.json").exists()
    assert (run / "samples/step_00000004.png").exists()
    again = [*flags, "--training.steps=2", "--metrics.experiment_name=weights", "--checkpoint.enable_checkpoint=false"]
    train(core, *again, "--checkpoint.save_final", ranks=ranks)
    assert (tmp_path / "weights/checkpoint/step-00000002.safetensors").exists()
