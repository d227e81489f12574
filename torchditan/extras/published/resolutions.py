# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models in pixels and frames: translates the `model` and `resolution` of a grid to options.

Notable: a published model trains on latents, so the sizes of the dummy dataset are latent cells. Each family defines
its latent cells in its own file. Those files import torch, so they are imported only if a model is named.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchditan.config.options import Config, Model
from torchditan.errors import did_you_mean, option_error
from torchditan.registry import FAMILIES, registered

if TYPE_CHECKING:
    from torchditan.extras.published.base import PublishedModel

MODEL, RESOLUTION = "model", "resolution"


def published_options(model: str, resolution: str | None) -> dict[str, Any]:
    """Options of a published model on the dummy dataset.

    Args:
        model: `flux/FLUX.1-dev`.
        resolution: height, width and, for videos, frames in pixels: `480x832x81`. None: the default of the flavor.

    Raises:
        ConfigError: the model is unknown, or the resolution is not a whole number of latent cells.
    """
    family = _family_of(model)
    name, _, flavor = model.partition("/")
    options: dict[str, Any] = {"model.name": name, "model.flavor": flavor}
    options |= {"model.input_channels": latent_channels(Model(name, flavor)), "dataset.num_classes": 0}
    options |= {"diffusion.objective": family.objective}
    height, width, *frames = resolution_numbers(resolution or usual_resolution(model))
    cell = family.downsampling_of(flavor)
    for side in (height, width):
        if side % cell:
            right = f"height and width must be multiples of {cell}, the pixels per latent cell of {model}"
            raise option_error(RESOLUTION, resolution, right)
    options["dataset.image_size"] = [height // cell, width // cell]
    if not family.takes_videos() and frames:
        raise option_error(RESOLUTION, resolution, f"{model} takes images: must be HEIGHTxWIDTH")
    if family.takes_videos():
        if not frames:
            raise option_error(RESOLUTION, resolution, f"{model} takes videos: must be HEIGHTxWIDTHxFRAMES")
        step = family.temporal_downsampling
        if (frames[0] - 1) % step:
            right = f"frames must be 1 plus a multiple of {step}, the frames per latent frame of {model}"
            raise option_error(RESOLUTION, resolution, right)
        options["dataset.num_frames"] = 1 + (frames[0] - 1) // step
    return options


def _family_of(model: str) -> type[PublishedModel]:
    """The family of `flux/FLUX.1-dev`; raises ConfigError for an unknown family or flavor."""
    name, _, flavor = str(model).partition("/")
    if name not in FAMILIES or flavor not in registered(FAMILIES, name).flavors:
        known = [*FAMILIES, *([name] if name in FAMILIES else [])]  # a family of the user's too
        names = [f"{name}/{flavor}" for name in known for flavor in registered(FAMILIES, name).flavors]
        right = f"must be family/flavor of a published model, such as flux/FLUX.1-dev{did_you_mean(str(model), names)}"
        raise option_error(MODEL, model, right)
    return registered(FAMILIES, name)


def latent_channels(config: Model) -> int:
    """Latent channels of a published model."""
    family: type[PublishedModel] = registered(FAMILIES, config.name)
    return family.latent_channels(family.flavors[config.flavor].config)


def resolution_of(config: Config) -> str | None:
    """`480x832x81` for the configuration of a published model; None for our models or if the size is not set."""
    size = config.dataset.image_size
    if config.model.name not in FAMILIES or size is None:
        return None
    family: type[PublishedModel] = registered(FAMILIES, config.model.name)
    cell = family.downsampling_of(config.model.flavor)
    numbers = [cell * size[0], cell * size[-1]]
    if family.takes_videos() and config.dataset.num_frames is not None:
        numbers.append(1 + family.temporal_downsampling * (config.dataset.num_frames - 1))
    return "x".join(map(str, numbers))


def resolution_numbers(resolution: str) -> list[int]:
    """`"480x832x81"` as [480, 832, 81]."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", str(resolution)):
        right = 'must be HEIGHTxWIDTH in pixels, or HEIGHTxWIDTHxFRAMES for videos: "512x512", "480x832x81"'
        raise option_error(RESOLUTION, resolution, right)
    return [int(number) for number in resolution.split("x")]


def usual_resolution(model: str) -> str:
    """Default resolution of a flavor in grids. Without one: 64x64, with two latent frames for videos."""
    family = _family_of(model)
    small = f"64x64x{1 + family.temporal_downsampling}" if family.takes_videos() else "64x64"
    return family.flavors[model.partition("/")[2]].resolution or small
