# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models in pixels and frames: what a grid's `model` and `resolution` stand for, among the options.

Notable: a published model trains on latents, so the dummy dataset's sizes are latent cells. The numbers here repeat
those of finetune/published/, which imports torch; a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torchditan.config.errors import did_you_mean, option_error
from torchditan.config.options import PUBLISHED_FLAVORS, Config

MODEL, RESOLUTION = "model", "resolution"


@dataclass(frozen=True)
class LatentGrid:
    """What a family's autoencoder makes of pixels."""

    channels: int
    downsampling: int = 8
    """Pixels to a latent cell, a side."""
    temporal_downsampling: int | None = None
    """Frames to a latent one behind the first, which stands alone; None: images."""
    objective: str = "flow_matching"


LATENT_GRIDS = {
    "flux": LatentGrid(channels=16),
    "sd3": LatentGrid(channels=16),
    "sdxl": LatentGrid(channels=4, objective="ddpm"),
    "mochi": LatentGrid(channels=12, temporal_downsampling=6),
    "hunyuan_video": LatentGrid(channels=16, temporal_downsampling=4),
    "wan": LatentGrid(channels=16, temporal_downsampling=4),
    "qwen_image": LatentGrid(channels=16),
}

RESOLUTIONS = {
    "flux/FLUX.1-dev": "512x512",
    "flux/FLUX.1-schnell": "512x512",
    "sd3/SD3-medium": "1024x1024",
    "sd3/SD3.5-medium": "1024x1024",
    "sd3/SD3.5-large": "1024x1024",
    "sdxl/SDXL": "1024x1024",
    "mochi/Mochi-1": "480x848x37",
    "hunyuan_video/HunyuanVideo": "544x960x33",
    "wan/Wan2.1-T2V-1.3B": "480x832x81",
    "wan/Wan2.1-T2V-14B": "480x832x81",
    "wan/Wan2.1-I2V-14B": "480x832x81",
    "qwen_image/Qwen-Image": "1024x1024",
}
"""Height, width and frames that a grid trains a model at unless it says; debugmodels: 64x64, and two latent frames."""


def published_options(model: str, resolution: str | None) -> dict[str, Any]:
    """Options of a published model on the dummy dataset.

    Args:
        model: `flux/FLUX.1-dev`.
        resolution: pixels, and frames of a video: `480x832x81`; None: that of `RESOLUTIONS`.

    Raises:
        ConfigError: no such model, or its autoencoder makes no whole number of cells of that.
    """
    family, _, flavor = str(model).partition("/")
    names = [f"{name}/{flavor}" for name in LATENT_GRIDS for flavor in PUBLISHED_FLAVORS[name]]
    if f"{family}/{flavor}" not in names:
        right = f"must be family/flavor of a published model, flux/FLUX.1-dev say{did_you_mean(str(model), names)}"
        raise option_error(MODEL, model, right)
    grid = LATENT_GRIDS[family]
    height, width, *frames = resolution_numbers(resolution or usual_resolution(model))
    options: dict[str, Any] = {"model.name": family, "model.flavor": flavor, "model.input_channels": grid.channels}
    options |= {"dataset.num_classes": 0, "diffusion.objective": grid.objective}
    for side in (height, width):
        if side % grid.downsampling:
            right = f"height and width must be multiples of {grid.downsampling}, {model}'s pixels to a latent cell"
            raise option_error(RESOLUTION, resolution, right)
    options["dataset.image_size"] = [height // grid.downsampling, width // grid.downsampling]
    if grid.temporal_downsampling is None and frames:
        raise option_error(RESOLUTION, resolution, f"{model} takes images: must be height and width alone")
    if grid.temporal_downsampling is not None:
        if not frames:
            raise option_error(RESOLUTION, resolution, f"{model} takes videos: must be HEIGHTxWIDTHxFRAMES")
        if (frames[0] - 1) % grid.temporal_downsampling:
            right = (
                f"frames must be 1 and a multiple of {grid.temporal_downsampling}, which {model} makes one latent of"
            )
            raise option_error(RESOLUTION, resolution, right)
        options["dataset.num_frames"] = 1 + (frames[0] - 1) // grid.temporal_downsampling
    return options


def resolution_of(config: Config) -> str | None:
    """`480x832x81` of a published model's configuration; None for our own, or where the size is left open."""
    grid, size = LATENT_GRIDS.get(config.model.name), config.dataset.image_size
    if grid is None or size is None:
        return None
    numbers = [grid.downsampling * size[0], grid.downsampling * size[-1]]
    if grid.temporal_downsampling is not None and config.dataset.num_frames is not None:
        numbers.append(1 + grid.temporal_downsampling * (config.dataset.num_frames - 1))
    return "x".join(map(str, numbers))


def resolution_numbers(resolution: str) -> list[int]:
    """`"480x832x81"` as [480, 832, 81]."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", str(resolution)):
        right = 'must be height x width in pixels, of videos with frames: "512x512", "480x832x81"'
        raise option_error(RESOLUTION, resolution, right)
    return [int(number) for number in resolution.split("x")]


def usual_resolution(model: str) -> str:
    """Of `RESOLUTIONS`; small for a debugmodel."""
    frames = LATENT_GRIDS[model.partition("/")[0]].temporal_downsampling
    return RESOLUTIONS.get(model, "64x64" if frames is None else f"64x64x{1 + frames}")
