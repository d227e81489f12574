# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Native models with random weights."""

from __future__ import annotations

from typing import TypeVar

import torch

from torchditan.models.dit import DiT, DiTConfig

Model = TypeVar("Model", bound=DiT)


def random_model(config: DiTConfig, model_type: type[Model]) -> Model:
    """All trained parameters are random, because layers that start at zero hide mistakes."""
    torch.manual_seed(0)
    model = model_type(config)
    model.init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "pos_embed":
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
