# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encode a dataset into latents once, in OUT/train and OUT/validation, to train with --dataset.dataset_name latents.

torchditan encode latents/earth --dataset.dataset_name earth --autoencoder.name haar --preview 64
torchditan encode latents/earth --dataset.dataset_name earth --autoencoder.name haar
torchrun --nproc_per_node=8 -m torchditan encode /data/latents --dataset.dataset_name imagenet \\
    --dataset.root_dir /data/imagenet --dataset.image_size 256 --dataset.crop adm --autoencoder.name sd-vae
torchditan encode /data/latents --latents mean --dataset.dataset_name webdataset \\
    --dataset.root_dir 'shards/{000..099}.tar' --autoencoder.name sd-vae
torchditan encode /data/latents --verify

You can stop it at any time. Run the same command again to continue; the result has the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchditan.config.options import Config


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
    parser.add_argument("--images", action="store_true", help="also store the images, for targets such as REPA's")
    parser.add_argument("--batch_size", type=count, default=64, help="images in one forward pass (default: 64)")
    parser.add_argument("--shard_size", type=count, default=4096, help="images per shard (default: 4096)")
    parser.add_argument(
        "--format",
        choices=("safetensors", "webdataset"),
        default="safetensors",
        help="one file per shard, or a tar with a safetensors file per image (default: safetensors)",
    )
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
    if arguments.split not in (None, "train", "validation", "train,validation"):
        raise option_error("--split", arguments.split, "must be train, validation or train,validation")
    if arguments.preview and arguments.latents:
        raise option_error("--preview", arguments.preview, "encodes images; leave it out with --latents")
    return arguments, override(Config(), flags, sections=("dataset", "autoencoder"))


def main() -> None:
    arguments, config = parse(sys.argv[1:])

    from torchditan.commands import encode_splits
    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank
    from torchditan.supervision.exit_status import Interrupted

    configure_cpu()
    if arguments.verify:
        encode_splits.verify_all(arguments.out)
        return
    try:
        encode_splits.encode_all(arguments, config, Rank.from_environment())
    except KeyboardInterrupt:
        right = f"the complete shards in {arguments.out} are kept, and the same command continues"
        raise Interrupted(f"interrupted from the keyboard; {right}") from None
