# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Mochi 1 (Genmo 2024): an asymmetric MM-DiT over videos with learned rotary frequencies that pools T5 tokens itself.

Its timestep grows towards data and its prediction is data - noise, as in our models and unlike all other families. Its
pipeline samples on a schedule that is first linear and then quadratic. No shift of even steps gives that schedule; ours
has even steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.finetune.published.base import Flavor, PublishedModel
from torchditan.models.spec import Condition, TensorSpec

_SIZES = {
    "patch_size": 2,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 48,
    "pooled_projection_dim": 1536,
    "in_channels": 12,
    "qk_norm": "rms_norm",
    "text_embed_dim": 4096,
    "time_embed_dim": 256,
    "activation_fn": "swiglu",
    "max_sequence_length": 256,
}
_TINY = {
    **_SIZES,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 3,
    "pooled_projection_dim": 48,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "max_sequence_length": 8,
}


class Mochi(PublishedModel):
    name = "mochi"
    model_class = "MochiTransformer3DModel"
    pipeline_class = "MochiPipeline"
    temporal_downsampling = 6
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=1.0),
        "Mochi-1": Flavor("genmo/mochi-1-preview", _SIZES, text_length=256, shift=1.0, resolution="480x848x37"),
    }

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__(transformer)
        self.transformer.rope._create_rope = rotary_embedding
        for block in self.blocks():
            block.attn1.processor = joint_attention  # type: ignore[union-attr]

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        return (1, config["patch_size"], config["patch_size"])

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((text_length, config["text_embed_dim"])),
            "prompt_attention_mask": TensorSpec((text_length,), torch.bool),
        }

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        encoded = [  # one at a time: its pipeline may treat a whole batch as empty if the last caption is
            pipeline.encode_prompt([caption], do_classifier_free_guidance=False, max_sequence_length=max_length)
            for caption in captions
        ]
        return {
            "prompt_embeds": torch.cat([tokens for tokens, *_ in encoded]),
            "prompt_attention_mask": torch.cat([mask.bool() for _, mask, *_ in encoded]),
        }

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        return -self.transformer(
            hidden_states=x,
            encoder_hidden_states=cond["prompt_embeds"],
            timestep=(1 - noise_level) * 1000,
            encoder_attention_mask=cond["prompt_attention_mask"],
            return_dict=False,
        )[0]


def rotary_embedding(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (N, heads, D / 2) float32 of positions (N, 3) at learned frequencies (3, heads, D / 2).

    diffusers computes the same under autocast to float32, which the meta device does not support.
    """
    angles = torch.einsum("nd,dhf->nhf", positions.float(), frequencies.float())
    return angles.cos(), angles.sin()


def joint_attention(
    attn: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint attention of video (B, N, D) and text (B, L, D') tokens. `attention_mask` (B, L) selects the text tokens.

    diffusers removes hidden tokens sample by sample. Their number depends on the data, which neither a single compiled
    graph nor the meta device supports. Here they are masked instead: no other token attends to them.
    """
    video = [attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)]
    text = [layer(encoder_hidden_states) for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
    video_q, video_k, video_v = (value.unflatten(2, (attn.heads, -1)) for value in video)  # (B, N, heads, D)
    text_q, text_k, text_v = (value.unflatten(2, (attn.heads, -1)) for value in text)
    q = torch.cat([_rotate(attn.norm_q(video_q), *image_rotary_emb), attn.norm_added_q(text_q)], dim=1)
    k = torch.cat([_rotate(attn.norm_k(video_k), *image_rotary_emb), attn.norm_added_k(text_k)], dim=1)
    v = torch.cat([video_v, text_v], dim=1)
    seen = F.pad(attention_mask.bool(), (hidden_states.shape[1], 0), value=True)  # (B, N + L)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen[:, None, None]
    )
    video_out, text_out = mixed.transpose(1, 2).flatten(2).split([hidden_states.shape[1], text_q.shape[1]], dim=1)
    return attn.to_out[0](video_out), attn.to_add_out(text_out) if hasattr(attn, "to_add_out") else text_out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of x (B, N, heads, D) by angles (N, heads, D / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
