# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published diffusion transformers by family, through diffusers: from the options of [model] to a `ModelSpec`.

To add a family, write a file like flux2.py, here or in a package of your own (docs/extending.md).
"""

from __future__ import annotations

import functools
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import torchditan.config.options
from torchditan.errors import option_error
from torchditan.extras.published.base import (
    Flavor,
    PublishedModel,
    build_transformer,
    draw_weight,
    require,
    sizes_of_class,
)
from torchditan.extras.published.int8 import base_names, fill_parameter, quantize_base
from torchditan.extras.published.lora import (
    add_lora,
    fill_adapter,
    init_lora,
    load_assistant,
    set_active_adapters,
    without_assistant,
)
from torchditan.extras.published.lora_file import AdapterWeights
from torchditan.extras.published.stored_weights import (
    PublishedWeights,
    check_names,
    find_lora,
    find_published,
)
from torchditan.models.spec import ModelSpec, TextEmbeddings
from torchditan.registry import FAMILIES, registered


def family(name: str) -> type[PublishedModel]:
    """The class of a family by its `model.name`."""
    return registered(FAMILIES, name)


def patch_size_of(config: torchditan.config.options.Model) -> tuple[int, ...]:
    """Latent cells per token of a flavor, along each dimension of a sample after the channels."""
    cls = family(config.name)
    return cls.patch_size(_sizes(cls, cls.flavors[config.flavor], None, config.overrides))


def build_published_spec(
    config: torchditan.config.options.Model,
    *,
    sample_shape: tuple[int, ...],
    lora: torchditan.config.options.LoRA,
    quantize: torchditan.config.options.Quantize,
    text_length: int | None,
    embedded_guidance: float,
) -> ModelSpec:
    """Resolve [model] for latents of one shape. Locates the weights but builds nothing large.

    Args:
        config: if its `path` is not a local folder or file, it is looked up on the hub.
        sample_shape: (C, H, W) of a latent, or (C, F, H, W).
        lora: rank 0 trains all weights.
        quantize: how the weights under a LoRA are stored.
        text_length: tokens of a caption. None: the default of the flavor.
        embedded_guidance: guidance scale for models that embed one.

    Raises:
        ConfigError: the sizes do not fit together, or the weights are not available.
    """
    cls = family(config.name)
    flavor = cls.flavors[config.flavor]
    weights = None if config.path is None else find_published(config.path, subfolder=cls.subfolder)
    sizes = _sizes(cls, flavor, weights, config.overrides)
    if lora.rank and lora.assistant_path is not None:
        lora = replace(lora, assistant_path=str(find_lora(lora.assistant_path)))
    recipe = Recipe(cls, sizes, weights, lora=lora, quantize=quantize)
    _check_sample(cls, sizes, sample_shape, config=config)
    patches = cls.patch_size(sizes)
    num_tokens = math.prod(size // patch for size, patch in zip(sample_shape[1:], patches, strict=True))
    length = text_length or flavor.text_length
    tensors = cls.tensors(sizes, sample_shape=sample_shape, text_length=length)
    guides = cls.embeds_guidance and sizes.get("guidance_embeds", False)
    return ModelSpec(
        name=config.name,
        flavor=config.flavor,
        flavors=list(cls.flavors),
        config=sizes,
        build=recipe.build,
        blocks=lambda model: cast(PublishedModel, model).blocks(),
        conditioning=TextEmbeddings(tensors, kept=cls.kept, guidance=embedded_guidance if guides else None),
        sample_shape=sample_shape,
        learn_sigma=False,
        num_tokens=num_tokens,
        timestep_shift=cls.shift(flavor, num_tokens=num_tokens),
        sampling_shift=cls.sampling_shift(num_tokens=num_tokens),
        is_one_graph=not cls.sets_hooks,
        init_unsaved=_init_all if lora.rank else _fill_buffers,
        turn_off_adapter=_turn_off_lora if lora.rank else None,
        restore_published=None if weights is None else _without_lora if lora.rank else _init_all,
        is_sampled_in_half=True,
        sampling=_without_assistant if lora.assistant_path else lambda model: nullcontext(),
        warning=None if weights is None or lora.assistant_path else _distillation(flavor, weights, path=config.path),
    )


def _distillation(flavor: Flavor, weights: PublishedWeights, *, path: str | None) -> str | None:
    """Warning if plain training takes away from these weights that they sample in a few steps."""
    if flavor.is_distilled:
        remedy = "train a LoRA with --lora.assistant_path"
    elif weights.is_distilled():
        draw = f"torchditan generate RUN --model.path {path} --sampling.num_steps 4 --sampling.guidance_scale 1"
        remedy = f"train a LoRA of its base, {flavor.hub_name}, and use it with the distilled model: {draw}"
    else:
        return None
    return f"warning: {path} is distilled to a few steps, which training undoes; {remedy}"


def _init_all(model: nn.Module, seed: int) -> None:
    cast(PublishedModel, model).init_weights(seed)


def _fill_buffers(model: nn.Module, seed: int) -> None:
    cast(PublishedModel, model).fill_buffers()


def _turn_off_lora(model: nn.Module) -> None:
    set_active_adapters(model, [])


def _without_lora(model: nn.Module, seed: int) -> None:
    _turn_off_lora(model)


def _without_assistant(model: nn.Module) -> AbstractContextManager[None]:
    return without_assistant(cast(PublishedModel, model).transformer)


@dataclass(frozen=True)
class Recipe:
    """Builds one model and fills in its weights."""

    cls: type[PublishedModel]
    sizes: dict[str, Any]
    weights: PublishedWeights | None
    lora: torchditan.config.options.LoRA
    quantize: torchditan.config.options.Quantize

    def build(self) -> nn.Module:
        """The model with its parameters on the meta device. With a LoRA it is frozen, quantised and adapted."""
        model = self.cls(self._build_transformer())
        assistant = self._adapt(model) if self.lora.rank else None
        model.init_weights = functools.partial(self.init_weights, model, assistant)
        return model

    def _build_transformer(self) -> nn.Module:
        """On meta. A folder whose config.json and files differ is refused before memory is allocated for it."""
        if self.weights is None or self.weights.is_file:
            return build_transformer(self.cls.model_class, self.sizes)
        found = self.weights.shapes()
        for name, value in self.sizes.items():
            if name.endswith("layers") and isinstance(value, int) and value > len(found):
                right = f"its config.json has {name} = {value}, and its files have {len(found)} tensors"
                raise option_error("model.path", str(self.weights.path), right)
        transformer = build_transformer(self.cls.model_class, self.sizes)
        buffers = {name: buffer.shape for name, buffer in transformer.named_buffers()}
        parameters = {name: shape for name, shape in found.items() if buffers.get(name) != shape}
        check_names(base_parameters(transformer), parameters, path=str(self.weights.path))
        return transformer

    def _adapt(self, model: PublishedModel) -> AdapterWeights | None:
        """Freeze the weights, quantise them as configured, and add the adapters. Returns the assistant's weights."""
        require("peft")
        lora, transformer = self.lora, model.transformer
        quantize_base(transformer, model.blocks(), base=self.quantize.base)
        add_lora(
            transformer,
            rank=lora.rank,
            alpha=lora.rank if lora.alpha is None else lora.alpha,
            target_modules=lora.target_modules or self.cls.lora_targets,
        )
        if lora.assistant_path is None:
            return None
        return load_assistant(transformer, Path(lora.assistant_path), table=self.cls.original_layers)

    def init_weights(self, model: PublishedModel, assistant: AdapterWeights | None, seed: int) -> None:
        """Fill every parameter and buffer, from the files or from (seed, name)."""
        model.fill_buffers()
        transformer = model.transformer
        if self.weights is None:
            self._draw(transformer, seed)
        else:
            self._read(transformer)
        if self.lora.rank:
            init_lora(transformer, seed)
        if assistant is not None:
            fill_adapter(transformer, assistant)

    def _draw(self, transformer: nn.Module, seed: int) -> None:
        norms = {f"{name}.weight" for name, module in transformer.named_modules() if "Norm" in type(module).__name__}
        for name, shape in base_parameters(transformer).items():
            fill_parameter(transformer, name, draw_weight(seed, name, shape, is_norm=name in norms))

    @torch.no_grad()
    def _read(self, transformer: nn.Module) -> None:
        assert self.weights is not None
        expected, found = base_parameters(transformer), {}
        buffers = {name for name, _ in transformer.named_buffers()}
        for name, value in self.weights.tensors(model_class=self.cls.model_class, config=self.sizes):
            if name in buffers and transformer.get_buffer(name).shape == value.shape:
                transformer.get_buffer(name).copy_(value)  # a position table, with the rounding of the publisher
                continue
            found[name] = value.shape
            if expected.get(name) == value.shape:
                fill_parameter(transformer, name, value.float())
        check_names(expected, found, path=str(self.weights.path))


def base_parameters(transformer: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the published parameters, by their published names."""
    buffers = {name for name, _ in transformer.named_buffers()}
    state = {name.replace(".base_layer.", "."): value.shape for name, value in transformer.state_dict().items()}
    return {name: state[name] for name in base_names(transformer) if name not in buffers}


def _check_stored(cls: type[PublishedModel], flavor: Flavor, weights: PublishedWeights, stored: dict[str, Any]) -> None:
    """Check that the folder holds a model of this family that takes and predicts what the flavor does.

    Raises:
        ConfigError: the folder holds another model.
    """
    path = str(weights.path)
    if stored.get("_class_name", cls.model_class) != cls.model_class:
        right = f"is a {stored['_class_name']}; model.name {cls.name} needs a {cls.model_class}"
        raise option_error("model.path", path, right)
    defaults = sizes_of_class(cls.model_class)
    for name in ("guidance_embeds", "image_dim"):
        there, here = (sizes.get(name, defaults.get(name)) or False for sizes in (stored, flavor.config))
        if bool(there) != bool(here):
            right = f"has {name} = {json.dumps(there)}, which is another flavor of {cls.name}"
            raise option_error("model.path", path, right)
    if cls.objective == "ddpm" and (prediction := weights.prediction_type()) not in (None, "epsilon"):
        right = f"has prediction_type {prediction} in its scheduler, which cannot be trained; must be epsilon"
        raise option_error("model.path", path, right)


def _sizes(
    cls: type[PublishedModel], flavor: Flavor, weights: PublishedWeights | None, overrides: list[str]
) -> dict[str, Any]:
    """Sizes of the flavor, updated with the weights' config.json (which may lack some), then with the overrides."""
    sizes = dict(flavor.config)
    if weights is not None and (stored := weights.config()) is not None:
        _check_stored(cls, flavor, weights, stored)
        known = sizes_of_class(cls.model_class)  # released files have keys that diffusers no longer reads
        sizes |= {name: value for name, value in stored.items() if name in known}
    for text in overrides:
        name, _, value = text.partition("=")
        try:
            sizes[name] = json.loads(value)
        except ValueError:
            sizes[name] = value
    return sizes


def _check_sample(
    cls: type[PublishedModel],
    sizes: dict[str, Any],
    sample_shape: tuple[int, ...],
    *,
    config: torchditan.config.options.Model,
) -> None:
    channels, patches = cls.latent_channels(sizes), cls.patch_size(sizes)
    if sample_shape[0] != channels:
        right = f"{config.flavor} takes latents of {channels} channels"
        raise option_error("model.input_channels", sample_shape[0], right)
    if len(sample_shape) != len(patches) + 1:
        kind = "videos (C, F, H, W): set dataset.num_frames" if len(patches) == 3 else "images (C, H, W)"
        raise option_error("dataset.num_frames", list(sample_shape), f"{config.flavor} takes {kind}")
    for size, patch in zip(sample_shape[1:], patches, strict=True):
        if size % patch:
            right = f"latents must be multiples of {list(patches)}, the patch of {config.flavor}"
            raise option_error("dataset.image_size", list(sample_shape[1:]), right)


__all__ = ["PublishedModel", "build_published_spec", "family", "patch_size_of"]
