# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLUX.2 (Black Forest Labs 2025): dev, which embeds a guidance scale, and klein, without one.

Notable:
- latents have 128 channels at 1/16, one token per cell; its autoencoder does the 2 x 2 fold. Rotary positions have four
  axes: a reference image's number (0 here), row, column, and the number of a text token;
- text is the concatenation of three hidden states of a language model: Qwen3 (klein) or Mistral 3 with a system message
  (dev). Captions are padded to `text_length` and the padding is attended, so a caption has 7.5 MiB in a bfloat16 cache
  for klein-4B, 12 for klein-9B and 15 for dev;
- its pipelines sample with a shift that depends on the tokens and on the number of steps (`sampling_shift`): at 1024 px
  7.6 for 50 steps and 9.9 for 4. It makes up for few steps: for 200 it is FLUX.1's, 3.2 at 1024 px, and training uses
  that one. diffusers' training script has no shift (`--diffusion.timestep_shift 1`);
- klein has a base and a distilled version of each size, with the same configuration. Flavors name the base. Train it,
  and use the LoRA with either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.flux import exponential_shift, position_ids
from torchditan.extras.published.lora_layers import ADDED_QKV, QKV, with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_DEV = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 128,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": True,
}
_KLEIN = {**_DEV, "guidance_embeds": False}
_KLEIN_4B = {
    **_KLEIN,
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
}
_KLEIN_9B = {
    **_KLEIN,
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
}
_TINY = {
    **_KLEIN,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": [8, 8, 8, 8],
}
_DEV_PIPELINE = "Flux2Pipeline"
_DOUBLE = {
    "img_attn.qkv": tuple(f"attn.{name}" for name in QKV),
    "txt_attn.qkv": tuple(f"attn.{name}" for name in ADDED_QKV),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
_SINGLE = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}
_DROPPED = {
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
}


class Flux2(PublishedModel):
    name = "flux2"
    model_class = "Flux2Transformer2DModel"
    pipeline_class = "Flux2KleinPipeline"
    caption_tokenizer = None
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    latent_downsampling = 16
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj", "attn.to_out")
    embeds_guidance = True
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **with_prefixes("double_blocks.*", "transformer_blocks.*", _DOUBLE),
        **with_prefixes("single_blocks.*", "single_transformer_blocks.*", _SINGLE),
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "final_layer.linear": ("proj_out",),
        **_DROPPED,
    }
    dropped_layers = tuple(_DROPPED)  # by ComfyUI in diffusers' names, by diffusers in kohya's
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers", "ComfyUI"),
        "kohya": ("diffusers", "musubi-tuner", "ComfyUI"),
    }
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8),
        "debugmodel-dev": Flavor("", {**_TINY, "guidance_embeds": True}, text_length=8, pipeline_class=_DEV_PIPELINE),
        "FLUX.2-klein-4B": Flavor(
            "black-forest-labs/FLUX.2-klein-base-4B", _KLEIN_4B, text_length=512, resolution="1024x1024"
        ),
        "FLUX.2-klein-9B": Flavor(
            "black-forest-labs/FLUX.2-klein-base-9B", _KLEIN_9B, text_length=512, resolution="1024x1024"
        ),
        "FLUX.2-dev": Flavor(
            "black-forest-labs/FLUX.2-dev",
            _DEV,
            text_length=512,
            pipeline_class=_DEV_PIPELINE,
            resolution="1024x1024",
        ),
    }

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        return {"prompt_embeds": TensorSpec((text_length, config["joint_attention_dim"]))}

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        return (1, 1)

    @classmethod
    def shift(cls, flavor: Flavor, *, num_tokens: int) -> float:
        return exponential_shift(num_tokens)

    @classmethod
    def sampling_shift(cls, *, num_tokens: int) -> Callable[[int], float]:
        return functools.partial(empirical_shift, num_tokens)

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, _ = pipeline.encode_prompt(captions, max_sequence_length=max_length)
        return {"prompt_embeds": tokens}

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        height, width = x.shape[-2:]
        text = cond["prompt_embeds"]
        tokens = self.transformer(
            hidden_states=x.flatten(2).transpose(1, 2),  # (B, H W, C)
            encoder_hidden_states=text,
            timestep=noise_level,
            img_ids=F.pad(position_ids(height, width, device=x.device), (0, 1)),
            txt_ids=F.pad(torch.arange(text.shape[1], device=x.device)[:, None], (3, 0)),
            guidance=cond.get("guidance"),
            return_dict=False,
        )[0]
        return tokens.transpose(1, 2).unflatten(2, (height, width))


def empirical_shift(num_tokens: int, num_steps: int) -> float:
    """exp(mu) of its pipelines: mu is linear in the tokens, and up to 4300 tokens also in the steps.

    The two lines over the tokens are those of 10 and 200 steps.
    """
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return math.exp(at_200)
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return math.exp(at_10 + (at_200 - at_10) * (num_steps - 10) / 190)
