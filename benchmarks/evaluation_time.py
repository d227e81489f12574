#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time and memory of the evaluator's figures from given features: `python benchmarks/evaluation_time.py --threads 2`.

Notable:
- made-up features, 50,000 x 2,048 float32 of generated and of real images, stay in memory (0.76 GiB);
- logits and spatial features are seen once, in batches, as an extractor gives them; making them up is not timed;
- peak memory is that of the whole process, imports and features included;
- `--extractors` measures milliseconds per image instead, with random weights: their values cost no time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.evaluation.distances import (
    FeatureStatistics,
    InceptionScore,
    frechet_distance,
    gaussian_of,
    kernel_distance,
)
from torchditan.evaluation.efficientnet_lite import EfficientNetLite0
from torchditan.evaluation.inception import NUM_CLASSES, NUM_SPATIAL_FEATURES, Inception2015
from torchditan.evaluation.neighbours import check_copies, compare_neighbourhoods

BATCH = 500


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time and memory of the evaluator's figures, features given.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num_images", type=int, default=50_000, help="generated, and as many real")
    parser.add_argument("--num_features", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["distances", "neighbours", "copies"], help="one part; all without it")
    parser.add_argument("--extractors", action="store_true", help="time per image of both extractors instead")
    parser.add_argument("--image_size", type=int, default=32, help="of the images that the extractors see")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args(argv)


def made_up_features(count: int, dimensions: int, *, seed: int) -> Tensor:
    """(count, dimensions) float32, positive and correlated, as pooled features are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(64, dimensions, generator=torch.Generator().manual_seed(99)) / 8
    features = torch.empty(count, dimensions)
    for rows in features.split(BATCH):
        latent = torch.randn(len(rows), 64, generator=generator)
        rows.copy_((latent @ mixing + torch.randn(rows.shape, generator=generator) / 2 + seed / 50).relu_())
    return features


def made_up_batches(count: int, dimensions: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices and values of batches."""
    generator = torch.Generator().manual_seed(7)
    for indices in torch.arange(count).split(BATCH):
        yield indices, torch.randn(len(indices), dimensions, generator=generator)


def timed(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def time_distances(generated: Tensor, real: Tensor) -> dict[str, float]:
    gaussians = []
    seconds = {"statistics of both sets": timed(lambda: gaussians.extend(map(gaussian_of, (generated, real))))}
    seconds["Fréchet distance"] = timed(lambda: frechet_distance(*gaussians))
    subset_size = min(1000, len(generated))
    seconds["KID"] = timed(lambda: kernel_distance(generated, real, subset_size=subset_size))
    score = InceptionScore(len(generated), num_classes=NUM_CLASSES)
    batches = made_up_batches(len(generated), NUM_CLASSES)
    seconds["Inception Score"] = sum(timed(lambda i=i, x=x: score.update(x, i)) for i, x in batches)
    spatial = FeatureStatistics(NUM_SPATIAL_FEATURES)
    batches = made_up_batches(len(generated), NUM_SPATIAL_FEATURES)
    seconds["spatial statistics of one set"] = sum(timed(lambda x=x: spatial.update(x)) for _, x in batches)
    seconds["sFID"] = timed(lambda: frechet_distance(spatial.gaussian(), spatial.gaussian()))
    return seconds | {"distances": sum(seconds.values())}


def time_features(args: argparse.Namespace) -> dict[str, float]:
    generated, real = (made_up_features(args.num_images, args.num_features, seed=seed) for seed in (1, 2))
    seconds: dict[str, float] = {}
    if args.only in (None, "distances"):
        seconds |= time_distances(generated, real)
    if args.only in (None, "neighbours"):
        seconds["precision, recall, density, coverage"] = timed(lambda: compare_neighbourhoods(generated, real))
    if args.only in (None, "copies"):
        held_out = real[-min(1000, len(real) // 10) :]
        seconds["copy check"] = timed(lambda: check_copies(generated, held_out, real[: -len(held_out)]))
    return seconds


def time_extractors(image_size: int) -> dict[str, float]:
    """Milliseconds per image in batches of 16: the median of 5."""
    images = torch.randint(0, 256, (16, 3, image_size, image_size), dtype=torch.uint8)
    result = {}
    for model in (Inception2015(), EfficientNetLite0()):
        model(images)
        times = sorted(timed(lambda model=model: model(images)) for _ in range(5))
        result[type(model).__name__] = 1000 * times[2] / len(images)
    return result


def main() -> None:
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    unit = "ms per image" if args.extractors else "seconds"
    figures = time_extractors(args.image_size) if args.extractors else time_features(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    for name, value in figures.items():
        print(f"{name:40} {value:8.2f} {unit}")
    print(f"peak memory {peak:.2f} GiB, {args.threads} threads, load at the start {load:.1f}")
    if args.out is not None:
        result = {"command": sys.argv, unit: figures, "peak_memory_gib": peak, "load_at_start": load}
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
