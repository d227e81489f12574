# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Wan2.1 (Wan Team 2025, arXiv 2503.20314): videos from text, or from text and a first frame.
Wan2.2-TI2V-5B: videos from text.

Their pipeline samples with UniPC in even steps down to noise level 0.001 and rounds timesteps down to integers. Ours
are exact and go down to 0. The shift depends on the resolution of the flavor: 3 for 480p, 5 for 720p.

The pipeline of Wan2.2-TI2V-5B gives each token its own timestep; all are equal unless a first frame is given. Here one
timestep is given for all tokens. Its autoencoder has 48 channels and cells of 16 x 16 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from torchditan.errors import option_error
from torchditan.extras.published.base import Flavor, PublishedModel
from torchditan.extras.published.lora_layers import with_prefixes
from torchditan.models.spec import Condition, TensorSpec

_FROM_IMAGE_PIPELINE = "WanImageToVideoPipeline"
_IMAGE_TOKENS = 257
_TEXT_TOKENS = 512
_SIZES = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
_SMALL = {**_SIZES, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_TI2V = {
    **_SIZES,
    "num_attention_heads": 24,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
    "num_layers": 30,
}
_FROM_IMAGE = {**_SIZES, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_TINY = {
    **_SIZES,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 128,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
_TINY_TI2V = {**_TINY, "in_channels": 48, "out_channels": 48}
_TINY_FROM_IMAGE = {**_TINY, "in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 64}
_BLOCK = {
    **{
        f"{original}.{name}": (f"{ours}.{part}",)
        for original, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, part in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    },
    "cross_attn.k_img": ("attn2.add_k_proj",),
    "cross_attn.v_img": ("attn2.add_v_proj",),
    "ffn.0": ("ffn.net.0.proj",),
    "ffn.2": ("ffn.net.2",),
}
_REST = {
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
    "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
    "head.head": ("proj_out",),
}


class Wan(PublishedModel):
    name = "wan"
    model_class = "WanTransformer3DModel"
    pipeline_class = "WanPipeline"
    block_lists = ("blocks",)
    temporal_downsampling = 4
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **with_prefixes("blocks.*", "blocks.*", _BLOCK),
        **_REST,
    }
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "diffusers": ("diffusers",),
        "comfyui": ("diffusers", "ComfyUI"),
    }
    kept = frozenset({"image_embeds", "condition"})
    flavors: ClassVar[dict[str, Flavor]] = {
        "debugmodel": Flavor("", _TINY, text_length=8, shift=3.0),
        "debugmodel-i2v": Flavor(
            "", _TINY_FROM_IMAGE, text_length=_TEXT_TOKENS, shift=3.0, pipeline_class=_FROM_IMAGE_PIPELINE
        ),
        "debugmodel-ti2v": Flavor("", _TINY_TI2V, text_length=8, shift=5.0, downsampling=16),
        "Wan2.1-T2V-1.3B": Flavor(
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", _SMALL, text_length=_TEXT_TOKENS, shift=3.0, resolution="480x832x81"
        ),
        "Wan2.1-T2V-14B": Flavor(
            "Wan-AI/Wan2.1-T2V-14B-Diffusers", _SIZES, text_length=_TEXT_TOKENS, shift=5.0, resolution="480x832x81"
        ),
        "Wan2.1-I2V-14B": Flavor(
            "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
            _FROM_IMAGE,
            text_length=_TEXT_TOKENS,
            shift=3.0,
            pipeline_class=_FROM_IMAGE_PIPELINE,
            resolution="480x832x81",
        ),
        "Wan2.2-TI2V-5B": Flavor(
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            _TI2V,
            text_length=_TEXT_TOKENS,
            shift=5.0,
            resolution="704x1280x121",
            downsampling=16,
        ),
    }

    @classmethod
    def latent_channels(cls, config: Mapping[str, Any]) -> int:
        return int(config["out_channels"])

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(config["patch_size"])

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        """Caption tokens. Image-to-video flavors add CLIP tokens of the first frame and its `first_frame_condition`."""
        text = {"prompt_embeds": TensorSpec((text_length, config["text_dim"]))}
        if config.get("image_dim") is None:
            return text
        if text_length != _TEXT_TOKENS:  # its cross-attention separates image from text tokens by this number
            raise option_error("text_encoder.max_length", text_length, f"must be {_TEXT_TOKENS} for image-to-video")
        channels = config["in_channels"] - config["out_channels"]
        return {
            **text,
            "image_embeds": TensorSpec((_IMAGE_TOKENS, config["image_dim"])),
            "condition": TensorSpec((channels, *sample_shape[1:])),
        }

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        tokens, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"prompt_embeds": tokens}

    @classmethod
    def encode_samples(
        cls, pipeline: Any, encode: Callable[[torch.Tensor], torch.Tensor], samples: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The CLIP embedding of the first frame, and latents of a video with that first frame and grey others."""
        from PIL import Image

        first = torch.cat([samples[:, :, :1], torch.zeros_like(samples[:, :, 1:])], dim=2)
        pixels = ((samples[:, :, 0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
        images = [Image.fromarray(frame.numpy()) for frame in pixels]
        return {
            "image_embeds": pipeline.encode_image(images, pipeline.image_encoder.device),
            "condition": first_frame_condition(encode(first)),
        }

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        return self.transformer(
            hidden_states=torch.cat([x, cond["condition"]], dim=1) if "condition" in cond else x,
            timestep=noise_level * 1000,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_hidden_states_image=cond.get("image_embeds"),
            return_dict=False,
        )[0]


def first_frame_condition(latents: torch.Tensor) -> torch.Tensor:
    """Second input of an image-to-video model, next to x: (B, C, F, H, W) -> (B, 4 + C, F, H, W).

    Args:
        latents: normalised latents of a video whose first frame is given and whose other frames are grey (0).

    Returns:
        4 channels (one per frame in a latent frame) that are 1 in the first latent frame and 0 elsewhere, then the
        latents.
    """
    batch, _, *size = latents.shape
    mask = latents.new_zeros(batch, Wan.temporal_downsampling, *size)
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)
