# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options that several datasets read in the same way, and their error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torchditan.config import options
from torchditan.errors import option_error

Split = Literal["train", "validation"]
PUBLIC_FILE = "imagenet_ci8x8.safetensors"
"""ImageNet in the latents of the Cosmos tokenizer CI8x8, a public file."""
_LATENTS = (
    f"a folder that torchditan encode wrote, or the file {PUBLIC_FILE} (dataset fal/cosmos-imagenet on the "
    "Hugging Face hub); for a benchmark without it use --dataset.dataset_name dummy"
)
NEEDS = {
    "captions": "a folder of images with captions, tar shards, parquet files or metadata.jsonl",
    "cifar10": "a folder of data_batch_*.bin, a parquet file or folder, or dataset.hub_name uoft-cs/cifar10",
    "folder": "a folder of images, or of one subfolder per class",
    "imagenet": "a folder with train/ and val/, one subfolder per class in each",
    "latents": _LATENTS,
    "webdataset": "a folder of .tar shards, one of them, a pattern such as a-{00..99}.tar, or an address (s3://...)",
}
"""Content of `dataset.root_dir`, for datasets whose folder train.py checks before it imports torch."""
DEFAULT_ROOTS = {"latents": PUBLIC_FILE}


def height_and_width(config: options.Dataset, *, default: tuple[int, int]) -> tuple[int, int]:
    """`dataset.image_size` as (height, width). One number is a square."""
    size = config.image_size
    return default if size is None else (size[0], size[-1])


def photo_channels(config: options.Dataset, input_channels: int | None) -> int:
    """3 for colour, 1 if the model needs grey."""
    if input_channels not in (None, 1, 3):
        right = f"{config.dataset_name} supports 3 (colour) or 1 (grey)"
        raise option_error("model.input_channels", input_channels, right)
    return input_channels or 3


def is_tar_address(root_dir: str | None) -> bool:
    """Whether `dataset.root_dir` is a pattern (`a-{00..99}.tar`) or an address (`s3://...`) of shards, not a path."""
    if root_dir is None or Path(root_dir).expanduser().exists():
        return False
    return "://" in root_dir or ("{" in root_dir and root_dir.endswith(".tar"))


def existing_path(config: options.Dataset, *, what: str | None = None) -> Path:
    """`dataset.root_dir`, which must exist. `what` describes the expected content of a dataset that `NEEDS` lacks."""
    name, given = config.dataset_name, config.root_dir
    path = Path(given or DEFAULT_ROOTS.get(name, "")).expanduser()
    if (given is None and name not in DEFAULT_ROOTS) or not path.exists():
        missing = "" if given is None else "does not exist; "
        raise option_error("dataset.root_dir", given, f"{missing}{name} needs {what or NEEDS[name]}")
    return path


def check_root(config: options.Dataset) -> None:
    """Check that the data of a dataset in `NEEDS` exists. train.py calls it before it imports torch."""
    is_elsewhere = False
    if config.dataset_name == "latents" and config.root_dir is not None:
        from torchditan.run.hub import is_on_hub

        is_elsewhere = is_on_hub(config.root_dir)
    if config.dataset_name in ("captions", "webdataset"):
        is_elsewhere = is_tar_address(config.root_dir)
    if config.dataset_name in NEEDS and config.hub_name is None and not config.streaming and not is_elsewhere:
        existing_path(config)


def refuse(config: options.Dataset, *names: str) -> None:
    """Refuse options that this dataset does not read, instead of ignoring them."""
    for name in names:
        if getattr(config, name) != getattr(options.Dataset(), name):
            right = f"{config.dataset_name} does not read it; leave it out"
            raise option_error(f"dataset.{name}", getattr(config, name), right)


def square_size(config: options.Dataset, sizes: tuple[int, ...]) -> int:
    """`dataset.image_size`, which must be one of these squares; by default the first."""
    height, width = height_and_width(config, default=(sizes[0], sizes[0]))
    if height != width or height not in sizes:
        right = f"must be {' or '.join(map(str, sizes))} for {config.dataset_name}"
        raise option_error("dataset.image_size", config.image_size, right)
    return height
