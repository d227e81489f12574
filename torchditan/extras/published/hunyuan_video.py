# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""HunyuanVideo (Kong et al. 2024, arXiv 2412.03603): the blocks of FLUX over videos, Llama tokens, a CLIP vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import ADDED_QKV, QKV, with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_SIZES = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 20,
    "num_single_layers": 40,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "guidance_embeds": True,
    "text_embed_dim": 4096,
    "pooled_projection_dim": 768,
    "rope_theta": 256.0,
    "rope_axes_dim": [16, 56, 56],
}
_TINY = {
    **_SIZES,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 16,
    "rope_axes_dim": [8, 12, 12],
}
_DOUBLE = {
    "img_attn_qkv": tuple(f"attn.{name}" for name in QKV),
    "txt_attn_qkv": tuple(f"attn.{name}" for name in ADDED_QKV),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp.fc1": ("ff.net.0.proj",),
    "img_mlp.fc2": ("ff.net.2",),
    "txt_mlp.fc1": ("ff_context.net.0.proj",),
    "txt_mlp.fc2": ("ff_context.net.2",),
    "img_mod.linear": ("norm1.linear",),
    "txt_mod.linear": ("norm1_context.linear",),
}
_SINGLE = {
    "linear1": (*(f"attn.{name}" for name in QKV), "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.linear": ("norm.linear",),
}
_REFINER = {
    "self_attn_qkv": tuple(f"attn.{name}" for name in QKV),
    "self_attn_proj": ("attn.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}


class HunyuanVideo(PublishedModel):
    name = "hunyuan_video"
    model_class = "HunyuanVideoTransformer3DModel"
    pipeline_class = "HunyuanVideoPipeline"
    caption_tokenizer = None
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    temporal_downsampling = 4
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    embeds_guidance = True
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **with_prefixes("double_blocks.*", "transformer_blocks.*", _DOUBLE),
        **with_prefixes("single_blocks.*", "single_transformer_blocks.*", _SINGLE),
        **with_prefixes(
            "txt_in.individual_token_refiner.blocks.*", "context_embedder.token_refiner.refiner_blocks.*", _REFINER
        ),
    }
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers",),
        "comfyui": ("ComfyUI",),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=7.0),
        "HunyuanVideo": Flavor(
            "hunyuanvideo-community/HunyuanVideo", _SIZES, text_length=256, shift=7.0, resolution="544x960x33"
        ),
    }

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        return (config["patch_size_t"], config["patch_size"], config["patch_size"])

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((text_length, config["text_embed_dim"])),
            "pooled_prompt_embeds": TensorSpec((config["pooled_projection_dim"],)),
            "prompt_attention_mask": TensorSpec((text_length,), torch.bool),
        }

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, pooled, mask = pipeline.encode_prompt(captions, max_sequence_length=max_length)
        return {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled, "prompt_attention_mask": mask.bool()}

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        guidance = cond.get("guidance")
        mask = cond["prompt_attention_mask"]
        # An encoded caption has at least one token. The empty caption of a benchmark has none: the mean would be 0 / 0.
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)
        return self.transformer(
            hidden_states=x,
            timestep=noise_level * 1000,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_attention_mask=mask,
            pooled_projections=cond["pooled_prompt_embeds"],
            guidance=None if guidance is None else guidance * 1000,
            return_dict=False,
        )[0]
