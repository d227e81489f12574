#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Does `captioned_folder.toml` learn 20 captioned pictures? `python benchmarks/captioned_folder.py --seeds 0 1`

The pictures are drawn here: five kinds, four of each, which differ in position, size, shade and proportions. A sample
of each caption counts as right if its nearest picture is of the caption's kind; chance is 20%. The squared distance is
the mean over 8 x 8 averaged pixels plus that of the mean colours. Coloured tiles without shapes reach 17 of 20, so the
pixels count too: `rms_difference_from_own_picture`, of values from 0 to 1. Other flags go to `torchditan train`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan import load
from torchditan.datasets.images import load_sample
from torchditan.extras.ablation.launch import TRAIN, Job, execute
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

BACKGROUNDS = {
    "red circle": (250, 250, 250),
    "blue square": (250, 250, 250),
    "house": (185, 215, 245),
    "green tree": (240, 225, 190),
    "sailing boat": (225, 235, 240),
}
KINDS = tuple(kind for kind in BACKGROUNDS for _ in range(4))


def draw_picture(kind: str, place: str, size: str, random: np.random.Generator) -> Image.Image:
    """One picture, RGB."""
    width, height = int(random.integers(120, 400)), int(random.integers(90, 300))
    side = int(min(width, height) * {"small": 0.38, "large": 0.62}[size] * random.uniform(0.9, 1.1))
    x = width / 2 + {"left": -0.16, "right": 0.16}[place] * min(width, height)
    y = height / 2 + random.uniform(-0.06, 0.06) * height
    shade = random.integers(-25, 26, size=3)

    def colour(*rgb: int) -> tuple[int, ...]:
        return tuple(np.clip(np.array(rgb) + shade, 0, 255).tolist())

    image = Image.new("RGB", (width, height), colour(*BACKGROUNDS[kind]))
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = x - side / 2, y - side / 2, x + side / 2, y + side / 2
    if kind == "red circle":
        draw.ellipse((left, top, right, bottom), fill=colour(215, 40, 40))
    elif kind == "blue square":
        draw.rectangle((left, top, right, bottom), fill=colour(45, 70, 205))
    elif kind == "house":
        draw.rectangle((0, bottom - side / 6, width, height), fill=colour(110, 165, 80))
        draw.rectangle((left + side / 8, y, right - side / 8, bottom), fill=colour(215, 175, 120))
        draw.polygon(((left, y), (right, y), (x, top)), fill=colour(150, 60, 45))
        draw.rectangle((x - side / 12, y + side / 5, x + side / 12, bottom), fill=colour(80, 50, 35))
    elif kind == "green tree":
        draw.rectangle((x - side / 10, y, x + side / 10, bottom), fill=colour(105, 70, 40))
        draw.ellipse((left + side / 8, top, right - side / 8, y + side / 5), fill=colour(45, 140, 60))
    else:
        water = bottom - side / 4
        draw.rectangle((0, water, width, height), fill=colour(40, 105, 165))
        draw.polygon(((x, top), (x, water), (right, water)), fill=colour(250, 205, 60))
        draw.polygon(((left, water), (right, water), (x, bottom)), fill=colour(90, 55, 40))
    return image


def draw_pictures(folder: Path) -> list[str]:
    """Write 20 pictures, each with a caption. Returns the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    random, captions = np.random.default_rng(0), []
    for number, kind in enumerate(KINDS):
        size, place = ("small", "large")[number % 2], ("left", "right")[number // 2 % 2]
        draw_picture(kind, place, size, random).save(folder / f"{number:02}.png")
        captions.append(f"a {size} {kind} on the {place}")
        (folder / f"{number:02}.txt").write_text(captions[-1] + "\n")
    return captions


def nearest(samples: np.ndarray, pictures: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) and (M, H, W, 3) uint8 -> (N,) the index of the nearest picture."""

    def features(images: np.ndarray) -> np.ndarray:  # (N, 195)
        count, height, width, _ = images.shape
        blocks = (images / 255).reshape(count, 8, height // 8, 8, width // 8, 3).mean(axis=(2, 4))
        means = blocks.mean(axis=(1, 2))
        return np.concatenate((blocks.reshape(count, -1) / np.sqrt(192), means / np.sqrt(3)), axis=1)

    differences = features(samples)[:, None] - features(pictures)[None]
    return (differences**2).sum(axis=-1).argmin(axis=1)


def measure(folder: Path, captions: list[str], *, seed: int, flags: list[str]) -> dict[str, Any]:
    """Train with one seed, draw one sample of each caption, and find the picture nearest to each."""
    name = f"captioned_{seed}"
    run = folder.parent / name
    shutil.rmtree(run, ignore_errors=True)  # a finished run would not train again
    place = [f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={name}", f"--training.seed={seed}"]
    job = Job((*TRAIN, "captioned_folder", f"--dataset.root_dir={folder}", *place, *flags), run)
    print(f"{name}: training, log in {job.log}", flush=True)
    if (outcome := execute(job)).status != "completed":
        raise SystemExit(f"{name}: {outcome.status}: {outcome.reason}")
    samples = load(run).sample(prompts=captions).permute(0, 2, 3, 1).numpy()
    shape = (3, *samples.shape[1:3])
    files = sorted(folder.glob("*.png"))
    decoded = [load_sample(file.read_bytes(), sample_shape=shape, where=file.name) for file in files]
    seen = np.stack(decoded).transpose(0, 2, 3, 1)
    pictures = np.round((seen + 1) * 127.5).astype(np.uint8)
    found, difference = nearest(samples, pictures), (samples.astype(float) - pictures) / 255
    halves = np.split(np.arange(20), 2)
    rows = [np.concatenate(images[half], axis=1) for half in halves for images in (pictures, samples)]
    Image.fromarray(np.concatenate(rows)).save(run / "pictures_and_samples.png")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = json.loads((run / "config.json").read_text())["config"]
    return {
        "seed": seed,
        "right_kind": sum(KINDS[place] == KINDS[own] for own, place in enumerate(found)),
        "same_picture": int((found == np.arange(20)).sum()),
        "rms_difference_from_own_picture": float(np.sqrt((difference**2).mean())),
        "wrong": {captions[own]: captions[place] for own, place in enumerate(found) if KINDS[place] != KINDS[own]},
        "steps": records[-1]["step"],
        "loss_of_last_records": float(np.mean([record["loss"] for record in records[-10:]])),
        "median_step_time_s": float(np.median([record["step_time_s"] for record in records])),
        "precision": config["training"]["mixed_precision_param"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Samples of 20 captions whose nearest picture is of the right kind.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the training")
    parser.add_argument("--folder", type=Path, default=Path("outputs/captioned_folder_benchmark"))
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args, flags = parser.parse_known_args()
    captions = draw_pictures(args.folder / "pictures")
    result = {
        "versions": provenance.versions("torch", "torchditan", "wordllama"),
        "git_commit": provenance.git_commit(),
        "hardware": provenance.hardware("cpu", 1),
        "threads": torch.get_num_threads(),
        "flags": flags,
        "runs": [measure(args.folder / "pictures", captions, seed=seed, flags=flags) for seed in args.seeds],
    }
    print(json.dumps(result["runs"], indent=1))
    if args.out is not None:
        write_file(args.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
