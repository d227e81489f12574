# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""diffusers' FLUX and SD3 transformers with random weights, small enough for a test, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


def tiny_flux(*, width: int = 32, num_blocks: int = 1) -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=num_blocks,
        num_single_layers=num_blocks,
        attention_head_dim=16,
        num_attention_heads=width // 16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )


def flux_inputs(*, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, in_channels: int = 4) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 16, in_channels, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 8, 32, generator=draw).to(dtype),
        "pooled_projections": torch.randn(batch, 32, generator=draw).to(dtype),
        "timestep": torch.linspace(0.2, 0.8, batch).to(dtype),
        "guidance": torch.full((batch,), 3.5, dtype=dtype),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def tiny_sd3(*, num_layers: int = 2) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=num_layers,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def sd3_inputs(*, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8, generator=draw).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 8, 32, generator=draw).to(dtype),
        "pooled_projections": torch.randn(batch, 32, generator=draw).to(dtype),
        "timestep": torch.linspace(200.0, 800.0, batch),
    }


def blocks_of(model: Any) -> list[nn.Module]:
    return [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", [])]


def predict(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs, return_dict=False)[0]


def seeded(build: Any, **options: Any) -> Any:
    """The model with the same weights at every call, none of them all zeros, which would hide faults."""
    torch.manual_seed(0)
    model = build(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model
