# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The work of `torchditan encode`: the splits of a dataset become folders of latents, are measured, or are verified."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal, cast

import torch

from torchditan.config.options import Config, cache_folder
from torchditan.data_stream.datasets import CaptionSource, ImageDataset, read_image
from torchditan.data_stream.latent_index import LatentIndex, standardizing
from torchditan.data_stream.latent_shards import LatentShards
from torchditan.datasets import build_dataset, build_stored_latents
from torchditan.datasets.options import Split
from torchditan.datasets.splits import SPLITS
from torchditan.distributed.process_group import Rank, check_devices
from torchditan.errors import ConfigError, option_error, printable, some
from torchditan.extras.autoencoders import Autoencoder, open_autoencoder
from torchditan.extras.latents.encoding import Moments, as_stored, denormalize, describe_encoding, encode
from torchditan.extras.latents.verifying import verify
from torchditan.extras.latents.writer import LatentWriter
from torchditan.job.check_files import MOST_NAMED, refuse_unreadable
from torchditan.run.progress import report_progress
from torchditan.sampling.reconstruction import SSIM_WINDOW, psnr, ssim


def encode_all(arguments: argparse.Namespace, config: Config, rank: Rank) -> None:
    """Encode the splits that are asked for, or preview the first."""
    _refuse_options(arguments, config)
    check_devices(rank)
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    is_encoded = arguments.latents is not None
    autoencoder: Autoencoder | None = None
    for split in cast(list[Split], (arguments.split or "train,validation").split(",")):
        is_asked_for = arguments.split is not None
        dataset = open_dataset(config, split=split, is_asked_for=is_asked_for, is_encoded=is_encoded)
        if dataset is None:
            continue
        if isinstance(dataset, CaptionSource) and not dataset.class_names and arguments.preview is None:
            right = "has captions, which shards of latents do not store; train on it, which caches its latents"
            raise option_error("dataset.dataset_name", dataset.name, right)
        if autoencoder is None:
            channels = None if is_encoded else dataset.sample_shape[0]
            with report_progress("opening the autoencoder"):
                autoencoder = open_autoencoder(config.autoencoder, device=rank.device, image_channels=channels)
        flip = dataset.horizontal_flip if config.dataset.horizontal_flip is None else config.dataset.horizontal_flip
        encoding = describe_encoding(
            dataset,
            autoencoder,
            split=split,
            crop=config.dataset.crop,
            dtype=arguments.dtype,
            flipped=flip and not arguments.no_flip and split == "train",  # held-out images are never mirrored
            posterior=arguments.posterior,
            shard_size=arguments.shard_size,
            shard_format=arguments.format,
            images=arguments.images,
            is_encoded=is_encoded,
        )
        if arguments.preview is not None:
            if rank.rank == 0:
                options = {"num_images": arguments.preview, "batch_size": arguments.batch_size}
                print(preview(dataset, autoencoder, corrupt_images=config.dataset.corrupt_images, **options))
            return
        moments: Moments | None = None
        if is_encoded:
            moments = as_stored if arguments.latents == "mean" else denormalize(autoencoder)
        writer = LatentWriter(arguments.out / split, encoding)
        encode_split(dataset, autoencoder, writer, config, rank=rank, batch_size=arguments.batch_size, moments=moments)
        if rank.rank == 0 and split == "train":
            print("".join(f"  {printable(line)}\n" for line in dataset.reading), end="")


def _refuse_options(arguments: argparse.Namespace, config: Config) -> None:
    if config.autoencoder.name is None:
        raise option_error("autoencoder.name", None, "must name the autoencoder that encodes the images, such as haar")
    for name in ("online", "sample_posterior"):
        if getattr(config.autoencoder, name):
            raise option_error(f"autoencoder.{name}", True, "applies to training only; leave it out here")
    if arguments.latents is not None and arguments.images:
        raise option_error("--images", True, "--latents reads shards without images; leave it out")
    if arguments.latents is not None and arguments.posterior:
        raise option_error("--posterior", True, "--latents reads means without a variance; leave it out")
    if arguments.latents is not None and config.dataset.horizontal_flip:
        right = "the latents of mirrored images are not in the shards; leave it out"
        raise option_error("dataset.horizontal_flip", True, right)


def encode_split(
    dataset: ImageDataset,
    autoencoder: Autoencoder,
    writer: LatentWriter,
    config: Config,
    *,
    rank: Rank,
    batch_size: int,
    moments: Moments | None,
) -> None:
    """Do this rank's part of a folder, and print the outcome. Rank 0 first checks the files."""
    skips_corrupt = config.dataset.corrupt_images == "skip"
    writer.open()
    missing = min(len(writer.missing()) * writer.encoding.shard_size, writer.encoding.num_source_images)
    if missing and rank.rank == 0 and not skips_corrupt:
        refuse_unreadable(dataset, cache_folder=cache_folder(config))
    encoded, start = 0, time.perf_counter()  # by this rank, in this run

    def count(num_images: int) -> None:
        nonlocal encoded
        encoded += num_images
        advance(num_images * rank.world_size)  # ranks do not communicate: the others are assumed to be as fast

    try:
        with report_progress(f"encoding {writer.folder}", total=missing, unit="images") as advance:
            index = encode(
                dataset,
                autoencoder,
                writer,
                rank=rank,
                batch_size=batch_size,
                num_workers=config.dataset.num_workers,
                report=count,
                moments=moments,
                skips_corrupt=skips_corrupt,
            )
    except ConfigError as error:
        if rank.rank != 0:  # rank 0 does not see errors of a single other rank, such as a full disk
            print(f"error: rank {rank.rank}: {error}", file=sys.stderr, flush=True)
        raise
    if index is not None:
        print(summary(writer.folder, index, encoded=encoded, seconds=time.perf_counter() - start))
        if skipped := [text for shard in index.shards for _, text in shard.skipped]:
            print(f"warning: left out: {some(skipped, most=MOST_NAMED)}", file=sys.stderr)
    elif rank.rank == 0:
        print(f"{writer.folder}: this rank is done; the last rank writes the index")


def summary(folder: Path, index: LatentIndex, *, encoded: int, seconds: float) -> str:
    shape = " x ".join(map(str, index.latent_shape))
    pairs = f"{', with mirrored ones' * index.flipped}{', with images' * index.images}"
    skipped = f", {index.num_skipped} unreadable images skipped (listed in index.json)" if index.num_skipped else ""
    size = sum(shard.bytes for shard in index.shards) / 1e6
    speed = f"; {encoded:,} images in {seconds:.1f} s, {encoded / seconds:,.1f} images/s" if encoded else ""
    return f"{folder}: complete, {index.num_images:,} latents of {shape}{pairs} in {size:,.1f} MB{skipped}{speed}"


def open_dataset(config: Config, *, split: Split, is_asked_for: bool, is_encoded: bool) -> ImageDataset | None:
    """One split, of images or of latents; None if the dataset lacks it and the user did not request it."""
    if config.dataset.dataset_name == "latents":
        raise option_error("dataset.dataset_name", "latents", "is already encoded; must be a dataset of images")
    if config.dataset.streaming:
        right = "cannot be encoded, because shards need numbered images; leave it out to download the dataset"
        raise option_error("dataset.streaming", True, right)
    build = build_stored_latents if is_encoded else build_dataset
    try:
        return build(config.dataset, split=split, cache_folder=cache_folder(config))
    except ConfigError as error:
        if split == "train" or is_asked_for:
            raise
        print(f"no validation latents: {error}", file=sys.stderr)
        return None


def preview(
    dataset: ImageDataset,
    autoencoder: Autoencoder,
    *,
    num_images: int,
    batch_size: int,
    corrupt_images: Literal["error", "skip"],
) -> str:
    """PSNR and SSIM of decoded images, spread evenly over a dataset, and the normalization of their latents."""

    ones = torch.ones(autoencoder.latent_channels)
    autoencoder.set_normalization(shift=0 * ones, scale=ones)  # latents as the encoder gives them
    num_images = min(num_images, len(dataset))
    indices = torch.arange(num_images) * len(dataset) // num_images
    parts, psnrs, ssims = [], [], []
    with report_progress("encoding and decoding", total=num_images, unit="images") as advance:
        for batch in indices.split(batch_size):
            items = [read_image(dataset, i, num_classes=0, corrupt_images=corrupt_images) for i in batch.tolist()]
            images = torch.stack([item["sample"] for item in items])  # (B, C, H, W)
            parts.append(autoencoder.encode(images).cpu())
            decoded = autoencoder.decode(parts[-1]).cpu()
            psnrs.append(psnr(decoded, images))
            if min(images.shape[2:]) >= SSIM_WINDOW:
                ssims.append(ssim(decoded, images))
            advance(len(batch))
    latents = torch.cat(parts).double()  # (N, C, h, w)
    shift, scale = standardizing(latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3), correction=0).tolist())
    image_shape, latent_shape = (" x ".join(map(str, shape)) for shape in (dataset.sample_shape, latents.shape[1:]))
    similarity = f"PSNR {torch.cat(psnrs).mean():.2f} dB" + (f", SSIM {torch.cat(ssims).mean():.4f}" if ssims else "")
    lines = [f"{num_images:,} images of {dataset.name}, {image_shape} -> {latent_shape}: {similarity}"]
    for name, values in (("shift", shift), ("scale", scale)):
        lines.append(f"autoencoder.{name} = {[float(f'{value:.6g}') for value in values]}")
    return "\n".join(lines)


def verify_all(out: Path) -> None:
    """Print one line for every problem; exit with code 2 if there are any."""

    folders = [out / split for split in SPLITS if (out / split).is_dir()] or [out]
    with report_progress(f"verifying {out}"):
        problems = [problem for folder in folders for problem in verify(folder)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        sys.exit(2)
    for folder in folders:
        index = LatentShards.open(folder).index
        print(f"{folder}: {index.num_images:,} latents in {len(index.shards)} shards, all as they were encoded")
