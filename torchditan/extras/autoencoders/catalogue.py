# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Catalogue of published autoencoders by name: their location, and their properties before download.

`CONFIGS` has the sizes in their config.json, with which the planner counts an encoder without its files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    config: dict[str, Any] = field(default_factory=dict)
    """Class in diffusers and arguments that differ from its defaults; {} for TorchScript."""


_SD3 = "stabilityai/stable-diffusion-3-medium-diffusers"
_DC_AE = "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers"

_KL: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": 4 * ["DownEncoderBlock2D"],
    "up_block_types": 4 * ["UpDecoderBlock2D"],
    "layers_per_block": 2,
}
_KL_16 = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_KL_FLUX2 = {"_class_name": "AutoencoderKLFlux2"}
_DC: dict[str, Any] = {
    "_class_name": "AutoencoderDC",
    "encoder_block_types": 3 * ["ResBlock"] + 3 * ["EfficientViTBlock"],
    "decoder_block_types": 3 * ["ResBlock"] + 3 * ["EfficientViTBlock"],
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
}

PUBLISHED = {
    "sd-vae": Published("stabilityai/sd-vae-ft-ema", 4, 8, 0.0, 0.18215, config=_KL),
    "sdxl": Published("stabilityai/sdxl-vae", 4, 8, 0.0, 0.13025, config=_KL),
    "sd3": Published(_SD3, 16, 8, 0.0609, 1.5305, subfolder="vae", config=_KL_16),
    "flux": Published("black-forest-labs/FLUX.1-schnell", 16, 8, 0.1159, 0.3611, subfolder="vae", config=_KL_16),
    "flux2": Published("black-forest-labs/FLUX.2-klein-base-4B", 128, 16, subfolder="vae", config=_KL_FLUX2),
    "dc-ae": Published(_DC_AE, 32, 32, 0.0, 0.41407, config=_DC),
    "cosmos-ci8x8": Published("nvidia/Cosmos-0.1-Tokenizer-CI8x8", 16, 8),
    "cosmos-ci16x16": Published("nvidia/Cosmos-0.1-Tokenizer-CI16x16", 16, 16),
}

_RAE: dict[str, Any] = {
    "_class_name": "AutoencoderRAE",
    "encoder_type": "dinov2",
    "encoder_hidden_size": 768,
    "encoder_patch_size": 14,
    "encoder_num_hidden_layers": 12,
    "encoder_input_size": 224,
    "decoder_hidden_size": 1152,
    "decoder_num_hidden_layers": 28,
    "decoder_num_attention_heads": 16,
    "decoder_intermediate_size": 4096,
    "patch_size": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    **{entry.hub_name: {**entry.config, "scaling_factor": entry.scale} for entry in PUBLISHED.values() if entry.config},
    "nyu-visionx/RAE-dinov2-wReg-base-ViTXL-n08": _RAE,
    "nyu-visionx/RAE-dinov2-wReg-base-ViTXL-n08-i512": {**_RAE, "encoder_input_size": 448},
}
"""Hub name -> config.json."""
