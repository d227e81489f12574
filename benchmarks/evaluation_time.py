#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time and memory of the evaluator's figures from given features: `python benchmarks/evaluation_time.py --threads 2`.

Notable:
- made-up features of generated and of real images stay in memory, as in an evaluation: 0.76 GiB of 2 x 50,000 x 2,048
  float32, and for the distances as much of spatial features, and 0.19 GiB of logits. Making them up is not timed;
- every figure has its halves, as in an evaluation;
- CPU seconds, of all threads, say more than seconds where other programs run;
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.extras.evaluation.distances import Gaussian, gaussian_of, inception_score, kernel_distance
from torchditan.extras.evaluation.efficientnet_lite import EfficientNetLite0
from torchditan.extras.evaluation.inception import NUM_CLASSES, NUM_SPATIAL_FEATURES, Inception2015
from torchditan.extras.evaluation.neighbours import compare_with_halves, nearest_distances, real_radii
from torchditan.extras.evaluation.quality import frechet_figure, with_halves

BATCH = 500
T = TypeVar("T")


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


def timed(compute: Callable[[], object]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


class Clock:
    """Seconds and CPU seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    def time(self, name: str, compute: Callable[[], T]) -> T:
        start, cpu_start = time.perf_counter(), time.process_time()
        result = compute()
        self.seconds[name] = (time.perf_counter() - start, time.process_time() - cpu_start)
        return result

    def add_sum(self, name: str, parts: list[str]) -> None:
        wall, cpu = zip(*(self.seconds[part] for part in parts), strict=True)
        self.seconds[name] = (sum(wall), sum(cpu))


def time_distances(clock: Clock, generated: Tensor, real: Tensor) -> None:
    count = len(generated)
    spatial, real_spatial = (made_up_features(count, NUM_SPATIAL_FEATURES, seed=seed) for seed in (3, 4))
    logits = made_up_features(count, NUM_CLASSES, seed=5)

    def reference() -> tuple[Gaussian, Gaussian]:
        return gaussian_of(real), gaussian_of(real_spatial)

    before = set(clock.seconds)
    pool_gaussian, spatial_gaussian = clock.time("statistics of the reference", reference)
    clock.time("FID", lambda: frechet_figure(generated, pool_gaussian))
    clock.time("sFID", lambda: frechet_figure(spatial, spatial_gaussian))
    clock.time("KID", lambda: with_halves(partial(kernel_distance, references=real), generated))
    clock.time("IS", lambda: with_halves(inception_score, logits))
    clock.add_sum("distances", [name for name in clock.seconds if name not in before])


def time_neighbours(clock: Clock, generated: Tensor, real: Tensor) -> None:
    radii = clock.time("radii of real images", lambda: real_radii(real))
    clock.time("radii of generated images, comparison", lambda: compare_with_halves(generated, real, radii=radii))
    clock.add_sum("precision to coverage", ["radii of real images", "radii of generated images, comparison"])


def time_features(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    generated, real = (made_up_features(args.num_images, args.num_features, seed=seed) for seed in (1, 2))
    clock = Clock()
    if args.only in (None, "distances"):
        time_distances(clock, generated, real)
    if args.only in (None, "neighbours"):
        time_neighbours(clock, generated, real)
    if args.only in (None, "copies"):
        clock.time("nearest training images", lambda: nearest_distances(generated, real))
    return clock.seconds


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
    result: dict[str, Any]
    if args.extractors:
        result = {"ms per image": time_extractors(args.image_size)}
    else:
        seconds = time_features(args)
        result = {
            "seconds": {name: wall for name, (wall, _) in seconds.items()},
            "CPU seconds": {name: cpu for name, (_, cpu) in seconds.items()},
        }
    for name in next(iter(result.values())):
        print(f"{name:40}" + "".join(f"{values[name]:10.2f} {unit}" for unit, values in result.items()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB, {args.threads} threads, load at the start {load:.1f}")
    if args.out is not None:
        result |= {"command": sys.argv, "peak_memory_gib": peak, "load_at_start": load}
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
