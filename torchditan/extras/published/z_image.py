# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Z-Image (Alibaba Tongyi 2025, arXiv 2511.22699): one stream of image and Qwen3 tokens, after two short refiners.

Notable:
- its timestep grows towards data and its prediction is x - noise, as in our models;
- image and caption are padded to multiples of 32 with learned tokens, which are attended. The positions of the image
  start after the padded caption. Only what pads a caption to the length of others is masked;
- diffusers pads each caption by its own length, which neither one compiled graph nor the meta device supports. Here
  shapes are fixed: lengths and positions are tensors, and one mask hides the rest;
- diffusers rotates queries and keys as complex numbers, which Inductor does not compile on a CPU. Pairs of real
  numbers give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import QKV, with_prefixes
from torchditan.models.dit import patchify, unpatchify
from torchditan.models.spec import Condition, TensorSpec

_SIZES = {
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "cap_feat_dim": 2560,
    "rope_theta": 256.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
_TINY = {
    **_SIZES,
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 32,
    "axes_dims": [8, 12, 12],
}
_MULTIPLE = 32
"""Image and caption have multiples of this number of tokens."""
_BLOCKS = ("noise_refiner", "context_refiner", "layers")
_LINEARS = (*(f"attention.{name}" for name in (*QKV, "to_out.0")), *(f"feed_forward.w{i}" for i in (1, 2, 3)))
_BLOCK = {
    **{name: (name,) for name in (*_LINEARS, "adaLN_modulation.0")},
    "attention.qkv": tuple(f"attention.{name}" for name in QKV),  # in the publisher's files, which LoRAs seldom follow
    "attention.out": ("attention.to_out.0",),
}


class ZImage(PublishedModel):
    name = "z_image"
    model_class = "ZImageTransformer2DModel"
    pipeline_class = "ZImagePipeline"
    caption_tokenizer = None
    block_lists = _BLOCKS
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: parts for block in _BLOCKS for name, parts in with_prefixes(f"{block}.*", f"{block}.*", _BLOCK).items()
    }
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers", "ComfyUI"),
        "kohya": ("diffusers", "musubi-tuner"),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=3.0),
        "Z-Image": Flavor("Tongyi-MAI/Z-Image", _SIZES, text_length=256, shift=6.0, resolution="1024x1024"),
        "Z-Image-Turbo": Flavor(
            "Tongyi-MAI/Z-Image-Turbo",
            _SIZES,
            text_length=256,
            shift=3.0,
            is_distilled=True,
            resolution="1024x1024",
        ),
    }

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__(transformer)
        for block in self.blocks():
            block.attention.processor = RotatedAttention()  # type: ignore[union-attr]
        rope = self.transformer.rope_embedder
        tables = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, rope.theta)
        for axis, table in enumerate(tables):  # (positions, D / 2) complex, by the float64 formula of diffusers
            self.register_buffer(f"rotation_{axis}", torch.view_as_real(table), persistent=False)
        self._filled_buffers = dict(self.named_buffers())

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((text_length, config["cap_feat_dim"])),
            "prompt_embeds_mask": TensorSpec((text_length,), torch.bool),
        }

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        encoded, _ = pipeline.encode_prompt(
            list(captions),  # which it overwrites
            do_classifier_free_guidance=False,
            max_sequence_length=max_length,
        )
        lengths = torch.tensor([len(tokens) for tokens in encoded], device=encoded[0].device)
        return {
            "prompt_embeds": torch.stack([F.pad(tokens, (0, 0, 0, max_length - len(tokens))) for tokens in encoded]),
            "prompt_embeds_mask": torch.arange(max_length, device=lengths.device) < lengths[:, None],
        }

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        model, (height, width) = self.transformer, x.shape[-2:]
        is_valid = cond["prompt_embeds_mask"]
        lengths = is_valid.sum(1).clamp(min=1)  # an encoded caption is never empty; that of a benchmark is
        ends = lengths + -lengths % _MULTIPLE  # (B,): lengths of the padded captions
        time = model.t_embedder((1 - noise_level) * model.t_scale)  # (B, 256)

        image = _pad(model.all_x_embedder["2-1"](patchify(x, 2)), model.x_pad_token)  # (B, N, D)
        positions = image_positions(ends + 1, height // 2, width // 2)
        image_rotation = self._rotation(F.pad(positions, (0, 0, 0, image.shape[1] - positions.shape[1])))
        for block in model.noise_refiner:
            image = block(image, None, image_rotation, time)

        text = torch.where(is_valid[..., None], model.cap_embedder(cond["prompt_embeds"]), model.cap_pad_token)
        text = _pad(text, model.cap_pad_token)  # (B, L, D)
        index = torch.arange(text.shape[1], device=x.device)
        text_rotation = self._rotation(F.pad(index[:, None] + 1, (0, 2))).expand(len(x), -1, -1, -1)
        is_attended = (index < ends[:, None])[:, None, None]  # (B, 1, 1, L)
        for block in model.context_refiner:
            text = block(text, is_attended, text_rotation)

        tokens = torch.cat([image, text], dim=1)
        rotation = torch.cat([image_rotation, text_rotation], dim=1)
        is_attended = F.pad(is_attended, (image.shape[1], 0), value=True)
        for block in model.layers:
            tokens = block(tokens, is_attended, rotation, time)
        tokens = model.all_final_layer["2-1"](tokens[:, : positions.shape[1]], time)
        return -unpatchify(tokens, 2, height, width)

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines (..., D / 2, 2) float32 of positions (..., 3)."""
        parts = [self.get_buffer(f"rotation_{axis}")[at] for axis, at in enumerate(positions.unbind(-1))]
        return torch.cat(parts, dim=-2)


class RotatedAttention:
    """Attention of a block that gets the rotation of each token (B, N, D / 2, 2) as real numbers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert encoder_hidden_states is None and freqs_cis is not None
        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )  # (B, N, heads, D)
        q, k = (_rotate(value, freqs_cis[:, :, None]) for value in (attn.norm_q(q), attn.norm_k(k)))
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attention_mask
        )
        return attn.to_out[0](mixed.transpose(1, 2).flatten(2))


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of x (B, N, heads, D) by cosines and sines (B, N, 1, D / 2, 2)."""
    (even, odd), (cos, sin) = x.float().unflatten(-1, (-1, 2)).unbind(-1), rotation.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _pad(tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Tokens (B, N, D), followed by copies of `padding` (1, D) up to a multiple of 32."""
    return torch.cat([tokens, padding.expand(len(tokens), -tokens.shape[1] % _MULTIPLE, -1)], dim=1)


def image_positions(start: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(B, rows * columns, 3): `start` (B,) of the sample, row and column of every token."""
    row = torch.arange(rows, device=start.device).repeat_interleave(columns)
    column = torch.arange(columns, device=start.device).repeat(rows)
    return torch.stack(torch.broadcast_tensors(start[:, None], row, column), dim=-1)
