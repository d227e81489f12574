# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Compare autoencoders on the held-out images of a dataset: PSNR, SSIM, latents, speed, and a picture.

torchditan reconstruct --dataset.dataset_name earth --dataset.image_size 64 \\
    --autoencoder.name patch --autoencoder.path earth
torchditan reconstruct --dataset.dataset_name earth --dataset.image_size 64 --compare haar patch:earth sdxl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from torchditan.autoencoders import Autoencoder
    from torchditan.config.options import Autoencoder as AutoencoderConfig
    from torchditan.evaluation.reconstruction import Reconstruction

NUM_SHOWN = 10
HEADINGS = ("autoencoder", "latents", "fewer", "PSNR dB", "SSIM", "mean", "std", "encode/s", "decode/s")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining `--dataset.*` and `--autoencoder.*` flags for the configuration."""
    from torchditan.config.command_line import ScriptParser, check_output, count

    parser = ScriptParser(__doc__, options=("dataset", "autoencoder"))
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="NAME[:PATH]",
        help="several autoencoders by name, or name and path, instead of --autoencoder.name and .path",
    )
    parser.add_argument(
        "--num_images", type=count, default=256, help="number of held-out images, at most (default: 256)"
    )
    parser.add_argument("--batch_size", type=count, default=32, help="images at once (default: 32)")
    parser.add_argument("--out", type=Path, help="PNG to write (default: outputs/reconstructions_<dataset>.png)")
    arguments, flags = parser.parse(argv)
    if arguments.out is not None:
        check_output("--out", arguments.out)
    return arguments, flags


def choose(config: AutoencoderConfig, compare: list[str] | None) -> list[AutoencoderConfig]:
    """The requested autoencoders; `--autoencoder.*` options other than name and path apply to each of them."""
    from torchditan.config.errors import option_error

    if config.online or config.sample_posterior:
        option = "online" if config.online else "sample_posterior"
        raise option_error(f"autoencoder.{option}", True, "this command measures mean latents; leave it out")
    if compare is None:
        if config.name is None:
            raise option_error("autoencoder.name", None, "must be given, or several with --compare haar patch:earth")
        return [config]
    for option in ("name", "path"):
        if getattr(config, option) is not None:
            right = "--compare names the autoencoders; leave it out"
            raise option_error(f"autoencoder.{option}", getattr(config, option), right)
    pairs = [text.partition(":") for text in compare]
    return [dataclasses.replace(config, name=name, path=path or None) for name, _, path in pairs]


def title_of(config: AutoencoderConfig) -> str:
    """Name in the form that `--compare` accepts, such as `patch:earth`."""
    return f"{config.name}:{config.path}" if config.path else str(config.name)


def set_missing_normalization(autoencoder: Autoencoder, images: Tensor, *, batch_size: int) -> bool:
    """Normalise by these images if no normalisation is published. Returns whether it did."""
    from torchditan.evaluation.reconstruction import channel_statistics, normalization_of, raw_latents

    if autoencoder.shift is not None:
        return False
    statistics = channel_statistics(raw_latents(autoencoder, images.split(batch_size)))
    shift, scale = normalization_of(*statistics)
    autoencoder.set_normalization(shift=shift, scale=scale)
    return True


def row(title: str, result: Reconstruction, *, image_shape: tuple[int, ...]) -> list[str]:
    """A row of the table; `mean` and `std` are the lowest and the highest of the normalised channels."""
    mean, std = result.latent_mean.round(decimals=2) + 0.0, result.latent_std  # + 0.0 makes -0.0 a 0.0
    return [
        title,
        " x ".join(map(str, result.latent_shape)),
        f"{math.prod(image_shape) / math.prod(result.latent_shape):.3g} x",
        f"{result.psnr.mean():.2f}",
        "-" if result.ssim is None else f"{result.ssim.mean():.4f}",
        f"{mean.min():+.2f} {mean.max():+.2f}",
        f"{std.min():.2f} {std.max():.2f}",
        f"{result.encoded_per_second:,.0f}",
        f"{result.decoded_per_second:,.0f}",
    ]


def table(rows: list[list[str]]) -> str:
    """Columns as wide as their longest entry; the first is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    lines = []
    for entries in (HEADINGS, *rows):
        first, *others = (entry.ljust(width) for entry, width in zip(entries, widths, strict=True))
        cells = [first, *(entry.strip().rjust(width) for entry, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_toml(config: AutoencoderConfig, autoencoder: Autoencoder) -> str:
    """Lines for a training configuration that set the normalisation measured here."""
    assert autoencoder.shift is not None and autoencoder.scale is not None
    given = {key: getattr(config, key) for key in ("name", "path", "downsampling", "dtype")}
    lines = ["[autoencoder]", *(f"{key} = {json.dumps(value)}" for key, value in given.items() if value is not None)]
    for key, values in (("shift", autoencoder.shift), ("scale", autoencoder.scale)):
        numbers = [float(f"{value:.6g}") for value in values.tolist()]
        lines.append(f"{key} = {numbers}")
    return "\n".join(lines)


def main() -> None:
    args, flags = parse(sys.argv[1:])

    from torchditan.config.loader import override
    from torchditan.config.options import Config, Model

    # The patch size of the default model must not restrict the picture size.
    config = override(Config(model=Model(patch_size=1)), flags, sections=("dataset", "autoencoder"))
    chosen = choose(config.autoencoder, args.compare)

    import torch

    from torchditan.autoencoders import open_autoencoder
    from torchditan.config.options import cache_folder
    from torchditan.datasets import build_dataset
    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank
    from torchditan.evaluation.grid_picture import save_grid
    from torchditan.evaluation.reconstruction import check_pictures, picture_batches, reconstruct
    from torchditan.run.progress import report_progress

    configure_cpu()
    device = Rank(0, 0, 1).device
    dataset = build_dataset(config.dataset, split="validation", cache_folder=cache_folder(config))
    check_pictures(dataset)
    pictures = picture_batches(
        dataset,
        num_images=args.num_images,
        batch_size=args.batch_size,
        corrupt_images=config.dataset.corrupt_images,
    )
    with report_progress("reading images"):
        images = torch.cat(list(pictures))  # (n, C, H, W)
    rows, toml, labels = [], [], ["original"]
    shown = [i * len(images) // min(NUM_SHOWN, len(images)) for i in range(min(NUM_SHOWN, len(images)))]
    cells = [images[shown]]
    for each in chosen:
        title = title_of(each)
        with report_progress(f"reconstructing with {title}"):
            autoencoder = open_autoencoder(each, device=device, image_channels=dataset.sample_shape[0])
            autoencoder.latent_shape(*images.shape[2:])
            if set_missing_normalization(autoencoder, images, batch_size=args.batch_size):
                toml.append((title, to_toml(each, autoencoder)))
            result = reconstruct(autoencoder, images, batch_size=args.batch_size)
        rows.append(row(title, result, image_shape=dataset.sample_shape))
        labels.append(f"{title}  {rows[-1][3]} dB")
        cells.append(result.images[shown])

    size = " x ".join(map(str, dataset.sample_shape))
    print(
        f"{len(images)} held-out images of {dataset.name}, {size}, on {device.type} ({torch.get_num_threads()} threads)"
    )
    print(table(rows))
    print("PSNR and SSIM: means over images. mean, std: lowest and highest of the normalised latents' channels.")
    for title, lines in toml:
        print(f"\n{title} publishes no normalisation; measured on these images:\n{lines}")
    out = args.out or Path("outputs") / f"reconstructions_{dataset.name}.png"
    save_grid(
        out,
        torch.stack(cells),  # (1 + autoencoders, k, C, H, W)
        None,
        labels,
        title=f"{dataset.name}, {size}",
        heading="held-out images",
        scale=max(1, 128 // max(dataset.sample_shape[1:])),
    )
    print(f"\noriginals above reconstructions: {out}")
