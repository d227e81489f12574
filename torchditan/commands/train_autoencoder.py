# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train a small patch autoencoder on any dataset of pictures. Writes weights, metrics and a picture to a folder.

torchditan autoencoder autoencoders/earth --dataset.dataset_name earth --dataset.image_size 64
torchditan autoencoder autoencoders/mine --dataset.dataset_name folder --dataset.root_dir photos \\
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torchditan.autoencoders.patch import PatchAutoencoder, PatchNetwork
    from torchditan.config.options import Config
    from torchditan.data_stream.datasets import Batch, ImageDataset
    from torchditan.evaluation.reconstruction import Reconstruction
    from torchditan.randomness import Randomness

NUM_FOR_NORMALIZATION = 4096
"""Maximum number of training images for measuring the latents' mean and standard deviation."""
NUM_HELD_OUT = 512
"""Maximum number of held-out images for the final metrics; metrics during training use an eighth of them."""
NUM_SHOWN = 10
PICTURE = "reconstructions.png"


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining `--dataset.*` flags for the configuration."""
    from torchditan.config.command_line import ScriptParser, count, positive
    from torchditan.config.errors import ConfigError

    parser = ScriptParser(__doc__, options=("dataset",))
    parser.add_argument("out", type=Path, help="folder to write; the first argument")
    parser.add_argument("--steps", type=count, default=4000, help="optimizer steps (default: 4000)")
    parser.add_argument("--batch_size", type=count, default=32, help="images per step (default: 32)")
    parser.add_argument("--lr", type=positive, default=2e-3, help="peak learning rate (default: 2e-3)")
    parser.add_argument("--width", type=count, default=64, help="channels of the residual blocks (default: 64)")
    parser.add_argument(
        "--depth", type=count, default=2, help="residual blocks in each of encoder and decoder (default: 2)"
    )
    parser.add_argument("--latent_channels", type=count, default=8, help="channels of a latent (default: 8)")
    parser.add_argument("--patch_size", type=count, default=4, help="downsampling per side, in pixels (default: 4)")
    parser.add_argument(
        "--latent_noise",
        type=positive,
        default=0.2,
        help="noise on the latents, as a share of their standard deviation (default: 0.2)",
    )
    parser.add_argument(
        "--latent_penalty",
        type=positive,
        default=1e-4,
        help="weight of the latents' mean square in the loss (default: 1e-4)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and noise (default: 0)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="precision of the convolutions in training; weights are float32 (default: bfloat16)",
    )
    parser.add_argument("--log_freq", type=count, default=250, help="steps between log lines (default: 250)")
    parser.add_argument("--overwrite", action="store_true", help="replace an autoencoder in the folder")
    if argv[:1] and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise ConfigError(
            "OUT, the folder to write, must come first: torchditan autoencoder OUT --dataset.dataset_name NAME"
        )
    return parser.parse(argv)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Before training, refuse a folder that cannot be written, or that already contains an autoencoder."""
    from torchditan.autoencoders.patch import CONFIG_FILE, WEIGHTS_FILE
    from torchditan.config.errors import option_error

    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise option_error("out", str(out), f"{existing} is not a writable folder; choose another")
    if not overwrite and any((out / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        right = "holds an autoencoder already; choose another folder, or replace it with --overwrite"
        raise option_error("out", str(out), right)


def build_datasets(config: Config, *, patch_size: int) -> tuple[ImageDataset, ImageDataset]:
    """Training and held-out pictures, of a size that is a multiple of the patch size."""
    from torchditan.config.errors import option_error
    from torchditan.config.options import cache_folder
    from torchditan.datasets import build_dataset
    from torchditan.evaluation.reconstruction import check_pictures

    training = build_dataset(config.dataset, split="train", cache_folder=cache_folder(config))
    check_pictures(training)
    _, *size = training.sample_shape
    if any(side % patch_size for side in size):
        raise option_error("dataset.image_size", size, f"must be a multiple of --patch_size = {patch_size}")
    return training, build_dataset(config.dataset, split="validation", cache_folder=cache_folder(config))


def build_stream(
    dataset: ImageDataset, config: Config, *, args: argparse.Namespace, pin_memory: bool
) -> Iterator[tuple[Batch, Randomness]]:
    """Endless batches from position 0, each with noise for its latents, all keyed to (seed, position)."""
    from torchditan.data_stream.loader import TrainingStream
    from torchditan.data_stream.order import BatchPlan

    latent_shape = (args.latent_channels, *(side // args.patch_size for side in dataset.sample_shape[1:]))
    stream = TrainingStream(
        dataset,
        plan=BatchPlan(batch_size=args.batch_size, global_batch_size=args.batch_size),
        seed=args.seed,
        num_classes=0,
        horizontal_flip=config.dataset.horizontal_flip,
        corrupt_images=config.dataset.corrupt_images,
        num_workers=config.dataset.num_workers,
        prefetch_factor=config.dataset.prefetch_factor,
        pin_memory=pin_memory,
        sample_shape=latent_shape,
    )
    return stream.batches(0)


class Progress:
    """Mean loss, held-out PSNR, images/s and the time left: a bar on a terminal, and log lines."""

    def __init__(self, *, args: argparse.Namespace, held_out: torch.Tensor, device: torch.device) -> None:
        import torch

        from torchditan.run.metrics import Console, StepTimer

        self.args, self.held_out = args, held_out.to(device)
        self.console, self.timer = Console(sys.stdout, color=False), StepTimer(device)
        self.total_loss = torch.zeros((), device=device)  # stays on the device: reading it would wait for the GPU
        self.reported, self.eta, self.figures = 0, "-:--:--", ""

    def count(self, step: int, *, loss: torch.Tensor, lr: float, network: PatchNetwork) -> None:
        self.total_loss += loss.detach()
        if step % self.args.log_freq == 0 or step == self.args.steps:
            self.report(step, lr=lr, network=network)
        self.console.progress(step, self.args.steps, self.eta, figures=self.figures)

    def report(self, step: int, *, lr: float, network: PatchNetwork) -> None:
        from torchditan.config.errors import ConfigError

        num_steps = step - self.reported
        loss = self.total_loss.item() / num_steps
        if not loss < float("inf"):
            raise ConfigError(f"the loss is {loss} by step {step}: --lr = {self.args.lr:g} must be lower")
        with self.timer.excluded("validation"):
            held_out_psnr = self.measure(network)
        speed = self.timer.read(steps=num_steps, images=num_steps * self.args.batch_size)
        seconds, images_per_second = speed["step_time_s"] or 0.0, speed["images_per_second"] or 0.0
        self.eta = str(timedelta(seconds=round(seconds * (self.args.steps - step))))
        self.figures = f"loss {loss:.5f}  {images_per_second:,.0f} images/s  "
        self.console.line(
            f"step {step:>{len(str(self.args.steps))}}/{self.args.steps}  loss {loss:.5f}  held-out "
            f"{held_out_psnr:.2f} dB  lr {lr:.1e}  {images_per_second:,.0f} images/s  ETA {self.eta}"
        )
        self.total_loss.zero_()
        self.reported = step

    def measure(self, network: PatchNetwork) -> float:
        """PSNR of the held-out images with the current network, mean over images."""
        import torch

        from torchditan.evaluation.reconstruction import psnr

        with torch.no_grad(), autocast(self.args, self.held_out.device):
            batches = self.held_out.split(self.args.batch_size)
            return torch.cat([psnr(network.decode(network.encode(batch)), batch) for batch in batches]).mean().item()


def autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


def train(
    network: PatchNetwork,
    stream: Iterator[tuple[Batch, Randomness]],
    *,
    args: argparse.Namespace,
    progress: Progress,
    device: torch.device,
) -> int:
    """Train the network in place. Returns how many unreadable images were replaced by the next one."""
    from torch.nn.utils import clip_grad_norm_

    from torchditan.autoencoders.patch import reconstruction_loss
    from torchditan.config.options import LRScheduler, Optimizer
    from torchditan.optim.optimizers import build_optimizer
    from torchditan.optim.schedules import build_schedule

    # With a beta2 of .99, the loss diverges in the first hundred steps at this learning rate.
    optimizer = build_optimizer(network, Optimizer(lr=args.lr, beta2=0.95))
    schedule = build_schedule(LRScheduler(schedule="cosine", warmup_steps=min(200, args.steps // 10)))
    skipped: set[int] = set()
    progress.timer.restart()
    for step, (batch, randomness) in enumerate(itertools.islice(stream, args.steps), start=1):
        lr = schedule.rate(step, steps=args.steps, peak=args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        images = batch["sample"].to(device, non_blocking=True)  # (B, C, H, W)
        noise = randomness.noise.to(device, non_blocking=True)  # (B, C, h, w), of the latents
        with autocast(args, device):
            loss = reconstruction_loss(
                network, images, noise, latent_noise=args.latent_noise, latent_penalty=args.latent_penalty
            )
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        skipped.update(batch["skipped"])
        progress.count(step, loss=loss, lr=lr, network=network)
    progress.console.close()
    return len(skipped)


def measure_normalization(autoencoder: PatchAutoencoder, dataset: ImageDataset, config: Config) -> None:
    """Measure shift and scale on the training images' latents, and set them as the published normalisation."""
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
    """Information on the training for config.json."""
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


def save(
    autoencoder: PatchAutoencoder,
    *,
    args: argparse.Namespace,
    dataset: ImageDataset,
    held_out: torch.Tensor,
    result: Reconstruction,
) -> None:
    """Write weights, config.json and the picture.

    Raises:
        ConfigError: the folder cannot be written, for example because the disk is full.
    """
    import torch

    from torchditan.config.errors import option_error
    from torchditan.evaluation.grid_picture import save_grid

    count = min(NUM_SHOWN, len(held_out))
    shown = [i * len(held_out) // count for i in range(count)]
    try:
        autoencoder.save(args.out, training=describe(args, dataset, result))
        save_grid(
            args.out / PICTURE,
            torch.stack([held_out[shown], result.images[shown]]),  # (2, count, C, H, W)
            None,
            ["original", "reconstruction"],
            title=f"{dataset.name}, {args.steps} steps: {figures(result)}",
            heading="held-out images",
            scale=max(1, 128 // max(held_out.shape[2:])),
        )
    except OSError as error:
        raise option_error("out", str(args.out), f"cannot be written: {error.strerror}") from None


def figures(result: Reconstruction) -> str:
    """`PSNR 31.02 dB, SSIM 0.9312`."""
    text = f"PSNR {result.psnr.mean():.2f} dB"
    return text if result.ssim is None else f"{text}, SSIM {result.ssim.mean():.4f}"


def main() -> None:
    args, flags = parse(sys.argv[1:])

    from torchditan.config.loader import override
    from torchditan.config.options import Config, Model

    # The patch size of the default model must not restrict the picture size.
    config = override(Config(model=Model(patch_size=1)), flags, sections=("dataset",))
    check_out(args.out, overwrite=args.overwrite)
    dataset, held_out_dataset = build_datasets(config, patch_size=args.patch_size)

    import torch

    from torchditan.autoencoders.patch import PatchAutoencoder, PatchAutoencoderConfig, PatchNetwork
    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.reconstruction import picture_batches, reconstruct

    configure_cpu()
    device = Rank(0, 0, 1).device
    channels, height, width = dataset.sample_shape
    sizes = {name: getattr(args, name) for name in ("latent_channels", "patch_size", "width", "depth")}
    network = PatchNetwork(PatchAutoencoderConfig(image_channels=channels, **sizes))
    network.init_weights(args.seed)
    network.to(device)
    print(
        f"{len(dataset):,} images of {dataset.name}, {channels} x {height} x {width}; "
        f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters on {device.type} "
        f"({torch.get_num_threads()} threads)"
    )
    pictures = picture_batches(
        held_out_dataset, num_images=NUM_HELD_OUT, batch_size=64, corrupt_images=config.dataset.corrupt_images
    )
    held_out = torch.cat(list(pictures))
    stream = build_stream(dataset, config, args=args, pin_memory=device.type == "cuda")
    progress = Progress(args=args, held_out=held_out[::8], device=device)
    num_skipped = train(network, stream, args=args, progress=progress, device=device)
    if num_skipped:
        print(f"{num_skipped} unreadable images were replaced by the next one")

    autoencoder = PatchAutoencoder(network, device=device)
    measure_normalization(autoencoder, dataset, config)
    result = reconstruct(autoencoder, held_out, batch_size=64)
    save(autoencoder, args=args, dataset=dataset, held_out=held_out, result=result)
    shape = " x ".join(map(str, result.latent_shape))
    print(f"{figures(result)}, mean of {len(held_out)} held-out images; latents {shape}, {autoencoder.fingerprint}")
    print(f"autoencoder: {args.out}; use it with --autoencoder.name patch --autoencoder.path {args.out}")
    print(f"originals above reconstructions: {args.out / PICTURE}")
