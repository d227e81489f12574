# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Mochi 1 (Genmo 2024): an asymmetric MM-DiT over videos with learned rotary frequencies that pools T5 tokens itself.

Notable:
- its timestep grows towards data and its prediction is data - noise, as in our models and unlike most families;
- its pipeline samples on a schedule that is first linear and then quadratic. No shift of even steps gives that
  schedule; ours has even steps;
- diffusers removes the padding of each caption, sample by sample. The number of tokens then depends on the data, which
  neither a single compiled graph nor the meta device supports. Here shapes are fixed: on a GPU in half precision a
  kernel for sequences of different lengths takes the valid tokens of each sample as a sequence, elsewhere a mask
  hides the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import ADDED_QKV, QKV, with_prefixes
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
_ATTENTION = {
    "attn.qkv_x": tuple(f"attn1.{name}" for name in QKV),
    "attn.qkv_y": tuple(f"attn1.{name}" for name in ADDED_QKV),
    "attn.proj_x": ("attn1.to_out.0",),
    "attn.proj_y": ("attn1.to_add_out",),
}


class Mochi(PublishedModel):
    name = "mochi"
    model_class = "MochiTransformer3DModel"
    pipeline_class = "MochiPipeline"
    temporal_downsampling = 6
    lora_targets = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = with_prefixes(
        "blocks.*", "transformer_blocks.*", _ATTENTION
    )
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers",),
        "comfyui": ("ComfyUI",),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=1.0),
        "Mochi-1": Flavor("genmo/mochi-1-preview", _SIZES, text_length=256, shift=1.0, resolution="480x848x37"),
    }

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__(transformer)
        self.transformer.rope._create_rope = rotary_embedding
        processor = partial(joint_attention, by_sequences=has_varlen_kernel())
        for block in self.blocks():
            block.attn1.processor = processor  # type: ignore[union-attr]

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


def has_varlen_kernel() -> bool:
    """Whether this process has a GPU with flash attention over sequences of different lengths."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def joint_attention(
    attn: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    *,
    by_sequences: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joint attention of video (B, N, D) and text (B, L, D') tokens. `attention_mask` (B, L) selects the text tokens.

    The results of padding tokens have no meaning, and no other token attends to them. `by_sequences` says that this GPU
    has the kernel of `attend_by_sequences`.
    """
    video = [attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)]
    text = [layer(encoder_hidden_states) for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
    video_q, video_k, video_v = (value.unflatten(2, (attn.heads, -1)) for value in video)  # (B, N, heads, D)
    text_q, text_k, text_v = (value.unflatten(2, (attn.heads, -1)) for value in text)
    q = torch.cat([_rotate(attn.norm_q(video_q), *image_rotary_emb), attn.norm_added_q(text_q)], dim=1)
    k = torch.cat([_rotate(attn.norm_k(video_k), *image_rotary_emb), attn.norm_added_k(text_k)], dim=1)
    v = torch.cat([video_v, text_v], dim=1)
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    attend = attend_by_sequences if by_sequences and q.is_cuda and is_half else attend_with_mask
    mixed = attend(q, k, v, attention_mask.bool()).flatten(2)  # (B, N + L, heads * D)
    video_out, text_out = mixed.split([hidden_states.shape[1], text_q.shape[1]], dim=1)
    return attn.to_out[0](video_out), attn.to_add_out(text_out) if hasattr(attn, "to_add_out") else text_out


def attend_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text_mask: torch.Tensor) -> torch.Tensor:
    """Attention of q, k and v (B, N + L, heads, D) that hides the text tokens outside `text_mask` (B, L)."""
    seen = F.pad(text_mask, (q.shape[1] - text_mask.shape[1], 0), value=True)  # (B, N + L)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen[:, None, None]
    )
    return mixed.transpose(1, 2)


def attend_by_sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text_mask: torch.Tensor) -> torch.Tensor:
    """The same without work for the pairs of a valid and a padding token. Valid text tokens come first.

    The tokens of the batch lie one after the other, B times the valid tokens of a sample and then its padding. Each of
    these 2 B runs is a sequence that attends to itself only. The padding's are short, and every result is defined.
    """
    num_tokens, num_padding = q.shape[1], text_mask.logical_not().sum(1)  # (B,)
    lengths = torch.stack([num_tokens - num_padding, num_padding], dim=1).flatten()  # (2 B,)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    mixed = varlen_attn(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, num_tokens, num_tokens)
    return mixed.unflatten(0, q.shape[:2])  # type: ignore[union-attr]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of x (B, N, heads, D) by angles (N, heads, D / 2)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
