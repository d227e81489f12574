# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Complete pipelines with random weights, a megabyte each, in the layout of published pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchditan.extras.published.families import family

_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


def clip_tokenizer() -> Any:
    """A CLIP tokenizer that knows letters alone."""
    from transformers import CLIPTokenizer

    words = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """A T5 tokenizer of letters and the space."""
    from transformers import T5Tokenizer

    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in _LETTERS)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def qwen_tokenizer() -> Any:
    """A Qwen tokenizer of letters and the space, with a chat template."""
    from transformers import Qwen2Tokenizer

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *_LETTERS]
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    vocabulary = {word: number for number, word in enumerate(words)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=words[1:3], chat_template=template)


def clip(width: int, *, projects: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=54,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config).eval()


def t5(width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=30, d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2, dropout_rate=0.0)
    return T5EncoderModel(config).eval()


def vae(channels: int = 16) -> Any:
    """An AutoencoderKL that makes latents of one eighth."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        norm_num_groups=2,
        latent_channels=channels,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def qwen3(width: int) -> Any:
    """As many layers as FLUX.2 reads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 28, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=30, num_key_value_heads=1, head_dim=8, **sizes)).eval()


def flux2_vae() -> Any:
    """An AutoencoderKLFlux2 whose latents have statistics."""
    from diffusers import AutoencoderKLFlux2

    model = AutoencoderKLFlux2(block_out_channels=[8, 8, 8, 8], norm_num_groups=2, layers_per_block=1)
    model.bn.running_mean.normal_(std=0.1)
    model.bn.running_var.uniform_(0.5, 2.0)
    return model.eval()


def transformer(name: str, flavor: str = "debugmodel", **overrides: Any) -> Any:
    """The transformer of a flavor with the weights that diffusers draws."""
    import diffusers

    cls = family(name)
    return getattr(diffusers, cls.model_class)(**{**cls.flavors[flavor].config, **overrides}).eval()


def flux(seed: int = 0, **overrides: Any) -> Any:
    """A FluxPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(seed)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=clip(16, projects=False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=t5_tokenizer(),
        vae=vae(),
        transformer=transformer("flux", **overrides),
    )


def flux2(seed: int = 0, *, is_distilled: bool = False) -> Any:
    """A Flux2KleinPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    torch.manual_seed(seed)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder=qwen3(16),
        tokenizer=qwen_tokenizer(),
        vae=flux2_vae(),
        transformer=transformer("flux2"),
        is_distilled=is_distilled,
    )


def sd3(seed: int = 0) -> Any:
    """A StableDiffusion3Pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    torch.manual_seed(seed)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip(8, projects=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(8, projects=True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(32),
        tokenizer_3=t5_tokenizer(),
        vae=vae(),
        transformer=transformer("sd3"),
    )


def sdxl(seed: int = 0) -> Any:
    """A StableDiffusionXLPipeline."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    torch.manual_seed(seed)
    return StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        text_encoder=clip(16, projects=False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(16, projects=True),
        tokenizer_2=clip_tokenizer(),
        vae=vae(channels=4),
        unet=transformer("sdxl"),
    )


def wan_vae(*, is_ti2v: bool = False) -> Any:
    """An AutoencoderKLWan, or that of Wan2.2-TI2V-5B: 48 channels at one sixteenth."""
    from diffusers import AutoencoderKLWan

    shape: dict[str, Any] = {"base_dim": 3, "z_dim": 16}
    if is_ti2v:
        shape = {"base_dim": 4, "z_dim": 48, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
        shape |= {"in_channels": 12, "out_channels": 12}
        shape |= {"latents_mean": torch.randn(48).tolist(), "latents_std": torch.rand(48).add(0.5).tolist()}
    sizes = {"dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return AutoencoderKLWan(**shape, **sizes).eval()


def wan(*, from_image: bool = False, is_ti2v: bool = False, seed: int = 0) -> Any:
    """A WanPipeline of Wan2.1 or of Wan2.2-TI2V-5B, or a WanImageToVideoPipeline."""
    import diffusers
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    torch.manual_seed(seed)
    flavor = "debugmodel-i2v" if from_image else "debugmodel-ti2v" if is_ti2v else "debugmodel"
    text = UMT5Config(vocab_size=30, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0)
    parts = {
        "tokenizer": t5_tokenizer(),
        "text_encoder": UMT5EncoderModel(text).eval(),
        "vae": wan_vae(is_ti2v=is_ti2v),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": transformer("wan", flavor),
    }
    if not from_image:
        return diffusers.WanPipeline(**parts, expand_timesteps=is_ti2v)
    seen = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=224, patch_size=14
    )
    return diffusers.WanImageToVideoPipeline(
        **parts, image_encoder=CLIPVisionModel(seen).eval(), image_processor=CLIPImageProcessorPil()
    )


def z_image(seed: int = 0) -> Any:
    """A ZImagePipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=30, num_key_value_heads=1, head_dim=8, **sizes)).eval(),
        tokenizer=qwen_tokenizer(),
        vae=vae(),
        transformer=transformer("z_image"),
    )


def save(pipeline: Any, folder: Path) -> Path:
    """Write a pipeline as the hub has it."""
    pipeline.save_pretrained(folder)
    return folder
