# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Pack a dataset into WebDataset shards, in OUT/train and OUT/validation, to train on them or to copy them.

torchditan pack shards/photos --dataset.dataset_name folder --dataset.root_dir photos
torchditan pack shards/captioned --dataset.dataset_name captions --dataset.root_dir my_photos --images_per_shard 500
torchditan pack shards/flowers --dataset.dataset_name imagenet_hub --dataset.hub_name owner/flowers

Images of files, of the hub and of tars keep their bytes; images that a dataset draws become PNGs. They are shuffled,
for programs that read shards in order. You can stop it at any time. Run the same command again to continue.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchditan.config.options import Config


def main() -> None:
    from torchditan.config.command_line import ScriptParser, count
    from torchditan.config.loader import override
    from torchditan.config.options import Config
    from torchditan.errors import ConfigError, option_error

    parser = ScriptParser(__doc__, options=("dataset",))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; the first argument")
    parser.add_argument("--images_per_shard", type=count, default=1000, help="default: 1000")
    argv = sys.argv[1:]
    if argv[:1] and argv[0].startswith("-") and not {"-h", "--help"} & set(argv):
        raise ConfigError("OUT, the folder to write, must come first: torchditan pack OUT --dataset.dataset_name NAME")
    arguments, flags = parser.parse(argv)
    config = override(Config(), flags, sections=("dataset",))
    name = config.dataset.dataset_name
    if config.dataset.streaming:
        raise option_error("dataset.streaming", True, "shards need numbered images; leave it out")
    if name == "captions":  # reads the files, never a sample
        config = config.replace({"dataset.image_size": [1], "dataset.upscale": True})

    from torchditan.supervision.exit_status import Interrupted

    try:
        pack_all(arguments, config)
    except KeyboardInterrupt:
        right = f"the complete shards in {arguments.out} are kept, and the same command continues"
        raise Interrupted(f"interrupted from the keyboard; {right}") from None


def pack_all(arguments: argparse.Namespace, config: Config) -> None:
    import numpy as np

    from torchditan.config.options import cache_folder
    from torchditan.datasets import build_dataset
    from torchditan.datasets.captions import CaptionedImages
    from torchditan.datasets.splits import SPLITS
    from torchditan.errors import ConfigError, option_error, printable, some
    from torchditan.extras.sharing.packing import pack
    from torchditan.job.check_files import MOST_NAMED, refuse_unreadable
    from torchditan.run.progress import report_progress

    name, skips_corrupt = config.dataset.dataset_name, config.dataset.corrupt_images == "skip"
    for split in SPLITS:
        try:
            dataset = build_dataset(config.dataset, split=split, cache_folder=cache_folder(config))
        except ConfigError as error:
            if split == "train":
                raise
            print(f"no validation images: {error}", file=sys.stderr)
            continue
        if dataset.index is not None:
            raise option_error("dataset.dataset_name", name, "is encoded; must be a dataset of images")
        folder = arguments.out / split
        if isinstance(dataset, CaptionedImages) and len(dataset) > len(dataset.entries):
            dataset.places = np.arange(len(dataset.entries))  # of copies, some would be held out
            print(f"note: {split}: repeats are left out, each image is packed once", file=sys.stderr)
        if not skips_corrupt:
            refuse_unreadable(dataset, cache_folder=cache_folder(config))
        with report_progress(f"packing {folder}", total=len(dataset), unit="images") as advance:
            skipped = pack(
                dataset,
                folder,
                images_per_shard=arguments.images_per_shard,
                skips_corrupt=skips_corrupt,
                report=advance,
            )
        shards = sorted(folder.glob("*.tar"))
        size = sum(path.stat().st_size for path in shards) / 1e6
        print(f"{folder}: complete, {len(dataset) - len(skipped):,} images in {len(shards)} shards, {size:,.1f} MB")
        if split == "train":
            print("".join(f"  {printable(line)}\n" for line in dataset.reading), end="")
        if skipped:
            print(f"warning: {len(skipped):,} left out: {some(skipped, most=MOST_NAMED)}", file=sys.stderr)
    kind = name if name == "captions" else "webdataset"
    command = f"torchditan train CONFIG --dataset.dataset_name {kind} --dataset.root_dir {arguments.out}"
    if kind == "webdataset" and not dataset.horizontal_flip:  # shards of pixels are mirrored by default
        command += " --dataset.horizontal_flip false"
    print(f"train: {command}")
