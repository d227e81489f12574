# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Numbers of an update for the log (`metrics.meters`): the interface of a meter, and the norm of the update.

A meter works in the steps that are logged only, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn

from torchditan.config.options import Metrics
from torchditan.optim.optimizers import local_tensor, norm_over_ranks
from torchditan.registry import METERS, create


class Meter:
    """Measures a step, between the gradients and the updated weights. Options after its name are further parameters.

    All ranks call all methods. Under FSDP, parameters and gradients are DTensors: `local_tensor(weight)` is this rank's
    shard, and `norm_over_ranks(tensors, like=parameters)` the norm over all of them.

    Args:
        model: the model that trains.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("read",)

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def before_update(self) -> None:
        """Called with clipped gradients, before the optimizer."""

    def after_update(self) -> None:
        """Called after the optimizer. If the step diverged, the weights did not change."""

    def read(self) -> dict[str, float]:
        """The numbers of this step by name, equal on all ranks."""
        raise NotImplementedError


class UpdateNorm(Meter):
    """`update_norm`, the norm of the change of all weights, and `weight_norm`, that of the weights before it.

    In logged steps it needs 8 bytes more per local parameter during the update, which the planner does not count.
    """

    @torch.no_grad()
    def before_update(self) -> None:
        self.before = [local_tensor(parameter).clone() for parameter in self.parameters]

    @torch.no_grad()
    def after_update(self) -> None:
        after = [local_tensor(parameter) for parameter in self.parameters]
        self.update = norm_over_ranks(torch._foreach_sub(after, self.before), like=self.parameters)
        self.weight = norm_over_ranks(self.before, like=self.parameters)
        del self.before

    def read(self) -> dict[str, float]:
        return {"update_norm": self.update.item(), "weight_norm": self.weight.item()}


def build_meters(config: Metrics, model: nn.Module) -> list[Meter]:
    """The meters of `metrics.meters`."""
    return [create(METERS, "metrics.meters", text, model) for text in config.meters]


@contextmanager
def measuring(meters: Sequence[Meter]) -> Iterator[None]:
    """Context manager around the optimizer's step."""
    for meter in meters:
        meter.before_update()
    try:
        yield
    finally:  # also if the step diverged: a meter may hold copies of all weights
        for meter in meters:
            meter.after_update()
