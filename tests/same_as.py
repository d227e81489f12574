#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run short jobs with an older commit and with the working tree, and compare what they wrote, to the bit.

python tests/same_as.py 64e3c53
python tests/same_as.py 64e3c53 --cases quickstart fsdp --folder /tmp/same_as

A redesign keeps behaviour: losses, gradient norms, samples, exported weights, the figures of an evaluation and the
text of a plan stay the same. CPUs differ in their last bits, so both sides always run here, at the same time. With
--folder, later calls run only the working tree. Exit code 1 if anything differs, 0 if not.

pytest does not collect this file: it compares with history, which a clone of depth 1 lacks.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent

SHORT = {
    "training.steps": 10,
    "training.mixed_precision_param": "float32",
    "dataset.num_workers": 0,
    "validation.freq": 5,
    "validation.num_images": 64,
    "checkpoint.enable_checkpoint": "true",
    "checkpoint.interval": 5,
    "metrics.log_freq": 1,
    "metrics.sample_freq": 5,
    "metrics.sample_batch_size": 20,
    "sampling.num_steps": 3,
    "metrics.experiment_name": "run",
    "job.dump_folder": "OUT",
}
"""Options of every training."""
LORA = {
    "model.name": "flux",
    "model.flavor": "debugmodel",
    "model.path": "INPUTS/pipeline",
    "dataset.dataset_name": "captions",
    "dataset.root_dir": "INPUTS/balls",
    "dataset.image_size": 64,
    "text_encoder.max_length": 8,
    "text_encoder.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.batch_size": 5,
    "diffusion.label_dropout": 0,
    "validation.freq": 0,
    "ema.enable": "false",
    "metrics.enable_sampling": "false",
    "sampling.guidance_scale": 1,
    "lora.rank": 4,
    "optimizer.lr": 1e-3,
}
ON_DIGITS = "--dataset.dataset_name=digits --autoencoder.name=haar --autoencoder.downsampling=2"


def train(config: str = "", options: dict[str, Any] | None = None, *, ranks: int = 1) -> str:
    """A short training with the run directory OUT/run."""
    launch = "torchditan" if ranks == 1 else f"torchrun --standalone --nproc_per_node={ranks} -m torchditan"
    flags = (f"--{key}={value}" for key, value in {**SHORT, **(options or {})}.items())
    return " ".join([launch, "train", config, *flags])


def on_ranks(ranks: int, *degrees: str, steps: int = 10) -> str:
    """The quickstart with a tiny model on ranks, in groups of two."""
    size = {"model.flavor": "debugmodel", "training.global_batch_size": 32, "training.steps": steps}
    return train("quickstart", {**size, **{f"training.{degree}_degree": 2 for degree in degrees}}, ranks=ranks)


SHARD, REPLICATE = "data_parallel_shard", "data_parallel_replicate"
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
FIVE_STEPS = {"training.steps": 5}
DDPM = {"model.preset": "official", "diffusion.objective": "ddpm", "sampling.sampler": "ancestral"}
LATENTS = {"dataset.dataset_name": "latents", "dataset.root_dir": "OUT/latents", "model.patch_size": 1}

EXPORT = "torchditan export OUT/run OUT/exported.safetensors"
EXPORT_LORA = "torchditan export_lora OUT/run OUT/lora.safetensors"
GENERATE = "torchditan generate OUT/run --sampling.num_steps=4 --out=OUT/generated.png"
EVALUATE = "torchditan evaluate OUT/run --out=OUT/card --sampling.num_steps=2"
CLASSIFY = f"{EVALUATE} --metrics classifier --num_samples=200 --epochs=1"

CASES = {
    "quickstart": [train("quickstart"), EXPORT, GENERATE, CLASSIFY],
    "quickstart_bfloat16": [train("quickstart", BFLOAT16), EXPORT],
    "quickstart_one_step": [train("quickstart_one_step", FIVE_STEPS), EXPORT],
    "frechet_distance": [train("quickstart", FIVE_STEPS), f"{EVALUATE} --metrics effnet --num_samples=1300"],
    "resumed": [train("quickstart", FIVE_STEPS), train("quickstart"), EXPORT],
    "ddpm": [train("quickstart", DDPM), EXPORT],
    "earth": [train("earth"), EXPORT],
    "earth_bfloat16": [train("earth", BFLOAT16)],
    "scenes": [train("scenes", FIVE_STEPS), EXPORT],
    "haar_latents": [f"torchditan encode OUT/latents {ON_DIGITS}", train("quickstart", LATENTS), EXPORT, GENERATE],
    "flux_lora": [train("", LORA), EXPORT_LORA],
    "flux_lora_int8": [train("", {**LORA, "quantize.base": "int8"}), EXPORT_LORA],
    "fsdp": [on_ranks(2, SHARD), EXPORT],
    "ddp": [on_ranks(2, REPLICATE), EXPORT],
    "hsdp": [on_ranks(4, SHARD, REPLICATE), EXPORT],
    "context_parallel": [on_ranks(2, "context_parallel"), EXPORT],
    "resumed_on_2_ranks": [on_ranks(2, SHARD, steps=5), on_ranks(2, SHARD), on_ranks(1, steps=15), EXPORT],
    "imported_dit": [
        f"torchditan import INPUTS/DiT.pt OUT/run --format=dit --num_heads=4 {ON_DIGITS}"
        " --autoencoder.shift=0 --autoencoder.scale=1",
        EXPORT,
        GENERATE,
    ],
    "plans": [
        "torchditan plan quickstart --device=cpu",
        "torchditan plan dit_7b --device=h100 --num_devices=8",
        "torchditan plan sd3_medium_lora_int8 --device=l4 --dataset.image_size=1024",
    ],
}


def write_inputs(folder: Path) -> None:
    """A DiT file and a FLUX pipeline with random weights, and pictures with captions."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import tiny_pipelines
    import torch
    from own_reading import DIT, random_weights

    (folder / "balls").mkdir(parents=True)
    torch.save(random_weights(replace(DIT, side=4)), folder / "DiT.pt")
    tiny_pipelines.save(tiny_pipelines.flux(), folder / "pipeline")
    for number in range(5):
        Image.new("RGB", (64, 64), (40 * number, 90, 200 - 30 * number)).save(folder / f"balls/{number}.png")
        (folder / f"balls/{number}.txt").write_text(f"a ball of number {number}")


def run(tree: Path, commands: list[str], out: Path, inputs: Path) -> None:
    """Run commands with the package of a tree. What a plan prints becomes a file.

    Raises:
        SystemExit: a command failed.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    modules = {"torchditan": "torchditan", "torchrun": "torch.distributed.run"}
    for number, command in enumerate(commands):
        name, *words = (word.replace("OUT", str(out)).replace("INPUTS", str(inputs)) for word in command.split())
        line = [sys.executable, "-m", modules[name], *words]
        done = subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nexit code {done.returncode}")
        if words[0] == "plan":
            (out / f"plan_{number}.txt").write_text(done.stdout)
    (out / "commands").write_text("\n".join(commands))


def what_differs(old: Path, new: Path) -> Iterator[str]:
    """What two sides wrote and do not share, a line each."""
    wrote = ("run/metrics.jsonl", "run/samples/step_*.png", "*.png", "*.safetensors", "card/**/card.json", "*.txt")
    files = [file.relative_to(old) for pattern in wrote for file in sorted(old.glob(pattern))]
    assert files, f"{old}: nothing to compare"
    for file in files:
        if (new / file).exists():
            yield from (f"{file}: {line}" for line in COMPARISONS[file.suffix](old / file, new / file))
        else:
            yield f"{file}: missing"


def _records(old: Path, new: Path) -> Iterator[str]:
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (old, new))
    if [row["step"] for row in before] != [row["step"] for row in after]:
        yield f"steps {[row['step'] for row in before]} and {[row['step'] for row in after]}"
        return
    for one, other in zip(before, after, strict=True):
        for name in one:
            is_result = "loss" in name or name in ("grad_norm", "lr", "images_seen")
            if is_result and one[name] != other.get(name):
                yield f"step {one['step']}: {name} {one[name]} and {other.get(name)}"


def _tensors(old: Path, new: Path) -> Iterator[str]:
    before, after = load_file(old), load_file(new)
    if before.keys() != after.keys():
        yield f"other names: {sorted(before.keys() ^ after.keys())}"
    elif changed := [name for name in before if not before[name].equal(after[name])]:
        yield f"{len(changed)} of {len(before)} tensors, first {changed[0]}"


def _pictures(old: Path, new: Path) -> Iterator[str]:
    if not np.array_equal(*(np.asarray(Image.open(file).convert("RGB")) for file in (old, new))):
        yield "other pixels"


def _cards(old: Path, new: Path) -> Iterator[str]:
    before, after = (json.loads(file.read_text())["figures"] for file in (old, new))
    for name, figure in before.items():
        for part in ("value", "low", "high", "per_seed"):
            if figure[part] != after.get(name, {}).get(part):
                yield f"{part} of {name} {figure[part]} and {after.get(name, {}).get(part)}"


def _texts(old: Path, new: Path) -> Iterator[str]:
    before, after = (file.read_text().splitlines() for file in (old, new))
    yield from difflib.unified_diff(before, after, n=0, lineterm="")


COMPARISONS = {".jsonl": _records, ".safetensors": _tensors, ".png": _pictures, ".json": _cards, ".txt": _texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older side, such as 64e3c53")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="keep both sides there; what the older side wrote is used again")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="same_as_"))).resolve()
    commit = subprocess.check_output(["git", "rev-parse", "--short", args.commit], cwd=ROOT, text=True).strip()
    tree, inputs = folder / commit / "tree", folder / "inputs"
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    if not inputs.exists():
        write_inputs(inputs)
    differ = 0
    for case in args.cases:
        start, commands = time.perf_counter(), CASES[case]
        old, new = folder / commit / case, folder / "new" / case
        sides = [(ROOT, new)]
        if not (old / "commands").exists() or (old / "commands").read_text() != "\n".join(commands):
            sides.append((tree, old))
        with ThreadPoolExecutor(2) as both:
            list(both.map(lambda side, commands=commands: run(side[0], commands, side[1], inputs), sides))
        lines = list(what_differs(old, new))
        differ += bool(lines)
        verdict = f"{len(lines)} differences" if lines else "same"
        print(f"{case}: {verdict}, {time.perf_counter() - start:.0f} s", *lines[:8], sep="\n  ", flush=True)
    if args.folder is None:
        shutil.rmtree(folder)
    print(f"{len(args.cases) - differ} of {len(args.cases)} cases are the same as {commit}, to the bit")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
