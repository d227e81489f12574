# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Model FLOPs, counted. With the peak of the device (peak_flops.py) they give the MFU.

Notable:
- counted on the meta device for one sample, or for as many as the objective needs at once; forward and backward,
  without the recomputation of activation checkpointing;
- a multiply-add is 2 FLOPs. As usual for MFU, only matrix products and convolutions count;
- adaLN weights multiply one vector per image. Counting them per token, as a share of all weights, would inflate the MFU
  of a DiT-L by nearly a half;
- frozen weights count with their forward and the input gradient, without the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torchditan.models.spec import ModelSpec


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of the training step of one sample."""

    forward: int
    total: int
    """Of the forward and the backward pass."""


def count_model_flops(
    spec: ModelSpec, loss: Callable[[nn.Module], torch.Tensor] | None = None, *, batch_size: int = 1
) -> ModelFlops:
    """Count the training step of one sample. Computes nothing: seconds even for 7B parameters.

    Args:
        spec: the model.
        loss: all that a step computes with the model, on the meta device. None: the prediction, which is all but a few
            operations, unless the objective reads features.
        batch_size: number of samples that `loss` has. The FLOPs are their mean.
    """
    # Imported here because the import is slow and only needed once.
    from torch.utils.flop_counter import FlopCounterMode

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with torch.device("meta"):
        model = spec.build().to("meta")  # the buffers too
        x_t, t, cond = spec.example_inputs(batch_size)
        with forward:
            result = model(x_t, t, cond) if loss is None else loss(model)
        with backward:
            result.sum().backward()
    total = forward.get_total_flops() + backward.get_total_flops()
    return ModelFlops(forward.get_total_flops() // batch_size, total // batch_size)
