# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Exponential moving average of the weights, in float32, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchditan.distributed.parallelize import drop_gathered_weights
from torchditan.models.saved_weights import saved_parameters


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor. Call it under `no_grad`; otherwise autograd records it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EMA:
    """average <- decay average + (1 - decay) weights, with decay min(decay, (1 + n) / (10 + n)) during warmup.

    Args:
        model: the model to average.
        decay, warmup: as above.
        only_trained: average only the trained weights.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool = True, only_trained: bool = False) -> None:
        self.model = model
        self.decay = decay
        self.warmup = warmup
        self.parameters = saved_parameters(model, only_trained=only_trained)
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def decay_at(self, step: int) -> float:
        """Decay of this step (1 is the first)."""
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
