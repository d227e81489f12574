#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run short jobs with an older commit and with the working tree, and compare what they wrote, to the bit.

python tests/same_as.py 64e3c53
python tests/same_as.py 64e3c53 --cases quickstart_float32 fsdp

A redesign keeps behaviour: losses, gradient norms, samples, exports and the figures of an evaluation stay the same.
CPUs differ in their last bits, so both sides always run here, one after the other. All cases take about 10 minutes on
two cores. Exit code 1 if anything differs, 0 if not.

pytest does not collect this file: it compares with history, which a clone of depth 1 lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
Command = list[str]

NOT_COMPARED = ("_s", "per_image", "per_second", "per_device", "memory_gib", "reserved_gib", "_percent")
"""Ends of names of times and memory, which no two runs share."""


def train(*flags: str, ranks: int = 1) -> Command:
    """A short deterministic training whose run is out/run; it logs every step."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [
        *start,
        "train.py",
        *flags,
        "--job.dump_folder=OUT",
        "--metrics.experiment_name=run",
        "--metrics.log_freq=1",
        "--checkpoint.enable_checkpoint=true",
        "--dataset.num_workers=0",
    ]


def twenty(config: str, *flags: str, precision: str = "float32", ranks: int = 1) -> Command:
    short = ("--training.steps=20", "--validation.freq=10", "--metrics.sample_freq=20", "--checkpoint.interval=10")
    samples = ("--sampling.num_steps=3", "--metrics.sample_batch_size=20")
    chosen = f"--training.mixed_precision_param={precision}"
    return train(f"--job.config_file={config}", *short, *samples, chosen, *flags, ranks=ranks)


EXPORT = ["scripts/convert_checkpoint.py", "export", "OUT/run", "OUT/exported.safetensors"]
GENERATE = ["scripts/generate.py", "OUT/run", "--sampling.num_steps=4", "--out=OUT/generated.png"]
EVALUATE = [
    "scripts/evaluate.py",
    "OUT/run",
    "--metrics",
    "effnet",
    "classifier",
    "--num_samples=1300",
    "--epochs=1",
    "--sampling.num_steps=2",
    "--out=OUT/card",
]
TWO_RANKS = ("--optimizer.lr=3e-3", "--training.global_batch_size=32")


def flux_lora(out: Path) -> list[Command]:
    pipeline, images = out.parent / "pipeline", out.parent / "balls"
    if not pipeline.exists():
        sys.path[:0] = [str(ROOT / "tests/finetune"), str(ROOT / "tests")]
        import tiny_pipelines

        tiny_pipelines.save(tiny_pipelines.flux(), pipeline)
        images.mkdir()
        for number in range(5):
            Image.new("RGB", (64, 64), (40 * number, 90, 200 - 30 * number)).save(images / f"{number}.png")
            (images / f"{number}.txt").write_text(f"a ball of number {number}")
    options = {
        "model.name": "flux",
        "model.flavor": "debugmodel",
        "model.path": pipeline,
        "dataset.dataset_name": "captions",
        "dataset.root_dir": images,
        "dataset.image_size": 64,
        "text_encoder.max_length": 8,
        "text_encoder.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.batch_size": 5,
        "training.steps": 20,
        "diffusion.label_dropout": 0,
        "ema.enable": "false",
        "metrics.enable_sampling": "false",
        "sampling.guidance_scale": 1,
        "lora.rank": 4,
        "optimizer.lr": 1e-3,
    }
    lora = ["scripts/export_lora.py", "OUT/run", "OUT/exported.safetensors"]
    return [train(*(f"--{key}={value}" for key, value in options.items())), lora]


def haar_latents(out: Path) -> list[Command]:
    encode = ["scripts/encode_latents.py", "OUT/latents", "--dataset.dataset_name=digits", "--autoencoder.name=haar"]
    encode += ["--autoencoder.downsampling=2", "--dataset.num_workers=0"]
    on_latents = ("--dataset.dataset_name=latents", "--dataset.root_dir=OUT/latents", "--model.patch_size=1")
    return [encode, twenty("quickstart.toml", *on_latents), EXPORT, GENERATE]


def resumed(out: Path) -> list[Command]:
    return [twenty("quickstart.toml", "--training.steps=10"), twenty("quickstart.toml"), EXPORT]


def ranks(*degrees: str) -> Callable[[Path], list[Command]]:
    def commands(out: Path) -> list[Command]:
        return [twenty("quickstart.toml", *TWO_RANKS, *degrees, ranks=4 if len(degrees) == 2 else 2), EXPORT]

    return commands


SHARD, REPLICATE = "--training.data_parallel_shard_degree=2", "--training.data_parallel_replicate_degree=2"
CASES: dict[str, Callable[[Path], list[Command]]] = {
    "quickstart_float32": lambda out: [twenty("quickstart.toml"), EXPORT, GENERATE, EVALUATE],
    "quickstart_bfloat16": lambda out: [twenty("quickstart.toml", precision="bfloat16"), EXPORT],
    "resumed": resumed,
    "earth_float32": lambda out: [twenty("earth.toml"), EXPORT, GENERATE],
    "earth_bfloat16": lambda out: [twenty("earth.toml", precision="bfloat16"), EXPORT],
    "haar_latents": haar_latents,
    "flux_lora": flux_lora,
    "fsdp": ranks(SHARD),
    "ddp": ranks(REPLICATE),
    "hsdp": ranks(SHARD, REPLICATE),
}


def run(tree: Path, commands: list[Command], out: Path) -> None:
    """Run commands in a tree, with its own package.

    Raises:
        SystemExit: a command failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for command in commands:
        line = [sys.executable, *(word.replace("OUT", str(out)) for word in command)]
        done = subprocess.run(line, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nexit code {done.returncode}")


def what_differs(old: Path, new: Path) -> Iterator[str]:
    """What two runs wrote and do not share, a line each."""
    yield from _records(old / "run/metrics.jsonl", new / "run/metrics.jsonl")
    if (old / "exported.safetensors").exists():
        yield from _tensors(old / "exported.safetensors", new / "exported.safetensors")
    pictures = [*(old / "run/samples").glob("step_*.png"), *old.glob("generated.png")]
    for picture in pictures:
        other = new / picture.relative_to(old)
        if not other.exists() or not np.array_equal(_pixels(picture), _pixels(other)):
            yield f"{picture.relative_to(old)}: other pixels"
    if (old / "card").exists():
        yield from _cards(next(old.rglob("card.json")), next(new.rglob("card.json")))


def _pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


def _records(old: Path, new: Path) -> Iterator[str]:
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in (old, new)]
    if [row["step"] for row in rows[0]] != [row["step"] for row in rows[1]]:
        yield f"steps: {[row['step'] for row in rows[0]]} and {[row['step'] for row in rows[1]]}"
        return
    for before, after in zip(*rows, strict=True):
        for name in before:
            if not name.endswith(NOT_COMPARED) and before[name] != after.get(name):
                yield f"step {before['step']}: {name} {before[name]} and {after.get(name)}"


def _tensors(old: Path, new: Path) -> Iterator[str]:
    before, after = load_file(old), load_file(new)
    if before.keys() != after.keys():
        yield f"{old.name}: other names: {sorted(before.keys() ^ after.keys())}"
        return
    changed = [name for name in before if not before[name].equal(after[name])]
    if changed:
        yield f"{old.name}: {len(changed)} of {len(before)} tensors, first {changed[0]}"


def _cards(old: Path, new: Path) -> Iterator[str]:
    before, after = (json.loads(file.read_text())["figures"] for file in (old, new))
    for name, figure in before.items():
        for part in ("value", "low", "high", "per_seed"):
            if figure[part] != after.get(name, {}).get(part):
                yield f"card: {part} of {name} {figure[part]} and {after.get(name, {}).get(part)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older side, such as 64e3c53")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="keep both sides there; what the older side wrote is used again")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="same_as_"))).resolve()
    tree = folder / args.commit
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", args.commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    differ = 0
    for case in args.cases:
        old, new = folder / case / "old", folder / case / "new"
        shutil.rmtree(new, ignore_errors=True)
        commands = CASES[case](old)
        if not (old / "done").exists():
            shutil.rmtree(old, ignore_errors=True)
            run(tree, commands, old)
            (old / "done").touch()
        run(ROOT, commands, new)
        lines = list(what_differs(old, new))
        differ += bool(lines)
        print(f"{case}: {'same' if not lines else f'{len(lines)} differences'}", *lines[:8], sep="\n  ", flush=True)
    if args.folder is None:
        shutil.rmtree(folder)
    print(f"{len(args.cases) - differ} of {len(args.cases)} cases are the same as {args.commit}, to the bit")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
