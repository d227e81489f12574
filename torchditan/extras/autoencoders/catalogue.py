# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Catalogue of published autoencoders by name: their location, and their properties before download."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published autoencoder: its location, and its properties before download."""

    hub_name: str
    latent_channels: int
    downsampling: int
    shift: float | None = None
    """Of (z - shift) x scale; None if no normalisation is published, or the weights contain it."""
    scale: float | None = None
    subfolder: str = ""


_SD3 = "stabilityai/stable-diffusion-3-medium-diffusers"
_DC_AE = "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers"

PUBLISHED = {
    "sd-vae": Published("stabilityai/sd-vae-ft-ema", 4, 8, 0.0, 0.18215),
    "sdxl": Published("stabilityai/sdxl-vae", 4, 8, 0.0, 0.13025),
    "sd3": Published(_SD3, 16, 8, 0.0609, 1.5305, subfolder="vae"),
    "flux": Published("black-forest-labs/FLUX.1-schnell", 16, 8, 0.1159, 0.3611, subfolder="vae"),
    "flux2": Published("black-forest-labs/FLUX.2-klein-base-4B", 128, 16, subfolder="vae"),
    "dc-ae": Published(_DC_AE, 32, 32, 0.0, 0.41407),
    "cosmos-ci8x8": Published("nvidia/Cosmos-0.1-Tokenizer-CI8x8", 16, 8),
    "cosmos-ci16x16": Published("nvidia/Cosmos-0.1-Tokenizer-CI16x16", 16, 16),
}
