# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models in pixels and frames: what a grid's `model` and `resolution` stand for, among the options.

Notable: a published model trains on latents, so the dummy dataset's sizes are latent cells. What a family makes of
pixels its own file says (finetune/published/), which imports torch and is imported where a model is named.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchditan.config.errors import did_you_mean, option_error
from torchditan.config.options import Config, Model
from torchditan.registry import FAMILIES, registered

if TYPE_CHECKING:
    from torchditan.finetune.published.base import PublishedModel

MODEL, RESOLUTION = "model", "resolution"


def published_options(model: str, resolution: str | None) -> dict[str, Any]:
    """Options of a published model on the dummy dataset.

    Args:
        model: `flux/FLUX.1-dev`.
        resolution: pixels, and frames of a video: `480x832x81`; None: that of the flavor.

    Raises:
        ConfigError: no such model, or its autoencoder makes no whole number of cells of that.
    """
    family = _family_of(model)
    name, _, flavor = model.partition("/")
    options: dict[str, Any] = {"model.name": name, "model.flavor": flavor}
    options |= {"model.input_channels": latent_channels(Model(name, flavor)), "dataset.num_classes": 0}
    options |= {"diffusion.objective": family.objective}
    height, width, *frames = resolution_numbers(resolution or usual_resolution(model))
    cell = family.latent_downsampling
    for side in (height, width):
        if side % cell:
            right = f"height and width must be multiples of {cell}, {model}'s pixels to a latent cell"
            raise option_error(RESOLUTION, resolution, right)
    options["dataset.image_size"] = [height // cell, width // cell]
    if not family.takes_videos() and frames:
        raise option_error(RESOLUTION, resolution, f"{model} takes images: must be height and width alone")
    if family.takes_videos():
        if not frames:
            raise option_error(RESOLUTION, resolution, f"{model} takes videos: must be HEIGHTxWIDTHxFRAMES")
        step = family.temporal_downsampling
        if (frames[0] - 1) % step:
            right = f"frames must be 1 and a multiple of {step}, which {model} makes one latent of"
            raise option_error(RESOLUTION, resolution, right)
        options["dataset.num_frames"] = 1 + (frames[0] - 1) // step
    return options


def _family_of(model: str) -> type[PublishedModel]:
    """The family of `flux/FLUX.1-dev`, which has to be one that exists."""
    name, _, flavor = str(model).partition("/")
    if name not in FAMILIES or flavor not in registered(FAMILIES, name).flavors:
        names = [f"{name}/{flavor}" for name in FAMILIES for flavor in registered(FAMILIES, name).flavors]
        right = f"must be family/flavor of a published model, flux/FLUX.1-dev say{did_you_mean(str(model), names)}"
        raise option_error(MODEL, model, right)
    return registered(FAMILIES, name)


def latent_channels(config: Model) -> int:
    """Channels of the latents that a published model is trained on."""
    family: type[PublishedModel] = registered(FAMILIES, config.name)
    return family.latent_channels(family.flavors[config.flavor].config)


def resolution_of(config: Config) -> str | None:
    """`480x832x81` of a published model's configuration; None for our own, or where the size is left open."""
    size = config.dataset.image_size
    if config.model.name not in FAMILIES or size is None:
        return None
    family: type[PublishedModel] = registered(FAMILIES, config.model.name)
    numbers = [family.latent_downsampling * size[0], family.latent_downsampling * size[-1]]
    if family.takes_videos() and config.dataset.num_frames is not None:
        numbers.append(1 + family.temporal_downsampling * (config.dataset.num_frames - 1))
    return "x".join(map(str, numbers))


def resolution_numbers(resolution: str) -> list[int]:
    """`"480x832x81"` as [480, 832, 81]."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", str(resolution)):
        right = 'must be height x width in pixels, of videos with frames: "512x512", "480x832x81"'
        raise option_error(RESOLUTION, resolution, right)
    return [int(number) for number in resolution.split("x")]


def usual_resolution(model: str) -> str:
    """What a grid trains a flavor at unless it says; 64x64, and two latent frames, where its file does not."""
    family = _family_of(model)
    small = f"64x64x{1 + family.temporal_downsampling}" if family.takes_videos() else "64x64"
    return family.flavors[model.partition("/")[2]].resolution or small
