# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Options that several datasets read in the same way, and their error messages."""

from __future__ import annotations

from pathlib import Path

from torchditan.config import options
from torchditan.config.errors import option_error


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


def existing_path(config: options.Dataset, *, what: str) -> Path:
    """`dataset.root_dir`, which must exist. `what` describes the expected content."""
    if config.root_dir is None:
        raise option_error("dataset.root_dir", None, f"{config.dataset_name} needs {what}")
    path = Path(config.root_dir).expanduser()
    if not path.exists():
        raise option_error("dataset.root_dir", config.root_dir, f"does not exist; {config.dataset_name} needs {what}")
    return path


def refuse_crop(config: options.Dataset) -> None:
    """For images that are never larger than a sample: refuse `dataset.crop`."""
    if config.crop != "center":
        right = f"{config.dataset_name} is never cropped; leave it out"
        raise option_error("dataset.crop", config.crop, right)


def refuse(config: options.Dataset, *names: str) -> None:
    """Refuse options that this dataset does not read, instead of ignoring them."""
    for name in names:
        if getattr(config, name) is not None:
            right = f"{config.dataset_name} does not read it; leave it out"
            raise option_error(f"dataset.{name}", getattr(config, name), right)
