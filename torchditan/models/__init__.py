# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Registry of models: from the options of [model] and the shape of a sample to a `ModelSpec`.

To add an architecture, write a function like `build_dit_spec` and name it in `MODELS`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torchditan.config
from torchditan.config import did_you_mean, option_error
from torchditan.models.dit import FLAVORS, PRESETS, DiT, DiTConfig
from torchditan.models.spec import ClassLabels, Condition, Conditioning, ModelSpec, Unconditional

__all__ = [
    "MODELS",
    "ClassLabels",
    "Condition",
    "Conditioning",
    "ModelSpec",
    "Unconditional",
    "build_model_spec",
]


def build_dit_spec(config: torchditan.config.Model, *, sample_shape: tuple[int, ...], num_classes: int) -> ModelSpec:
    if config.flavor not in FLAVORS:
        right = f"must be one of {', '.join(FLAVORS)}{did_you_mean(config.flavor, FLAVORS)}"
        raise option_error("model.flavor", config.flavor, right)
    options = dict(PRESETS[config.preset])
    overrides = {option: getattr(config, option) for option in options}
    options |= {option: value for option, value in overrides.items() if value is not None}
    if options["norm_type"] == "fused_rmsnorm":
        options["norm_type"] = "rmsnorm"
    if options["position"] == "sincos" and config.rope_theta != torchditan.config.Model.rope_theta:
        right = "has no effect with sincos positions; leave it out, or set --model.position rope"
        raise option_error("model.rope_theta", config.rope_theta, right)

    channels, height, width = sample_shape
    dit_config = DiTConfig(
        **dataclasses.asdict(FLAVORS[config.flavor]),
        patch_size=config.patch_size,
        input_channels=channels,
        image_size=(height, width),
        num_classes=num_classes,
        rope_theta=config.rope_theta,
        **options,  # type: ignore[arg-type]
    )
    return ModelSpec(
        name="dit",
        flavor=config.flavor,
        flavors=list(FLAVORS),
        config=dit_config,
        build=lambda: DiT(dit_config),
        blocks=operator.attrgetter("blocks"),
        conditioning=ClassLabels(num_classes) if num_classes else Unconditional(),
        sample_shape=sample_shape,
        learn_sigma=dit_config.learn_sigma,
        num_tokens=dit_config.num_patches,
        num_condition_tokens=dit_config.num_context_tokens,
    )


MODELS: dict[str, Callable[..., ModelSpec]] = {"dit": build_dit_spec}


def build_model_spec(config: torchditan.config.Model, *, sample_shape: tuple[int, ...], num_classes: int) -> ModelSpec:
    """Resolve [model] for samples of one shape; builds no model.

    Args:
        config: the [model] section; what it leaves open the preset decides.
        sample_shape: (C, H, W) of the dataset's samples.
        num_classes: number of labels, 0 for an unconditional model.

    Raises:
        ConfigError: unknown flavor, sizes that do not fit together, an option without effect.
    """
    channels, height, width = sample_shape
    if config.input_channels not in (None, channels):
        right = f"samples have {channels} channel(s); leave it out"
        raise option_error("model.input_channels", config.input_channels, right)
    if height % config.patch_size or width % config.patch_size:
        right = f"must divide the samples' height and width, {height} x {width}"
        raise option_error("model.patch_size", config.patch_size, right)
    return MODELS[config.name](config, sample_shape=sample_shape, num_classes=num_classes)
