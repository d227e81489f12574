# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLOPs of objectives that compute more than the model's prediction: they read features, or call a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from torchditan.config.options import Diffusion
from torchditan.diffusion.objectives import build_objective, loss_with_teacher
from torchditan.models.flops import ModelFlops, count_model_flops
from torchditan.models.spec import ModelSpec
from torchditan.randomness import Randomness


def training_flops(config: Diffusion, spec: ModelSpec, *, warn: Callable[[str], None]) -> int:
    """FLOPs of `count_loss_flops`, or of the model alone if the loss does not run on the meta device.

    An objective of a plug-in may call a network of its own, for example. That must not end the run.
    """
    try:
        return count_loss_flops(config, spec).total
    except Exception as error:
        reason = f"the loss of {config.objective} does not run on the meta device: {error}"
        warn(f"warning: MFU counts the model's prediction only; {reason}".splitlines()[0])
        return count_model_flops(spec).total


def count_loss_flops(config: Diffusion, spec: ModelSpec) -> ModelFlops:
    """Count the training step of one sample, with all that the objective's loss computes on the meta device.

    A teacher counts with its forward: its weights have no gradient. The contrastive term needs a second sample, and has
    no matrix products: it is left out.
    """
    objective = build_objective(dataclasses.replace(config, contrastive_weight=0.0), spec)
    batch, randomness = example_batch(spec, 1)
    with torch.device("meta"):
        teacher = spec.build().to("meta").requires_grad_(False) if objective.uses_teacher else None
    loss = loss_with_teacher(objective, teacher)
    return count_model_flops(spec, lambda model: loss(model, batch, randomness))


def example_batch(spec: ModelSpec, batch_size: int) -> tuple[dict[str, torch.Tensor], Randomness]:
    """The tensors that the trainer has on the device at the start of the step, on the meta device."""
    with torch.device("meta"):
        sample = torch.empty(batch_size, *spec.sample_shape)
        batch = {"sample": sample, "index": torch.empty(batch_size, dtype=torch.int64)}
        for name, (shape, dtype) in spec.conditioning.tensors.items():
            batch[name] = torch.empty(batch_size, *shape, dtype=dtype)
        numbers = torch.empty(batch_size)
        return batch, Randomness(torch.empty_like(sample), numbers, numbers, alignment=numbers)
