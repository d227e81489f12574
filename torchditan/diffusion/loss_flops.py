# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLOPs of objectives that compute more with the model than its prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from torchditan.config.options import Diffusion
from torchditan.diffusion.objectives import Objective, batch_multiple, build_objective, split
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

    Args:
        config: the objective and its options.
        spec: the model, with the heads of the objective.
    """
    objective, batch_size = build_objective(config, spec), batch_multiple(config)
    batch, randomness = example_batch(spec, objective, batch_size)

    def loss(model: nn.Module) -> torch.Tensor:
        return split(objective.loss(model, batch, randomness))[0]

    return count_model_flops(spec, loss, batch_size=batch_size)


def example_batch(spec: ModelSpec, objective: Objective, batch_size: int) -> tuple[dict[str, torch.Tensor], Randomness]:
    """The tensors that the trainer has on the device at the start of the step, on the meta device."""
    with torch.device("meta"):
        batch = spec.example_batch(batch_size)
        for name, target in objective.targets.items():
            batch[name] = torch.zeros(batch_size, *target.tensor.shape, dtype=target.tensor.dtype)
        shapes = {"normal": batch["sample"].shape, "uniform": (batch_size,)}
        return batch, Randomness({name: torch.empty(shapes[kind]) for name, kind in objective.numbers.items()})
