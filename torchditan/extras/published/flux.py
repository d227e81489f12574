# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLUX.1 (Black Forest Labs 2024): packed 2 x 2 latent cells, rotary positions, T5 tokens, a CLIP vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchditan.extras.published.base import Flavor, PublishedModel, called_with
from torchditan.extras.published.lora_layers import ADDED_QKV, QKV, with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_SIZES = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": [16, 56, 56],
}
_TINY = {
    **_SIZES,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": [8, 12, 12],
}
_EMBEDDER_PARTS = {"linear_1": "in_layer", "linear_2": "out_layer"}
_DOUBLE = {
    "img_attn.qkv": tuple(f"attn.{name}" for name in QKV),
    "txt_attn.qkv": tuple(f"attn.{name}" for name in ADDED_QKV),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
}
_SINGLE = {
    "linear1": (*(f"attn.{name}" for name in QKV), "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
_REST = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **{
        f"{original}.{_EMBEDDER_PARTS[linear]}": (f"time_text_embed.{name}.{linear}",)
        for original, name in (
            ("time_in", "timestep_embedder"),
            ("guidance_in", "guidance_embedder"),
            ("vector_in", "text_embedder"),
        )
        for linear in _EMBEDDER_PARTS
    },
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}


def exponential_shift(num_tokens: int, *, max_tokens: int = 4096, max_shift: float = 1.15) -> float:
    """exp(mu), with mu on the line through (256 tokens, 0.5) and (max_tokens, max_shift)."""
    slope = (max_shift - 0.5) / (max_tokens - 256)
    return math.exp(0.5 + slope * (num_tokens - 256))


class Flux(PublishedModel):
    name = "flux"
    model_class = "FluxTransformer2DModel"
    pipeline_class = "FluxPipeline"
    caption_tokenizer = "tokenizer_2"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    embeds_guidance = True
    sets_hooks = True
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **with_prefixes("double_blocks.*", "transformer_blocks.*", _DOUBLE),
        **with_prefixes("single_blocks.*", "single_transformer_blocks.*", _SINGLE),
        **_REST,
    }
    dropped_layers = tuple(_REST)  # by diffusers; sd-scripts drops the final layer
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers", "ComfyUI"),
        "kohya": ("diffusers", "sd-scripts", "ComfyUI"),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", {**_TINY, "guidance_embeds": True}, text_length=8),
        "FLUX.1-dev": Flavor(
            "black-forest-labs/FLUX.1-dev",
            {**_SIZES, "guidance_embeds": True},
            text_length=512,
            resolution="512x512",
        ),
        "FLUX.1-schnell": Flavor(
            "black-forest-labs/FLUX.1-schnell",
            {**_SIZES, "guidance_embeds": False},
            text_length=256,
            shift=1.0,
            is_distilled=True,
            resolution="512x512",
        ),
    }

    @classmethod
    def latent_channels(cls, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) // 4

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((text_length, config["joint_attention_dim"])),
            "pooled_prompt_embeds": TensorSpec((config["pooled_projection_dim"],)),
        }

    @classmethod
    def shift(cls, flavor: Flavor, *, num_tokens: int) -> float:
        return exponential_shift(num_tokens) if flavor.shift is None else flavor.shift

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=max_length)
        return {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled}

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        height, width = x.shape[-2:]
        text, guidance = cond["prompt_embeds"], cond.get("guidance")
        exact = [noise_level * 1000] if guidance is None else [noise_level * 1000, guidance * 1000]
        with called_with(self.transformer.time_text_embed, *exact):
            packed = self.transformer(
                hidden_states=pack(x),
                encoder_hidden_states=text,
                pooled_projections=cond["pooled_prompt_embeds"],
                timestep=noise_level,
                img_ids=position_ids(height // 2, width // 2, device=x.device),
                txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
                guidance=guidance,
                return_dict=False,
            )[0]
        return unpack(packed, height, width)


def pack(x: torch.Tensor) -> torch.Tensor:
    """Pack neighbouring 2 x 2 cells into one token: (B, C, H, W) -> (B, H W / 4, 4 C), channels first in a token."""
    batch, channels, height, width = x.shape
    cells = x.view(batch, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`: (B, N, 4 C) -> (B, C, height, width)."""
    cells = tokens.view(tokens.shape[0], height // 2, width // 2, -1, 2, 2)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], -1, height, width)


def position_ids(rows: int, columns: int, *, device: torch.device) -> torch.Tensor:
    """(rows * columns, 3) float32: 0, row and column of every token."""
    row = torch.arange(rows, dtype=torch.float32, device=device).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float32, device=device).repeat(rows)
    return torch.stack([torch.zeros_like(row), row, column], dim=1)
