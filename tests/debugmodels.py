# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The debugmodels of all published families, with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

from torchditan.config.options import Model
from torchditan.extras.published.families import PublishedModel, family
from torchditan.models import build_model_spec
from torchditan.models.spec import Condition, ModelSpec
from torchditan.registry import FAMILIES


def _sample_shape(name: str, flavor: str) -> tuple[int, ...]:
    """(C, 8, 12), or (C, 2, 8, 12) for videos; sides are multiples of the patch."""
    cls = family(name)
    sizes = cls.flavors[flavor].config
    frames = [2] if cls.takes_videos() else []
    return cls.latent_channels(sizes), *frames, 8, 12


MODELS = [(name, flavor) for name in FAMILIES for flavor in family(name).flavors if flavor.startswith("debugmodel")]
GUIDANCE = 3.5


def spec_of(name: str, flavor: str = "debugmodel", *, path: object = None, **options: Any) -> ModelSpec:
    config = Model(name=name, flavor=flavor, path=None if path is None else str(path), **options)
    return build_model_spec(config, sample_shape=_sample_shape(name, flavor), num_classes=0, embedded_guidance=GUIDANCE)


def built(spec: ModelSpec, *, seed: int = 0) -> PublishedModel:
    """The model on the CPU, filled."""
    model: Any = spec.build().to_empty(device="cpu")
    model.init_weights(seed)
    return model


def inputs_of(spec: ModelSpec, *, batch_size: int = 2) -> tuple[torch.Tensor, torch.Tensor, Condition]:
    """x_t, t and a random condition whose masks hide the end of all captions but the first."""
    draw = torch.Generator().manual_seed(0)
    batch = {"index": torch.arange(batch_size)}
    for name, (shape, dtype) in spec.conditioning.tensors.items():
        if dtype == torch.bool:
            batch[name] = torch.ones(batch_size, *shape, dtype=dtype)
            batch[name][1:, 2 * shape[0] // 3 :] = False
        else:
            batch[name] = torch.randn(batch_size, *shape, generator=draw)
    x_t = torch.randn(batch_size, *spec.sample_shape, generator=draw)
    return x_t, torch.linspace(0.25, 0.5, batch_size), spec.conditioning.from_batch(batch)


def pristine(model: PublishedModel, spec: ModelSpec) -> Any:
    """diffusers' own transformer with the same weights, nothing of it replaced."""
    import diffusers

    transformer = getattr(diffusers, model.model_class)(**spec.config)
    transformer.load_state_dict(model.transformer.state_dict())
    return transformer.eval()
