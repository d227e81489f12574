# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Exponential moving average of the weights, in float32, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchditan.distributed.parallelize import drop_gathered_weights
from torchditan.models.saved_weights import saved_parameters


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor. Call it under `no_grad`; otherwise autograd records it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gamma_of_width(width: float) -> float:
    """The exponent gamma > 0 of the profile tau^gamma whose standard deviation on [0, 1] is `width`.

    The profile (gamma + 1) tau^gamma has the variance (gamma + 1) / ((gamma + 2)^2 (gamma + 3)). Equating it with
    width^2 gives a cubic polynomial, which has one positive root (Karras et al. 2024, arXiv 2312.02696, appendix C).
    """
    inverse = width**-2
    return float(numpy.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


class EMA:
    """average <- decay average + (1 - decay) weights.

    At step n the decay is min(decay, (1 + n) / (10 + n)) during warmup, and `decay` without. With a width it is
    (1 - 1/n)^(gamma + 1): step s then has the weight (s^(gamma + 1) - (s - 1)^(gamma + 1)) / n^(gamma + 1), and
    the initial weights have none.

    Args:
        model: the model to average.
        decay, warmup: as above.
        width: standard deviation of the average in time, relative to the steps so far; replaces `decay` and `warmup`.
        only_trained: average only the trained weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float = 0.9999,
        warmup: bool = True,
        width: float | None = None,
        only_trained: bool = False,
    ) -> None:
        self.model = model
        self.decay = decay
        self.warmup = warmup
        self.gamma = None if width is None else gamma_of_width(width)
        self.parameters = saved_parameters(model, only_trained=only_trained)
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def decay_at(self, step: int) -> float:
        """Decay of this step (1 is the first)."""
        if self.gamma is not None:
            return float((1 - 1 / step) ** (self.gamma + 1))
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after this optimizer step to the average."""
        averages = [local_tensor(average) for average in self.average.values()]
        weights = [local_tensor(parameter) for parameter in self.parameters.values()]
        torch._foreach_lerp_(averages, weights, 1 - self.decay_at(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights."""
        for name, parameter in self.parameters.items():
            local_tensor(self.average[name]).copy_(local_tensor(parameter))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the averaged weights in the model inside this context. Restores the model's weights bitwise."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight, average = local_tensor(parameter), local_tensor(self.average[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        drop_gathered_weights(self.model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: average.detach() for name, average in self.average.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        for name, average in self.average.items():
            local_tensor(average).copy_(local_tensor(state_dict[name]))
