# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""ImageNet pixels: a folder tree `train/n01440764/*.JPEG`, `val/n01440764/*.JPEG`, or the Hugging Face hub.

The hub's copy is gated: accept its terms on its page, then log in (`hf auth login`, or HF_TOKEN). The classes of the
tree are its sorted folder names, which is the usual numbering of ImageNet.
"""

from __future__ import annotations

from typing import Any

from torchditan.config import options
from torchditan.datasets.folder import ImageFolder, ImageTree
from torchditan.datasets.hub import open_hub
from torchditan.datasets.options import Split, existing_path, height_and_width, photo_channels, refuse
from torchditan.errors import option_error

HUB_NAME = "ILSVRC/imagenet-1k"


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> ImageFolder:
    refuse(config, "hub_name")
    root = existing_path(config)
    tree = ImageTree(root)
    if "train" not in tree.division.splits.get((), {}).values() or not tree.class_names:
        raise option_error("dataset.root_dir", config.root_dir, "must hold train/ with one subfolder per class")
    shape = (photo_channels(config, input_channels), *height_and_width(config, default=(256, 256)))
    return ImageFolder(tree, name="imagenet", split=split, sample_shape=shape, crop=config.crop)


def build_hub(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Any:
    refuse(config, "root_dir")
    return open_hub(
        config,
        hub_name=config.hub_name or HUB_NAME,
        split=split,
        image_key=config.image_key,
        sample_shape=(photo_channels(config, input_channels), *height_and_width(config, default=(256, 256))),
    )
