#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train our small patch autoencoder on any dataset of pictures: a folder of weights, figures and a picture.

python scripts/train_autoencoder.py autoencoders/earth --dataset.dataset_name earth --dataset.image_size 64
python scripts/train_autoencoder.py autoencoders/mine --dataset.dataset_name folder --dataset.root_dir photos \
    --dataset.image_size 128 --steps 20000
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torchditan.autoencoders.patch import PatchAutoencoder, PatchNetwork
    from torchditan.config import Config
    from torchditan.evaluation.reconstruction import Reconstruction
    from torchditan.stream import Batch, ImageDataset

NUM_FOR_NORMALIZATION = 4096
"""Training images that the latents' mean and standard deviation are measured on, at most."""
NUM_HELD_OUT = 1024
"""Held-out images behind the final figures, at most; an eighth of them behind those along the way."""
NUM_SHOWN = 10


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this script, and the `--dataset.*` flags left for the configuration."""
    from torchditan.command_line import ScriptParser, count

    parser = ScriptParser(__doc__, sections=("dataset",))
    parser.add_argument("out", type=Path, help="folder to write: config.json, model.safetensors, reconstructions.png")
    parser.add_argument("--steps", type=count, default=4000, help="optimizer steps (default: 4000)")
    parser.add_argument("--batch_size", type=count, default=32, help="images in a step (default: 32)")
    parser.add_argument("--lr", type=positive, default=2e-3, help="peak learning rate (default: 2e-3)")
    parser.add_argument("--width", type=count, default=64, help="channels of the residual blocks (default: 64)")
    parser.add_argument("--depth", type=count, default=2, help="residual blocks, encoder and decoder each (default: 2)")
    parser.add_argument("--latent_channels", type=count, default=8, help="channels of a latent (default: 8)")
    parser.add_argument("--patch_size", type=count, default=4, help="pixels to a latent cell, a side (default: 4)")
    parser.add_argument(
        "--latent_noise",
        type=positive,
        default=0.2,
        help="noise on the latents, as a share of their standard deviation (default: 0.2)",
    )
    parser.add_argument("--latent_penalty", type=positive, default=1e-4, help="weight of their size (default: 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and noise (default: 0)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="precision of the convolutions in training; weights are float32 (default: bfloat16)",
    )
    parser.add_argument("--log_freq", type=count, default=250, help="steps between two lines (default: 250)")
    parser.add_argument("--overwrite", action="store_true", help="replace an autoencoder that the folder holds")
    return parser.parse(argv)


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number greater than 0")
    return number


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, and one that holds an autoencoder, before anything is trained."""
    from torchditan.autoencoders.patch import CONFIG_FILE, WEIGHTS_FILE
    from torchditan.config import option_error

    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise option_error("out", str(out), f"{existing} is no folder that can be written; choose another")
    if not overwrite and any((out / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        right = "holds an autoencoder already; choose another folder, or replace it with --overwrite"
        raise option_error("out", str(out), right)


def build_datasets(config: Config, *, patch_size: int) -> tuple[ImageDataset, ImageDataset]:
    """Training and held-out pictures, of a size that divides into patches."""
    from data import build_dataset
    from torchditan.config import option_error
    from torchditan.evaluation.reconstruction import check_pictures

    training = build_dataset(config.dataset, split="train")
    check_pictures(training)
    _, *size = training.sample_shape
    if any(side % patch_size for side in size):
        raise option_error("dataset.image_size", size, f"must be a multiple of --patch_size = {patch_size}")
    return training, build_dataset(config.dataset, split="validation")


def batches(dataset: ImageDataset, config: Config, *, batch_size: int, seed: int, pin_memory: bool) -> Iterator[Batch]:
    """Batches of the training stream from position 0 on, endlessly: order and flips are keyed to (seed, position)."""
    from torch.utils.data import DataLoader

    from torchditan.config import ConfigError
    from torchditan.stream import BatchPlan, Collate, StreamDataset

    flip = config.dataset.horizontal_flip
    stream = StreamDataset(
        dataset,
        seed=seed,
        num_classes=0,
        horizontal_flip=dataset.horizontal_flip if flip is None else flip,
        corrupt_images=config.dataset.corrupt_images,
    )
    num_workers = config.dataset.num_workers
    loader: Any = DataLoader(
        stream,
        batch_sampler=BatchPlan(batch_size=batch_size, global_batch_size=batch_size).positions(0),  # type: ignore
        collate_fn=Collate(labelled=False),
        num_workers=num_workers,
        prefetch_factor=config.dataset.prefetch_factor if num_workers else None,
        pin_memory=pin_memory,
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        yield batch


def train(
    network: PatchNetwork,
    stream: Iterator[Batch],
    held_out: torch.Tensor,
    *,
    args: argparse.Namespace,
    device: torch.device,
) -> int:
    """Train the network in place; a line every `log_freq` steps. Returns how many unreadable images were replaced."""
    import torch

    from torchditan.autoencoders.patch import reconstruction_loss
    from torchditan.config import ConfigError, LRScheduler, Optimizer
    from torchditan.evaluation.reconstruction import psnr
    from torchditan.metrics import Console, StepTimer
    from torchditan.optim import build_optimizer, learning_rate
    from torchditan.randomness import normal

    optimizer = build_optimizer(network, Optimizer(lr=args.lr, beta2=0.95))
    schedule = LRScheduler(schedule="cosine", warmup_steps=min(200, args.steps // 10))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    console, timer = Console(sys.stdout, color=False), StepTimer(device)
    held_out = held_out.to(device)
    total, num_skipped, logged, eta = torch.zeros((), device=device), 0, 0, "-:--:--"
    for step, batch in enumerate(itertools.islice(stream, args.steps), start=1):
        lr = learning_rate(step, steps=args.steps, peak=args.lr, config=schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        images = batch["sample"].to(device, memory_format=torch.channels_last, non_blocking=True)
        latent_shape = (args.latent_channels, *(side // args.patch_size for side in images.shape[2:]))
        noise = normal(args.seed, "latent noise", batch["index"].tolist(), latent_shape).to(device, non_blocking=True)
        with autocast:
            loss = reconstruction_loss(
                network, images, noise, latent_noise=args.latent_noise, latent_penalty=args.latent_penalty
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
        num_skipped += int(batch["skipped"].sum())
        console.progress(step, args.steps, eta)
        if step % args.log_freq and step != args.steps:
            continue
        mean_loss = total.item() / (step - logged)
        if not mean_loss < float("inf"):
            raise ConfigError(f"the loss is {mean_loss} at step {step}: lower --lr = {args.lr:g}")
        with timer.excluded("validation"), torch.no_grad(), autocast:
            decoded = [network.decode(network.encode(part)).float() for part in held_out.split(args.batch_size)]
            held_out_psnr = psnr(torch.cat(decoded), held_out).mean().item()
        speed = timer.read(steps=step - logged, images=(step - logged) * args.batch_size)
        eta = str(timedelta(seconds=round((speed["step_time_s"] or 0.0) * (args.steps - step))))
        console.line(
            f"step {step:>{len(str(args.steps))}}/{args.steps}  loss {mean_loss:.5f}  held-out {held_out_psnr:.2f} dB  "
            f"lr {lr:.1e}  {speed['images_per_second'] or 0.0:,.0f} images/s  ETA {eta}"
        )
        total.zero_()
        logged = step
    console.close()
    return num_skipped


def measure_normalization(autoencoder: PatchAutoencoder, dataset: ImageDataset, config: Config) -> None:
    """Have the autoencoder publish the shift and scale of the training images' latents."""
    from torchditan.evaluation.reconstruction import (
        channel_statistics,
        normalization_of,
        picture_batches,
        raw_latents,
    )

    pictures = picture_batches(
        dataset, num_images=NUM_FOR_NORMALIZATION, batch_size=32, corrupt_images=config.dataset.corrupt_images
    )
    shift, scale = normalization_of(*channel_statistics(raw_latents(autoencoder, pictures)))
    autoencoder.set_normalization(shift=shift, scale=scale)


def describe(args: argparse.Namespace, dataset: ImageDataset, result: Reconstruction) -> dict[str, Any]:
    """What config.json keeps about the training, for people."""
    names = ("steps", "batch_size", "lr", "latent_noise", "latent_penalty", "seed", "dtype")
    return {
        "dataset_name": dataset.name,
        "image_size": list(dataset.sample_shape[1:]),
        "num_images": len(dataset),
        **{name: getattr(args, name) for name in names},
        "held_out": {
            "num_images": len(result.psnr),
            "psnr_db": round(result.psnr.mean().item(), 3),
            "ssim": None if result.ssim is None else round(result.ssim.mean().item(), 4),
        },
    }


def main() -> None:
    args, flags = parse(sys.argv[1:])

    from torchditan.config import Config, Model
    from torchditan.config_loader import override

    # The default model's own patches are no limit to the pictures.
    config = override(Config(model=Model(patch_size=1)), flags, sections=("dataset",))
    check_out(args.out, overwrite=args.overwrite)
    training, held_out_dataset = build_datasets(config, patch_size=args.patch_size)

    import torch

    from torchditan.autoencoders.patch import PatchAutoencoder, PatchAutoencoderConfig, PatchNetwork
    from torchditan.config import option_error
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.image_grid import save_grid
    from torchditan.evaluation.reconstruction import picture_batches, reconstruct

    device = Rank(0, 0, 1).device
    channels, height, width = training.sample_shape
    network = PatchNetwork(
        PatchAutoencoderConfig(
            image_channels=channels,
            latent_channels=args.latent_channels,
            patch_size=args.patch_size,
            width=args.width,
            depth=args.depth,
        )
    )
    network.init_weights(args.seed)
    network.to(device, memory_format=torch.channels_last)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    print(
        f"{len(training):,} images of {training.name}, {channels} x {height} x {width}; {num_parameters:,} parameters "
        f"on {device.type} ({torch.get_num_threads()} threads)"
    )
    skip = config.dataset.corrupt_images
    held_out = torch.cat(
        list(picture_batches(held_out_dataset, num_images=NUM_HELD_OUT, batch_size=64, corrupt_images=skip))
    )
    stream = batches(training, config, batch_size=args.batch_size, seed=args.seed, pin_memory=device.type == "cuda")
    num_skipped = train(network, stream, held_out[:: NUM_HELD_OUT // 128], args=args, device=device)
    if num_skipped:
        print(f"{num_skipped} times an unreadable image was replaced by the next")

    autoencoder = PatchAutoencoder(network, device=device)
    measure_normalization(autoencoder, training, config)
    result = reconstruct(autoencoder, held_out, batch_size=64)
    try:
        autoencoder.save(args.out, training=describe(args, training, result))
        shown = [i * len(held_out) // NUM_SHOWN for i in range(NUM_SHOWN)]
        save_grid(
            args.out / "reconstructions.png",
            torch.stack([held_out[shown], result.images[shown]]),
            None,
            ["original", "reconstruction"],
            title=f"{training.name}, {args.steps} steps: {figures(result)}",
            heading="held-out images",
            scale=max(1, 128 // max(height, width)),
        )
    except OSError as error:
        raise option_error("out", str(args.out), f"cannot be written: {error.strerror}") from None
    shape = " x ".join(map(str, result.latent_shape))
    print(f"{figures(result)}, mean of {len(held_out)} held-out images; latents {shape}, {autoencoder.fingerprint}")
    print(f"autoencoder: {args.out}; use it with --autoencoder.name patch --autoencoder.path {args.out}")
    print(f"originals above reconstructions: {args.out / 'reconstructions.png'}")


def figures(result: Reconstruction) -> str:
    """`PSNR 31.02 dB, SSIM 0.9312`."""
    text = f"PSNR {result.psnr.mean():.2f} dB"
    return text if result.ssim is None else f"{text}, SSIM {result.ssim.mean():.4f}"


if __name__ == "__main__":
    from torchditan.verdict import run_job

    sys.exit(run_job(main))
