#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Images/s of the latent loader, compared with plain reads of the same bytes: `python benchmarks/latent_loader.py`.

Notable:
- the real writer writes random latents to a temporary folder; one pass then reads them into the page cache;
- "plain" only copies the same rows in the same order from memory maps into one array per batch;
- "shards" is only `LatentShards.read`. "stream" is the training stream with labels and positions, in this process or in
  loader workers, with or without the random numbers of a training batch (noise, timestep, label dropout);
- the variants run in turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.data_stream.latent_index import Encoding
from torchditan.data_stream.latent_shards import LatentShards, MappedFile
from torchditan.data_stream.loader import Collate, TrainingStream
from torchditan.data_stream.order import BatchPlan
from torchditan.datasets.latents import Latents
from torchditan.extras.latents.writer import LatentWriter, Shard
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

TARGET_IMAGES_PER_SECOND = 20_000
TARGET_RATIO = 0.7
"""Fraction of the speed of plain reads."""


@dataclass
class Row:
    variant: str
    images_per_second: float
    """Median of the rounds."""
    of_plain: float
    rounds: list[float]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Images/s of the latent loader, compared with plain reads of the same bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--latent_shape", type=int, nargs=3, default=[4, 32, 32], help="channels, height, width")
    add("--num_images", type=int, default=65536, help="latents to write, each with a mirrored copy")
    add("--shard_size", type=int, default=4096, help="latents per shard")
    add("--batch_size", type=int, default=256, help="latents per batch")
    add("--num_batches", type=int, default=200, help="batches per round")
    add("--rounds", type=int, default=5, help="turns of each variant; their median counts")
    add("--num_workers", type=int, nargs="+", default=[0, 2], help="loader workers of the stream")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--folder", type=Path, help="folder for temporary latents (default: the system's)")
    add("--out", type=Path, help="JSON to write, such as benchmarks/results/latent_loader_cpu.json (default: none)")
    return parser.parse_args(argv)


def write_latents(folder: Path, args: argparse.Namespace) -> LatentShards:
    encoding = Encoding(
        dataset="made up",
        split="train",
        num_source_images=args.num_images,
        source=None,
        image_size=(8 * args.latent_shape[1], 8 * args.latent_shape[2]),
        crop="center",
        autoencoder_name="made up",
        autoencoder_path=None,
        downsampling=8,
        fingerprint=None,
        image_channels=3,
        autoencoder_dtype=None,
        latent_shape=tuple(args.latent_shape),
        dtype="bf16",
        flipped=True,
        posterior=False,
        shard_size=args.shard_size,
        class_names=tuple(f"class {label}" for label in range(1000)),
        published_shift=None,
        published_scale=None,
    )
    writer = LatentWriter(folder, encoding)
    writer.open()
    for number in writer.missing():
        start = number * args.shard_size
        index = torch.arange(start, min(start + args.shard_size, args.num_images))
        latents = torch.randn(len(index), *args.latent_shape, dtype=torch.bfloat16)
        tensors = {"latents": latents, "latents_flipped": latents.flip(-1), "labels": index % 1000, "index": index}
        writer.write(number, Shard(tensors, ()))
    writer.finalise()
    return LatentShards.open(folder)


def plain_reads(shards: LatentShards) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function that only copies rows, without batches, labels or formats."""
    files = [MappedFile(shards.path / shard.file) for shard in shards.index.shards]
    rows = [[file.rows("latents") for file in files], [file.rows("latents_flipped") for file in files]]
    shard_size = shards.index.shard_size

    def read(indices: np.ndarray, flips: np.ndarray) -> np.ndarray:
        batch = np.empty((len(indices), rows[0][0].shape[1]), dtype=np.uint8)
        for position, (index, flip) in enumerate(zip(indices.tolist(), flips.tolist(), strict=True)):
            batch[position] = rows[flip][index // shard_size][index % shard_size]
        return batch

    return read


def open_stream(dataset: Latents, args: argparse.Namespace, *, num_workers: int, draws: bool) -> TrainingStream:
    stream = TrainingStream(
        dataset,
        plan=BatchPlan(batch_size=args.batch_size, global_batch_size=args.batch_size),
        seed=0,
        num_classes=1000,
        horizontal_flip=None,
        corrupt_images="error",
        num_workers=num_workers,
        pin_memory=False,
    )
    if not draws:
        stream.loader_options["collate_fn"] = Collate(labelled=True)
    return stream


class Recorder(Latents):
    """Latents that record which rows the stream requested."""

    def __init__(self, shards: LatentShards, **options: Any) -> None:
        super().__init__(shards, **options)
        self.asked: list[tuple[np.ndarray, np.ndarray]] = []

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> dict[str, torch.Tensor]:
        self.asked.append((indices, flips))
        return super().read_batch(indices, flips)


def endless(stream: TrainingStream) -> Iterator[object]:
    """The stream's batches, after the loader and its workers have started."""
    batches = iter(stream.batches(0))
    next(batches)
    return batches


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(shards: LatentShards, args: argparse.Namespace) -> list[Row]:
    index = shards.index
    dataset = Latents(shards, name="latents", shift=index.shift, scale=index.scale)
    recorder = Recorder(shards, name="latents", shift=index.shift, scale=index.scale)
    exhaust(islice(open_stream(recorder, args, num_workers=0, draws=False).batches(0), args.num_batches))
    batches = recorder.asked
    plain = plain_reads(shards)
    for start in range(0, len(shards), args.batch_size):  # into the page cache and into this process's page tables
        rows = np.arange(start, min(start + args.batch_size, len(shards)))
        for flip in (False, True):
            plain(rows, np.full(len(rows), flip))
            shards.read(rows, np.full(len(rows), flip))

    def each(read: Callable[..., object]) -> Callable[[], None]:
        def work() -> None:
            for indices, flips in batches:
                read(indices, flips)

        return work

    variants = {"plain": each(plain), "shards": each(shards.read), "shards and labels": each(dataset.read_batch)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    streams = {
        f"stream, {workers} workers, {'with' if draws else 'without'} random numbers": (workers, draws)
        for workers in args.num_workers
        for draws in (False, True)
    }
    for _ in range(args.rounds):
        for name, work in variants.items():
            times[name].append(seconds(work))
        for name, (workers, draws) in streams.items():
            loader = endless(open_stream(dataset, args, num_workers=workers, draws=draws))
            exhaust(islice(loader, 8 * workers))  # batches that the workers prepared during other measurements
            times.setdefault(name, []).append(seconds(partial(exhaust, islice(loader, args.num_batches))))
            del loader
    images = args.num_batches * args.batch_size
    rates = {name: [images / value for value in values] for name, values in times.items()}
    plain_rate = statistics.median(rates["plain"])
    return [
        Row(name, statistics.median(values), statistics.median(values) / plain_rate, values)
        for name, values in rates.items()
    ]


def exhaust(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


def main() -> None:
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        shards = write_latents(Path(folder), args)
        start = time.perf_counter()
        LatentShards.open(folder)
        opened = time.perf_counter() - start
        rows = measure(shards, args)
    print(f"{args.num_images} latents of {args.latent_shape} bf16, batch {args.batch_size}; opened in {opened:.3f} s")
    for row in rows:
        print(f"{row.variant:<45} {row.images_per_second:>12,.0f} images/s  {row.of_plain:5.2f} of plain")
    print(f"targets: {TARGET_IMAGES_PER_SECOND:,} images/s, {TARGET_RATIO} of plain; load before the start: {load:.2f}")
    if args.out is not None:
        result = {
            "settings": {key: value for key, value in vars(args).items() if key not in ("out", "folder")},
            "target_images_per_second": TARGET_IMAGES_PER_SECOND,
            "target_of_plain": TARGET_RATIO,
            "open_s": opened,
            "rows": [asdict(row) for row in rows],
            "load_before": load,
            "versions": provenance.versions("torch", "numpy"),
            "git_commit": provenance.git_commit(),
            "hardware": provenance.hardware("cpu", 1),
        }
        write_file(args.out, (json.dumps(result, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
