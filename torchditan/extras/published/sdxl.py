# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Stable Diffusion XL (Podell et al. 2023, arXiv 2307.01952): a UNet with attention that predicts noise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_CLIP_TOKENS = 77
_NUM_LEVELS = 1000
_SIZES = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],  # the numbers of heads, despite the name
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_TINY = {
    **_SIZES,
    "sample_size": 16,
    "block_out_channels": [32, 64, 64],
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [1, 2, 2],
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
    "norm_num_groups": 8,
}
_TRANSFORMER = {
    name: (name,)
    for name in (
        "proj_in",
        "proj_out",
        *(f"transformer_blocks.*.{attn}.to_{part}" for attn in ("attn1", "attn2") for part in ("q", "k", "v", "out.0")),
        "transformer_blocks.*.ff.net.0.proj",
        "transformer_blocks.*.ff.net.2",
    )
}
_PLACES = {
    **{f"input_blocks.{3 * i + j + 1}.1": f"down_blocks.{i}.attentions.{j}" for i in (1, 2) for j in range(2)},
    "middle_block.1": "mid_block.attentions.0",
    **{f"output_blocks.{3 * i + j}.1": f"up_blocks.{i}.attentions.{j}" for i in (0, 1) for j in range(3)},
}
"""Publisher's place of each transformer -> that of diffusers, with `layers_per_block` = 2."""


class SDXL(PublishedModel):
    name = "sdxl"
    model_class = "UNet2DConditionModel"
    pipeline_class = "StableDiffusionXLPipeline"
    subfolder = "unet"
    objective = "ddpm"
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: parts
        for original, ours in _PLACES.items()
        for name, parts in with_prefixes(original, ours, _TRANSFORMER).items()
    }
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers",),
        "kohya": ("diffusers", "sd-scripts", "ComfyUI"),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=_CLIP_TOKENS, shift=1.0),
        "SDXL": Flavor(
            "stabilityai/stable-diffusion-xl-base-1.0",
            _SIZES,
            text_length=_CLIP_TOKENS,
            shift=1.0,
            resolution="1024x1024",
        ),
    }

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        sizes = 6 * config["addition_time_embed_dim"]
        return {
            "prompt_embeds": TensorSpec((_CLIP_TOKENS, config["cross_attention_dim"])),
            "pooled_prompt_embeds": TensorSpec((config["projection_class_embeddings_input_dim"] - sizes,)),
        }

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        """One cell of the coarsest level."""
        coarsest = 2 ** (len(config["block_out_channels"]) - 1)
        return (coarsest, coarsest)

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
        if pipeline.config.force_zeros_for_empty_prompt:  # its pipeline takes zeros as the negative prompt
            empty = torch.tensor([not caption for caption in captions], device=tokens.device)
            tokens = tokens.masked_fill(empty[:, None, None], 0.0)
            pooled = pooled.masked_fill(empty[:, None], 0.0)
        return {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled}

    def blocks(self) -> nn.ModuleList:
        """Residual and transformer blocks of all levels, without the samplers and projections between them."""
        unet, found = self.transformer, nn.ModuleList()
        for level in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
            for residual, attention in itertools.zip_longest(level.resnets, getattr(level, "attentions", ())):
                found.append(residual)
                found.extend(attention.transformer_blocks if attention is not None else ())
        return found

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        """The noise (B, C, H, W) in x_t, at the levels k of t = k / 1000.

        The model is also conditioned on the image size: the size of x_t, uncropped.
        """
        # Filled on the device: a tensor made from a list is a copy from the host, which waits for it.
        sides = [x_t.new_full((len(x_t), 1), self.latent_downsampling * size) for size in x_t.shape[-2:]]
        size = torch.cat(sides, dim=1)  # (B, 2)
        weights = self.transformer.conv_in.weight.dtype
        return self.transformer(
            x_t,
            (t * _NUM_LEVELS).round(),
            encoder_hidden_states=cond["prompt_embeds"].to(weights),  # the blocks do not cast it
            added_cond_kwargs={
                "text_embeds": cond["pooled_prompt_embeds"],
                "time_ids": torch.cat([size, torch.zeros_like(size), size], dim=1),  # (B, 6)
            },
            return_dict=False,
        )[0]
