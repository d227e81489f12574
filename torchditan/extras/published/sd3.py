# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv 2403.03206): MM-DiT over CLIP and T5 tokens, a pooled vector.

Its pipeline samples at the noise levels of its scheduler, whose last step starts at the smallest level (0.009 with 28
steps). Ours are even steps down to 0 (the last one starts at 0.1) with the same shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import ADDED_QKV, QKV, with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_CLIP_TOKENS = 77
_SIZES = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 192,
}
_TINY = {
    **_SIZES,
    "sample_size": 16,
    "num_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 24,
}
_MEDIUM_35 = {
    **_SIZES,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}
_LARGE_35 = {
    **_SIZES,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
_JOINT = {
    "x_block.attn.qkv": tuple(f"attn.{name}" for name in QKV),
    "x_block.attn2.qkv": tuple(f"attn2.{name}" for name in QKV),
    "context_block.attn.qkv": tuple(f"attn.{name}" for name in ADDED_QKV),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}
_REST = {
    "context_embedder": ("context_embedder",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}


class SD3(PublishedModel):
    name = "sd3"
    model_class = "SD3Transformer2DModel"
    pipeline_class = "StableDiffusion3Pipeline"
    caption_tokenizer = "tokenizer_3"
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **with_prefixes("joint_blocks.*", "transformer_blocks.*", _JOINT),
        **_REST,
    }
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers", "ComfyUI"),
        "kohya": ("sd-scripts", "ComfyUI"),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=3.0),
        "SD3-medium": Flavor(
            "stabilityai/stable-diffusion-3-medium-diffusers",
            _SIZES,
            text_length=256,
            shift=3.0,
            resolution="1024x1024",
        ),
        "SD3.5-medium": Flavor(
            "stabilityai/stable-diffusion-3.5-medium", _MEDIUM_35, text_length=256, shift=3.0, resolution="1024x1024"
        ),
        "SD3.5-large": Flavor(
            "stabilityai/stable-diffusion-3.5-large", _LARGE_35, text_length=256, shift=3.0, resolution="1024x1024"
        ),
    }

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((_CLIP_TOKENS + text_length, config["joint_attention_dim"])),
            "pooled_prompt_embeds": TensorSpec((config["pooled_projection_dim"],)),
        }

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, _, pooled, _ = pipeline.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled}

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        return self.transformer(
            hidden_states=x,
            timestep=noise_level * 1000,
            encoder_hidden_states=cond["prompt_embeds"],
            pooled_projections=cond["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
