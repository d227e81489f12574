#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Do FD-EffNetLite0 and KID-EffNetLite0 rise with damage? `python benchmarks/feature_distances.py`.

Notable:
- training images are split at random into references and samples, N each, anew for every seed;
- samples are blurred, get noise, or lose classes (the rest drawn again to N images); level 0 is undamaged;
- the floor is the distance of held-out images to the references, with as many undamaged samples next to it: both are
  biased by the same small N, so only their difference says how far held-out images are from training images.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.extras.evaluation.distances import frechet_distance, gaussian_of, polynomial_mmd
from torchditan.extras.evaluation.efficientnet_lite import EfficientNetLite0, load_efficientnet_lite0

BLUR = (0.5, 1.0, 2.0)
"""Standard deviation of the Gaussian, in pixels."""
NOISE = (8, 16, 32)
"""Standard deviation, of 255."""
DROPPED = (1, 3, 5)
"""Classes left out, of 7."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="FD-EffNetLite0 and KID-EffNetLite0 of damaged images.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num_images", type=int, default=1300, help="references, and samples; more than 1280")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder that keeps features, to continue a stopped run")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args(argv)


class Extractor:
    """Features of images by a name, computed once where there is a cache."""

    def __init__(self, cache: Path | None) -> None:
        self.model: EfficientNetLite0 = load_efficientnet_lite0()
        self.cache = cache

    def __call__(self, images: Tensor, name: str) -> Tensor:
        path = None if self.cache is None else self.cache / f"{name}.pt"
        if path is not None and path.exists():
            stored: Tensor = torch.load(path)
            return stored
        features = torch.cat([self.model(batch) for batch in images.split(16)])
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(features, path)
        return features


def blurred(images: Tensor, sigma: float) -> Tensor:
    offsets = torch.arange(-8, 9).float()
    kernel = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, 1, -1)
    x = F.pad(images.float(), (8, 8, 8, 8), mode="reflect")
    x = F.conv2d(F.conv2d(x, kernel, groups=3), kernel.transpose(2, 3), groups=3)
    return x.round().clamp(0, 255).to(torch.uint8)


def noisy(images: Tensor, std: float, *, seed: int) -> Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return (images + std * noise).round().clamp(0, 255).to(torch.uint8)


def distances(samples: Tensor, references: Tensor) -> tuple[float, float]:
    """FD, and KID over all images at once."""
    return frechet_distance(gaussian_of(samples), gaussian_of(references)), polynomial_mmd(samples, references)


def pixels_and_labels(split: str) -> tuple[Tensor, np.ndarray, list[str]]:
    dataset = build_dataset(Dataset(dataset_name="earth"), split=split)  # type: ignore[arg-type]
    pixels = torch.from_numpy(np.ascontiguousarray(dataset.pixels)).permute(0, 3, 1, 2)  # type: ignore[attr-defined]
    return pixels, dataset.class_labels, dataset.class_names  # type: ignore[attr-defined]


def measure(*, num_images: int, seed: int, extract: Extractor) -> dict[str, tuple[float, float]]:
    """(FD, KID) of each kind and level of damage."""
    pixels, labels, class_names = pixels_and_labels("train")
    held_out = extract(pixels_and_labels("validation")[0], "earth-validation")
    features = extract(pixels, "earth-train")
    random = np.random.default_rng(seed)
    order = random.permutation(len(pixels))
    references, rest = features[order[:num_images]], order[num_images:]
    chosen = rest[:num_images]
    images = pixels[chosen]

    rows = {"undamaged": distances(features[chosen], references)}
    for sigma in BLUR:
        damaged = extract(blurred(images, sigma), f"earth-{num_images}-{seed}-blur-{sigma}")
        rows[f"blur {sigma} px"] = distances(damaged, references)
    for std in NOISE:
        damaged = extract(noisy(images, std, seed=seed), f"earth-{num_images}-{seed}-noise-{std}")
        rows[f"noise {std}/255"] = distances(damaged, references)
    classes = random.permutation(len(class_names))
    for count in DROPPED:
        kept = rest[~np.isin(labels[rest], classes[:count])][:num_images]
        assert len(kept) == num_images, f"{len(kept)} images are left without {count} classes"
        rows[f"{count} of {len(class_names)} classes dropped"] = distances(features[kept], references)
    few = len(held_out)
    rows[f"{few} undamaged"] = distances(features[rest[-few:]], references)
    rows[f"{few} held-out"] = distances(held_out, references)
    return rows


def main() -> None:
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    extract = Extractor(args.cache)
    runs = [measure(num_images=args.num_images, seed=seed, extract=extract) for seed in range(args.seeds)]
    print(f"| earth: N = {args.num_images}, {args.seeds} seeds | FD-EffNetLite0 | KID-EffNetLite0 x 1000 |")
    print("|---|---|---|")
    results: dict[str, dict[str, list[float]]] = {}
    for row in runs[0]:
        fd, kid = ([run[row][i] for run in runs] for i in range(2))
        results[row] = {"FD-EffNetLite0": fd, "KID-EffNetLite0": kid}
        print(f"| {row} | {summary(fd)} | {summary([1000 * value for value in kid])} |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"command": sys.argv, "results": results}, indent=1) + "\n")


def summary(values: list[float]) -> str:
    spread = f" ± {stdev(values):.3g}" if len(values) > 1 else ""
    return f"{mean(values):.4g}{spread}"


if __name__ == "__main__":
    main()
