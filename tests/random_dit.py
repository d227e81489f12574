# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tiny DiTs of diffusers with random weights, all different, and pipelines around them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

NUM_CLASSES = 10
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": NUM_CLASSES,
}


def random_transformer(**options: Any) -> Any:
    """All weights are drawn. The embedders of all blocks are equal, as in released models."""
    model = diffusers.DiTTransformer2DModel(**{**SIZES, **options}).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        is_copy = ".norm1.emb." in name and not name.startswith("transformer_blocks.0.")
        std = 0.2 if ".to_q." in name or ".to_k." in name else 0.05  # attention that is far from uniform
        drawn = std * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(tensors["transformer_blocks.0." + name.split(".", 2)[2]] if is_copy else drawn)
    return model


def random_pipeline(scheduler: Any = None, *, image_channels: int = 3, **options: Any) -> Any:
    """A DiTPipeline whose autoencoder makes latents of one half."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        in_channels=image_channels,
        out_channels=image_channels,
        block_out_channels=[8, 8],
        norm_num_groups=2,
        latent_channels=4,
        scaling_factor=0.5,
    ).eval()
    return diffusers.DiTPipeline(random_transformer(**options), vae, scheduler or ddim())


def ddim(**options: Any) -> Any:
    return diffusers.DDIMScheduler(**{"clip_sample": False, **options})
