# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encode a dataset into latents once, in OUT/train and OUT/validation, to train with --dataset.dataset_name latents.

torchditan encode latents/earth --dataset.dataset_name earth --autoencoder.name haar --preview 64
torchditan encode latents/earth --dataset.dataset_name earth --autoencoder.name haar
torchrun --nproc_per_node=8 -m torchditan encode /data/latents --dataset.dataset_name imagenet \\
    --dataset.root_dir /data/imagenet --dataset.image_size 256 --dataset.crop adm --autoencoder.name sd-vae
torchditan encode /data/latents --convert imagenet_ci8x8.safetensors
torchditan encode /data/latents --latents mean --dataset.dataset_name webdataset \\
    --dataset.root_dir 'shards/{000..099}.tar' --autoencoder.name sd-vae
torchditan encode /data/latents --verify

You can stop it at any time. Run the same command again to continue; the result has the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchditan.config.options import Config
    from torchditan.data_stream.datasets import ImageDataset
    from torchditan.data_stream.latent_index import LatentIndex
    from torchditan.distributed.process_group import Rank
    from torchditan.extras.autoencoders import Autoencoder
    from torchditan.extras.latents.writer import LatentWriter

SPLITS = ("train", "validation")


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Arguments of this command, and the configuration from the `--dataset.*` and `--autoencoder.*` flags."""
    from torchditan.config.command_line import ScriptParser, count
    from torchditan.config.loader import override
    from torchditan.config.options import Config
    from torchditan.errors import ConfigError, option_error

    parser = ScriptParser(__doc__, options=("dataset", "autoencoder"))
    parser.add_argument("out", type=Path, help="folder to write; the first argument")
    parser.add_argument("--split", help="train, validation or both: train,validation (default: what the dataset has)")
    parser.add_argument(
        "--dtype", choices=("bf16", "int8"), default="bf16", help="precision of the stored latents (default: bf16)"
    )
    parser.add_argument("--no_flip", action="store_true", help="do not store latents of the mirrored training images")
    parser.add_argument("--posterior", action="store_true", help="also store the log-variance")
    parser.add_argument("--batch_size", type=count, default=64, help="images in one forward pass (default: 64)")
    parser.add_argument("--shard_size", type=count, default=4096, help="images per shard (default: 4096)")
    parser.add_argument(
        "--format",
        choices=("safetensors", "webdataset"),
        default="safetensors",
        help="one file per shard, or a tar with a safetensors file per image (default: safetensors)",
    )
    parser.add_argument("--convert", type=Path, metavar="FILE", help="convert the public ImageNet file to shards")
    parser.add_argument(
        "--latents",
        choices=("mean", "normalized"),
        help="the tar shards hold latents of the autoencoder (.npy or .safetensors) instead of images: its mean, or "
        "the mean after its normalization, such as 0.18215 z",
    )
    parser.add_argument("--verify", action="store_true", help="read all of OUT and report every problem")
    parser.add_argument(
        "--preview",
        type=count,
        metavar="N",
        help="write nothing: print PSNR and SSIM of N decoded images, and the shift and scale of their latents",
    )
    if argv[:1] and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise ConfigError(
            "OUT, the folder to write, must come first: torchditan encode OUT --dataset.dataset_name NAME"
        )
    arguments, flags = parser.parse(argv)
    splits = (arguments.split or "train,validation").split(",")
    if not set(splits) <= set(SPLITS):
        raise option_error("--split", arguments.split, "must be train, validation or train,validation")
    if arguments.preview and (arguments.convert or arguments.latents):
        raise option_error("--preview", arguments.preview, "encodes images; leave it out with --convert and --latents")
    return arguments, override(Config(), flags, sections=("dataset", "autoencoder"))


def run_split(
    writer: LatentWriter,
    work: Callable[..., LatentIndex | None],
    *,
    rank: Rank,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Do this rank's part of a folder with `work(report=...)`, and print the outcome. Rank 0 first calls `check`."""
    from torchditan.errors import ConfigError, some
    from torchditan.job.check_files import MOST_NAMED
    from torchditan.run.progress import report_progress

    writer.open()
    missing = min(len(writer.missing()) * writer.encoding.shard_size, writer.encoding.num_source_images)
    if missing and rank.rank == 0:
        check()
    encoded, start = 0, time.perf_counter()  # by this rank, in this run

    def count(num_images: int) -> None:
        nonlocal encoded
        encoded += num_images
        advance(num_images * rank.world_size)  # ranks do not communicate: the others are assumed to be as fast

    try:
        with report_progress(f"encoding {writer.folder}", total=missing, unit="images") as advance:
            index = work(report=count)
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
    pairs = ", with mirrored ones" if index.flipped else ""
    skipped = f", {index.num_skipped} unreadable images skipped (listed in index.json)" if index.num_skipped else ""
    size = sum(shard.bytes for shard in index.shards) / 1e6
    speed = f"; {encoded:,} images in {seconds:.1f} s, {encoded / seconds:,.1f} images/s" if encoded else ""
    return f"{folder}: complete, {index.num_images:,} latents of {shape}{pairs} in {size:,.1f} MB{skipped}{speed}"


def open_dataset(config: Config, *, split: Any, is_asked_for: bool, is_encoded: bool) -> ImageDataset | None:
    """One split, of images or of latents; None if the dataset lacks it and the user did not request it."""
    from torchditan.config.options import cache_folder
    from torchditan.datasets import build_dataset, build_stored_latents
    from torchditan.errors import ConfigError, option_error

    if config.dataset.dataset_name == "latents":
        right = "is already encoded; --convert converts the public ImageNet file to shards"
        raise option_error("dataset.dataset_name", config.dataset.dataset_name, right)
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
    import torch

    from torchditan.data_stream.datasets import read_image
    from torchditan.run.progress import report_progress
    from torchditan.sampling.reconstruction import SSIM_WINDOW, psnr, ssim

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
    shift, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3), correction=0)
    scale = torch.where(std > 1e-6, 1 / std, 1.0)  # (C,)
    image_shape, latent_shape = (" x ".join(map(str, shape)) for shape in (dataset.sample_shape, latents.shape[1:]))
    similarity = f"PSNR {torch.cat(psnrs).mean():.2f} dB" + (f", SSIM {torch.cat(ssims).mean():.4f}" if ssims else "")
    lines = [f"{num_images:,} images of {dataset.name}, {image_shape} -> {latent_shape}: {similarity}"]
    for name, values in (("shift", shift), ("scale", scale)):
        lines.append(f"autoencoder.{name} = {[float(f'{value:.6g}') for value in values.tolist()]}")
    return "\n".join(lines)


def encode_all(arguments: argparse.Namespace, config: Config, rank: Rank) -> None:
    from torchditan.config.options import cache_folder
    from torchditan.errors import option_error, printable
    from torchditan.extras.autoencoders import open_autoencoder
    from torchditan.extras.latents.encoding import as_stored, denormalize, describe_encoding, encode
    from torchditan.extras.latents.writer import LatentWriter
    from torchditan.job.check_files import refuse_unreadable
    from torchditan.run.progress import report_progress

    skips_corrupt = config.dataset.corrupt_images == "skip"
    if config.autoencoder.name is None:
        raise option_error("autoencoder.name", None, "must name the autoencoder that encodes the images, such as haar")
    if config.autoencoder.online or config.autoencoder.sample_posterior:
        name = "online" if config.autoencoder.online else "sample_posterior"
        raise option_error(f"autoencoder.{name}", True, "applies to training only; leave it out here")
    is_encoded = arguments.latents is not None
    if is_encoded and arguments.posterior:
        raise option_error("--posterior", True, "--latents reads means without a variance; leave it out")
    if is_encoded and config.dataset.horizontal_flip:
        right = "the latents of mirrored images are not in the shards; leave it out"
        raise option_error("dataset.horizontal_flip", True, right)
    autoencoder: Autoencoder | None = None
    for split in (arguments.split or "train,validation").split(","):
        is_asked_for = arguments.split is not None
        dataset = open_dataset(config, split=split, is_asked_for=is_asked_for, is_encoded=is_encoded)
        if dataset is None:
            continue
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
            is_encoded=is_encoded,
        )
        if arguments.preview is not None:
            if rank.rank == 0:
                text = preview(
                    dataset,
                    autoencoder,
                    num_images=arguments.preview,
                    batch_size=arguments.batch_size,
                    corrupt_images=config.dataset.corrupt_images,
                )
                print(text)
            return
        writer = LatentWriter(arguments.out / split, encoding)
        moments = None
        if is_encoded:
            moments = as_stored if arguments.latents == "mean" else denormalize(autoencoder)

        work = partial(
            encode,
            dataset,
            autoencoder,
            writer,
            rank=rank,
            batch_size=arguments.batch_size,
            num_workers=config.dataset.num_workers,
            moments=moments,
            skips_corrupt=skips_corrupt,
        )
        check = partial(refuse_unreadable, dataset, cache_folder=cache_folder(config))
        run_split(writer, work, rank=rank, **({} if skips_corrupt else {"check": check}))
        if rank.rank == 0 and split == "train":
            print("".join(f"  {printable(line)}\n" for line in dataset.reading), end="")


def convert_file(arguments: argparse.Namespace, rank: Rank) -> None:
    from torchditan.data_stream.latent_shards import LatentShards
    from torchditan.errors import option_error
    from torchditan.extras.latents.encoding import convert, describe_conversion
    from torchditan.extras.latents.writer import LatentWriter

    split = arguments.split or "train"
    if split not in SPLITS:
        raise option_error("--split", split, "must be train or validation, because a file is one split")
    if not arguments.convert.is_file():
        raise option_error("--convert", str(arguments.convert), "is not a file; must be imagenet_ci8x8.safetensors")
    if arguments.latents is not None:
        raise option_error("--latents", arguments.latents, "applies to tar shards; leave it out with --convert")
    source = LatentShards.open(arguments.convert)
    writer = LatentWriter(
        arguments.out / split,
        describe_conversion(source, split=split, shard_size=arguments.shard_size, shard_format=arguments.format),
    )
    run_split(writer, partial(convert, source, writer, rank=rank), rank=rank)


def verify_all(out: Path) -> None:
    """Print one line for every problem; exit with code 2 if there are any."""
    from torchditan.data_stream.latent_shards import LatentShards, verify
    from torchditan.run.progress import report_progress

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


def main() -> None:
    arguments, config = parse(sys.argv[1:])

    import torch

    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank, check_devices
    from torchditan.supervision.exit_status import Interrupted

    configure_cpu()
    rank = Rank.from_environment()
    if arguments.verify:
        verify_all(arguments.out)
        return
    check_devices(rank)
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    try:
        if arguments.convert is not None:
            convert_file(arguments, rank)
        else:
            encode_all(arguments, config, rank)
    except KeyboardInterrupt:
        right = f"the complete shards in {arguments.out} are kept, and the same command continues"
        raise Interrupted(f"interrupted from the keyboard; {right}") from None
