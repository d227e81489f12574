# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The native diffusion transformer (dit.py), the interface of a model (spec.py), and FLOPs.

To add an architecture, write a function like `build_dit_spec` and name it in `ARCHITECTURES` of registry.py. To add an
architecture of diffusers, add a file to extras/published/ (docs/extending.md).
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torchditan.config.options
from torchditan.errors import option_error
from torchditan.models.dit import FLAVORS, PRESETS, DiT, DiTConfig, flavor_size
from torchditan.models.spec import (
    ClassLabels,
    Condition,
    Conditioning,
    Head,
    ModelSpec,
    TensorSpec,
    TextEmbeddings,
    Unconditional,
)
from torchditan.registry import ARCHITECTURES, BLOCKS, FAMILIES, build, job_part, objective_kinds, registered, resolve

__all__ = [
    "ClassLabels",
    "Condition",
    "Conditioning",
    "Head",
    "ModelSpec",
    "TextEmbeddings",
    "Unconditional",
    "build_model_spec",
    "model_spec_of",
]


def build_dit_spec(
    config: torchditan.config.options.Model,
    *,
    sample_shape: tuple[int, ...],
    num_classes: int,
    scalars: Mapping[str, float] = MappingProxyType({}),
) -> ModelSpec:
    options = dict(PRESETS[config.preset])
    overrides = {option: getattr(config, option) for option in options}
    options |= {option: value for option, value in overrides.items() if value is not None}
    if options["norm_type"] == "fused_rmsnorm":
        options["norm_type"] = "rmsnorm"
    sizes = sizes_of(config)
    multiple = math.lcm(4, sizes["num_heads"]) if options["position"] == "sincos" else 4 * sizes["num_heads"]
    if sizes["width"] % multiple:
        right = f"with {sizes['num_heads']} heads, the width must be a multiple of {multiple}, not {sizes['width']}"
        raise option_error("model.overrides", config.overrides, right)
    _check_text(config, conditioning=str(options["conditioning"]))
    if config.text is not None:
        num_classes = 0  # a stand-in for captioned images may also have labels
    channels, height, width = sample_shape
    dit_config = DiTConfig(
        **sizes,
        patch_size=config.patch_size,
        input_channels=channels,
        image_size=(height, width),
        num_classes=num_classes,
        timestep_scale=config.timestep_scale,
        timestep_frequencies=config.timestep_frequencies,
        scalars=tuple(scalars.items()),
        block=block_name(config),
        patch_bottleneck=config.patch_bottleneck or 0,
        text=config.text,
        text_positions=config.text_positions,
        text_kernel=_text_kernel(config),
        text_blocks=config.text_blocks or 0,
        text_tokens=config.text_tokens or 0,
        text_width=config.text_width or 0,
        pooled_width=config.pooled_width or 0,
        **options,  # type: ignore[arg-type]
    )
    block = registered(BLOCKS, dit_config.block)
    if config.text == "joint" and not block.reads_text_jointly:
        raise option_error("model.block", config.block, "does not support --model.text joint; leave it out")
    if dit_config.conditioning not in block.conditionings:
        right = f"the block {dit_config.block} does not support it; must be one of {', '.join(block.conditionings)}"
        raise option_error("model.conditioning", dit_config.conditioning, right)
    for option, right in block.option_mistakes(dit_config):
        raise option_error(option, getattr(config, option.removeprefix("model.")), right)
    return ModelSpec(
        name="dit",
        flavor=config.flavor,
        flavors=list(FLAVORS),
        config=dit_config,
        build=lambda: DiT(dit_config),
        blocks=operator.attrgetter("all_blocks"),
        conditioning=_conditioning(dit_config),
        sample_shape=sample_shape,
        learn_sigma=dit_config.learn_sigma,
        num_tokens=dit_config.num_patches,
        features=[f"blocks.{i}" for i in range(dit_config.depth)],
        scalars=tuple(scalars),
        can_have_heads=True,
    )


def block_name(config: torchditan.config.options.Model) -> str:
    """The name in `BLOCKS` of the model's block. Joint text has its own."""
    return "joint" if config.text == "joint" and config.block == "dit" else config.block


def sizes_of(config: torchditan.config.options.Model) -> dict[str, Any]:
    """Depth, width and number of heads of a flavor of DiT, with the overrides.

    Raises:
        ConfigError: an override is not one of them with a positive integer.
    """
    sizes = dataclasses.asdict(flavor_size(config.flavor, config.preset))
    for text in config.overrides:
        name, _, value = text.partition("=")
        if name not in sizes or not value.isdecimal() or int(value) < 1:
            right = f"must be one of {', '.join(sizes)} and a positive integer, such as depth=24"
            raise option_error("model.overrides", text, right)
        sizes[name] = int(value)
    return sizes


def _check_text(config: torchditan.config.options.Model, *, conditioning: str) -> None:
    """A text model needs the sizes of the embeddings. Cross-attention requires adaLN for the timestep."""
    if config.text == "cross_attention" and conditioning == "in_context":
        right = "needs adaLN for the timestep; must be in_context with --model.conditioning in_context"
        raise option_error("model.text", config.text, right)
    for option in ("text_tokens", "text_width"):
        if config.text is not None and getattr(config, option) is None:
            right = "must be set if the data has no captions, as for the dataset dummy"
            raise option_error(f"model.{option}", None, right)


def _text_kernel(config: torchditan.config.options.Model) -> int:
    if not config.text_positions:
        return 0
    if config.text_kernel is None:
        return 5 if config.text_blocks else 0
    return config.text_kernel


def _conditioning(config: DiTConfig) -> Conditioning:
    if config.text is None:
        return ClassLabels(config.num_classes) if config.num_classes else Unconditional()
    tensors = {"prompt_embeds": TensorSpec((config.text_tokens, config.text_width))}
    if config.pooled_width:
        tensors["pooled_prompt_embeds"] = TensorSpec((config.pooled_width,))
    return TextEmbeddings(tensors)


def build_model_spec(
    config: torchditan.config.options.Model,
    *,
    sample_shape: tuple[int, ...],
    num_classes: int,
    scalars: Mapping[str, float] = MappingProxyType({}),
    lora: torchditan.config.options.LoRA | None = None,
    quantize: torchditan.config.options.Quantize | None = None,
    text_length: int | None = None,
    embedded_guidance: float = 1.0,
) -> ModelSpec:
    """Resolve [model] for samples of one shape, without building the model.

    Args:
        config: the [model] section; the preset or the published flavor sets the options that are left open.
        sample_shape: (C, H, W) of the dataset's samples, (C, F, H, W) for videos.
        num_classes: number of labels, 0 for an unconditional model; unused by published models.
        scalars: scalar conditions of the objective (`Objective.scalars`); `build_objective` refuses a model without.
        lora, quantize: sections of those names, for published models.
        text_length: tokens per caption; None: that of the published flavor.
        embedded_guidance: guidance scale for models that embed one.

    Raises:
        ConfigError: unknown flavor, sizes that do not fit together, an option without effect.
    """
    if config.input_channels not in (None, sample_shape[0]):
        right = f"samples have {sample_shape[0]} channel(s); leave it out"
        raise option_error("model.input_channels", config.input_channels, right)
    if config.name in FAMILIES:
        return job_part("model.name")(
            config,
            sample_shape=sample_shape,
            lora=lora or torchditan.config.options.LoRA(),
            quantize=quantize or torchditan.config.options.Quantize(),
            text_length=text_length,
            embedded_guidance=embedded_guidance,
        )
    if len(sample_shape) != 3:
        raise option_error("model.name", config.name, "needs images (C, H, W), but these samples are videos")
    _, height, width = sample_shape
    if height % config.patch_size or width % config.patch_size:
        right = f"must divide the samples' height and width, {height} x {width}"
        raise option_error("model.patch_size", config.patch_size, right)
    found, options = resolve(ARCHITECTURES, "model.name", config.name)
    given: dict[str, Any] = {"sample_shape": sample_shape, "num_classes": num_classes}
    if scalars or "scalars" in inspect.signature(found).parameters:  # `build_objective` refuses an architecture without
        given["scalars"] = scalars
    spec: ModelSpec = build(found, "model.name", config.name, config, given=given, **options)
    return spec


def scalars_of(config: torchditan.config.options.Diffusion) -> dict[str, float]:
    """The scalar conditions of the objective and its ingredients: name -> factor in the embedding."""
    found: dict[str, float] = {}
    for kind in objective_kinds(config.objective, config.ingredients):
        found |= kind.scalars(config)
    return found


def model_spec_of(
    config: torchditan.config.options.Config, *, sample_shape: tuple[int, ...], num_classes: int
) -> ModelSpec:
    """`build_model_spec` with the arguments from a job's configuration."""
    return build_model_spec(
        config.model,
        sample_shape=sample_shape,
        num_classes=num_classes,
        scalars=scalars_of(config.diffusion),
        lora=config.lora,
        quantize=config.quantize,
        text_length=config.text_encoder.max_length,
        embedded_guidance=config.diffusion.embedded_guidance,
    )
