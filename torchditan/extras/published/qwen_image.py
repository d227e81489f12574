# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Qwen-Image (Wu et al. 2025, arXiv 2508.02324): MM-DiT over packed 2 x 2 latent cells and masked Qwen2.5-VL tokens.

Its pipeline shifts timesteps by the size of the image, as ours does. It also stretches them so that the last step
starts at noise level 0.02. Ours are not stretched. The scheduler of Qwen-Image-2512 was not read: its flavor has the
shift of Qwen-Image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.extras.published.base import Flavor, PublishedModel, called_with
from torchditan.extras.published.flux import exponential_shift, pack, unpack
from torchditan.models.spec import Condition, TensorSpec

_SIZES = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": [16, 56, 56],
}
_TINY = {
    **_SIZES,
    "num_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": [8, 12, 12],
}


class QwenImage(PublishedModel):
    name = "qwen_image"
    model_class = "QwenImageTransformer2DModel"
    pipeline_class = "QwenImagePipeline"
    caption_tokenizer = None
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    sets_hooks = True
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {"diffusers": ("diffusers", "ComfyUI")}
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8),
        "Qwen-Image": Flavor("Qwen/Qwen-Image", _SIZES, text_length=512, resolution="1024x1024"),
        "Qwen-Image-2512": Flavor("Qwen/Qwen-Image-2512", _SIZES, text_length=512, resolution="1024x1024"),
    }

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__(transformer)
        for block in self.blocks():
            block.attn.processor = MaskedAttention(block.attn.processor)  # type: ignore[union-attr]

    @classmethod
    def latent_channels(cls, config: Mapping[str, Any]) -> int:
        return int(config["out_channels"])

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {
            "prompt_embeds": TensorSpec((text_length, config["joint_attention_dim"])),
            "prompt_embeds_mask": TensorSpec((text_length,), torch.bool),
        }

    @classmethod
    def shift(cls, flavor: Flavor, *, num_tokens: int) -> float:
        return exponential_shift(num_tokens, max_tokens=8192, max_shift=0.9)

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, mask = pipeline.encode_prompt(captions, max_sequence_length=max_length)
        if mask is None:  # captions of equal length need no mask
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        missing = max_length - tokens.shape[1]
        return {
            "prompt_embeds": F.pad(tokens, (0, 0, 0, missing)),
            "prompt_embeds_mask": F.pad(mask.bool(), (0, missing)),
        }

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        height, width = x.shape[-2:]
        with called_with(self.transformer.time_text_embed, noise_level):
            packed = self.transformer(
                hidden_states=pack(x),
                timestep=noise_level,
                encoder_hidden_states=cond["prompt_embeds"],
                attention_kwargs={"text_mask": cond["prompt_embeds_mask"].bool()},
                img_shapes=[[(1, height // 2, width // 2)]] * x.shape[0],
                return_dict=False,
            )[0]
        return unpack(packed, height, width)


class MaskedAttention:
    """Attention of a block that gets the mask (B, L) bool of text tokens through `attention_kwargs`.

    If the transformer itself got the mask, it would compute the lengths of the captions, which it does not use. That
    computation copies a number from the host, so the host would wait for the device in every forward.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        text_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert encoder_hidden_states_mask is None
        return self.processor(
            attn,
            hidden_states,
            encoder_hidden_states,
            encoder_hidden_states_mask=text_mask,
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        )
