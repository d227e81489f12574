#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Images/s of the training stream, from latents or JPEGs: `python benchmarks/loader_rate.py jpegs`.

Notable:
- latents: the real writer writes random latents to a temporary folder; one pass then reads them into the page cache.
  "plain" only copies the same rows in the same order from memory maps into one array per batch;
- JPEGs: random textures with the spectrum of photographs, 500 x 400 pixels and 116 KB on average (ImageNet has 110 KB),
  resized and cropped to 256 x 256. "plain" only decodes, resizes and crops with Pillow;
- "stream" is the training stream with labels and positions, in this process or in loader workers, with or without the
  random numbers of a training batch (noise, timestep, label dropout);
- the variants run in turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import io
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
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.config import options
from torchditan.data_stream.datasets import ImageDataset
from torchditan.data_stream.latent_index import Encoding
from torchditan.data_stream.latent_shards import LatentShards, MappedFile
from torchditan.data_stream.loader import Collate, TrainingStream
from torchditan.data_stream.order import BatchPlan
from torchditan.datasets import folder as image_folder
from torchditan.datasets.latents import Latents
from torchditan.extras.latents.writer import LatentWriter, Shard
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

NUM_WORKERS = 8
TARGETS = {"latents": 2_000, "jpegs": 500}
"""Images/s of `NUM_WORKERS` workers."""
DEFAULTS = {"latents": {"num_images": 65536, "batch_size": 256, "num_batches": 200}}
DEFAULTS["jpegs"] = {"num_images": 64, "batch_size": 32, "num_batches": 8}
IMAGE_SIZE = 256

Read = Callable[[np.ndarray, np.ndarray], object]
"""Reads a batch, given the indices of its images and whether each is mirrored."""


@dataclass
class Row:
    variant: str
    images_per_second: float
    """Median of the rounds."""
    of_plain: float
    rounds: list[float]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Images/s of the training stream, compared with plain reads of the same latents or JPEGs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=list(TARGETS), help="what is stored")
    add("--latent_shape", type=int, nargs=3, default=[4, 32, 32], help="channels, height, width, also of the noise")
    add("--num_images", type=int, help="images to write (default: 65536 latents, each with a mirrored copy; 64 JPEGs)")
    add("--shard_size", type=int, default=4096, help="latents per shard")
    add("--batch_size", type=int, help="images per batch (default: 256 latents, 32 JPEGs)")
    add("--num_batches", type=int, help="batches per round (default: 200 of latents, 8 of JPEGs)")
    add("--rounds", type=int, default=5, help="turns of each variant; their median counts")
    add("--num_workers", type=int, nargs="+", default=[0, 2], help="loader workers of the stream")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--folder", type=Path, help="folder for temporary images (default: the system's)")
    add("--out", type=Path, help="JSON to write, such as benchmarks/results/loader_rate_cpu.json (default: none)")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.what].items():
        setattr(args, name, getattr(args, name) or value)
    return args


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


def plain_reads(shards: LatentShards) -> Read:
    """Only copies rows, without batches, labels or formats."""
    files = [MappedFile(shards.path / shard.file) for shard in shards.index.shards]
    rows = [[file.rows("latents") for file in files], [file.rows("latents_flipped") for file in files]]
    shard_size = shards.index.shard_size

    def read(indices: np.ndarray, flips: np.ndarray) -> np.ndarray:
        batch = np.empty((len(indices), rows[0][0].shape[1]), dtype=np.uint8)
        for position, (index, flip) in enumerate(zip(indices.tolist(), flips.tolist(), strict=True)):
            batch[position] = rows[flip][index // shard_size][index % shard_size]
        return batch

    return read


def write_jpegs(folder: Path, args: argparse.Namespace) -> ImageDataset:
    for number in range(args.num_images):
        place = folder / "train" / f"class {number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        draw_texture(np.random.default_rng(number)).save(place / f"{number}.jpg", quality=90)
    size = {"image_size": [IMAGE_SIZE, IMAGE_SIZE]}
    return image_folder.build(options.Dataset("folder", root_dir=str(folder), **size), split="train")


def draw_texture(rng: np.random.Generator, *, height: int = 400, width: int = 500) -> Image.Image:
    """Noise whose amplitude falls as 1 / frequency, as in photographs, in colours that are mostly grey."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))  # (H, W / 2 + 1)
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(rng.standard_normal((4, height, width))) / frequency
    texture = np.fft.irfft2(spectrum, s=(height, width))
    pixels = texture[0] + 0.35 * texture[1:]  # (3, H, W)
    pixels = 128 + 43 * pixels / pixels.std()
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def decode_plainly(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        scale = IMAGE_SIZE / min(image.size)
        resized = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (resized.width - IMAGE_SIZE) // 2, (resized.height - IMAGE_SIZE) // 2
    return np.asarray(resized.crop((left, top, left + IMAGE_SIZE, top + IMAGE_SIZE)))


def open_stream(dataset: ImageDataset, args: argparse.Namespace, *, num_workers: int, draws: bool) -> TrainingStream:
    stream = TrainingStream(
        dataset,
        plan=BatchPlan(batch_size=args.batch_size, global_batch_size=args.batch_size),
        seed=0,
        num_classes=1000,
        horizontal_flip=None,
        corrupt_images="error",
        num_workers=num_workers,
        pin_memory=False,
        sample_shape=tuple(args.latent_shape),
    )
    if not draws:
        stream.loader_options["collate_fn"] = Collate(labelled=True)
    return stream


def endless(stream: TrainingStream) -> Iterator[object]:
    """The stream's batches, after the loader and its workers have started."""
    batches = iter(stream.batches(0))
    next(batches)
    return batches


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_latents(shards: LatentShards, args: argparse.Namespace) -> list[Row]:
    dataset = Latents(shards, name="latents", shift=shards.index.shift, scale=shards.index.scale)
    plain = plain_reads(shards)
    for start in range(0, len(shards), args.batch_size):  # into the page cache and into this process's page tables
        rows = np.arange(start, min(start + args.batch_size, len(shards)))
        for flip in (False, True):
            plain(rows, np.full(len(rows), flip))
            shards.read(rows, np.full(len(rows), flip))
    return measure(dataset, {"plain": plain, "shards": shards.read, "shards and labels": dataset.read_batch}, args)


def measure_jpegs(dataset: Any, args: argparse.Namespace) -> list[Row]:
    contents = [dataset.content_of(index) for index in range(len(dataset))]
    args.mean_bytes = round(statistics.mean(map(len, contents)))
    reads: dict[str, Read] = {
        "plain": lambda indices, flips: [decode_plainly(contents[index]) for index in indices],
        "samples": lambda indices, flips: [dataset[int(index)] for index in indices],
    }
    return measure(dataset, reads, args)


def measure(dataset: ImageDataset, reads: dict[str, Read], args: argparse.Namespace) -> list[Row]:
    """The rates of `reads`, whose first is "plain", and of the streams. All read the same images in the same order."""
    stream = open_stream(dataset, args, num_workers=0, draws=False)
    positions = list(islice(stream.plan.positions(0), args.num_batches))
    batches = [(stream.stream.locate(batch), stream.stream.are_flipped(batch)) for batch in positions]

    def read_all(read: Read) -> None:
        for indices, flips in batches:
            read(indices, flips)

    times: dict[str, list[float]] = {name: [] for name in reads}
    streams = {
        f"stream, {workers} workers, {'with' if draws else 'without'} random numbers": (workers, draws)
        for workers in args.num_workers
        for draws in (False, True)
    }
    for _ in range(args.rounds):
        for name, read in reads.items():
            times[name].append(seconds(partial(read_all, read)))
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
        if args.what == "latents":
            rows = measure_latents(write_latents(Path(folder), args), args)
        else:
            rows = measure_jpegs(write_jpegs(Path(folder), args), args)
    print(f"{args.num_images} {args.what}, batch {args.batch_size}, random numbers of {args.latent_shape}")
    for row in rows:
        print(f"{row.variant:<45} {row.images_per_second:>12,.0f} images/s  {row.of_plain:5.2f} of plain")
    one = next((row.images_per_second for row in rows if row.variant == "stream, 0 workers, with random numbers"), None)
    of_all = None if one is None else NUM_WORKERS * one
    if of_all is not None:
        print(f"{NUM_WORKERS} workers, computed: {of_all:,.0f} images/s (target {TARGETS[args.what]:,})")
    print(f"load before the start: {load:.2f}")
    if args.out is not None:
        result = {
            "settings": {key: value for key, value in vars(args).items() if key not in ("out", "folder")},
            "rows": [asdict(row) for row in rows],
            f"images_per_second_of_{NUM_WORKERS}_workers_computed": of_all,
            f"target_of_{NUM_WORKERS}_workers": TARGETS[args.what],
            "load_before": load,
            "versions": provenance.versions("torch", "numpy", "pillow"),
            "git_commit": provenance.git_commit(),
            "hardware": provenance.hardware("cpu", 1),
        }
        write_file(args.out, (json.dumps(result, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
