# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Six small trained runs, each made once per pytest run: `zoo("digits")` is its folder, which tests only read.

They are six steps long, with checkpoints at steps 3 and 6. A test that changes a run copies it first.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiny_runs
from PIL import Image

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunDistributed

Zoo = Callable[[str], Path]

SMALL_GRID = ["--sampling.num_steps=2", "--sampling.images_per_class=1", "--sampling.max_classes=2"]
DRAWN = ["--metrics.enable_sampling=true", "--metrics.sample_freq=2", *SMALL_GRID]
VALIDATED = ["--validation.freq=3", "--validation.num_images=8"]
KEPT = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=3", "--checkpoint.save_final=true"]
FSDP = ["--training.data_parallel_replicate_degree=1", "--training.data_parallel_shard_degree=2"]

JOBS = {
    "digits": [*DRAWN, *VALIDATED],
    "one step": ["--diffusion.objective=imf", *DRAWN, "--sampling.num_steps=1"],
    "captions": [
        *("--dataset.dataset_name=captions", "--dataset.root_dir={inputs}", "--dataset.image_size=16"),
        *("--model.text=cross_attention", "--model.text_tokens=4", "--text_encoder.name=wordllama"),
        *("--text_encoder.max_length=4", "--model.text_width=256", *SMALL_GRID),
    ],
    "flux lora": [
        *("--model.name=flux", "--model.path={inputs}/pipeline", "--lora.rank=2", "--lora.alpha=4"),
        *("--dataset.dataset_name=captions", "--dataset.root_dir={inputs}", "--dataset.image_size=64"),
        *("--text_encoder.max_length=8", "--text_encoder.dtype=float32", "--diffusion.label_dropout=0"),
        *("--ema.enable=false", "--sampling.guidance_scale=1"),
    ],
    "latents": [
        *("--dataset.dataset_name=latents", "--dataset.root_dir={inputs}/latents", "--model.patch_size=1"),
        *("--dataset.horizontal_flip=false", *DRAWN, *VALIDATED),
    ],
    "fsdp": [*FSDP, *VALIDATED],
}


def train(name: str, place: Path, run_alone: RunAlone, run_distributed: RunDistributed) -> Path:
    """The run of this name, which one of pytest's processes trains while the others wait."""
    folder = place / name.replace(" ", "_")
    run = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "trained").exists():
            return run
        inputs = folder / "inputs"
        make_inputs(name, inputs, run_alone)
        flags = [*KEPT, *(flag.format(inputs=inputs) for flag in JOBS[name]), f"--cache.folder={folder / 'cache'}"]
        script = ["train.py", *tiny_runs.job(run, *flags)]
        if name == "fsdp":
            finished = run_distributed(script, 2, cwd=folder)
            assert finished.returncode == 0, finished.stderr
        else:
            run_alone(*script, cwd=folder)
        (folder / "trained").touch()
    return run


def make_inputs(name: str, inputs: Path, run_alone: RunAlone) -> None:
    """Captioned photos of two classes, a random FLUX pipeline, or stored latents of digits."""
    inputs.mkdir()
    if name == "flux lora":
        import tiny_pipelines

        tiny_pipelines.save(tiny_pipelines.flux(), inputs / "pipeline")
    if name == "latents":
        source = ["--dataset.dataset_name=digits", "--autoencoder.name=haar", "--autoencoder.downsampling=2"]
        run_alone("torchditan", "encode", inputs / "latents", *source, cwd=inputs)
        return
    draws = np.random.default_rng(0)
    for number in range(16):
        colour = ("red", "blue")[number % 2]
        pixels = draws.integers(0, 100, (64, 64, 3), dtype=np.uint8)
        pixels[16:48, 16:48, 2 * (number % 2)] = 255
        Image.fromarray(pixels).save(inputs / f"{number:02d}.png")
        (inputs / f"{number:02d}.txt").write_text(f"a {colour} square")
