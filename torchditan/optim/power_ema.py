# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Power-function averages of the weights (Karras et al. 2024, arXiv 2312.02696, section 3), sharded like the weights.

Notable:
- the average after step t weights step s by (s^(gamma + 1) - (s - 1)^(gamma + 1)) / t^(gamma + 1). The profile keeps
  its shape as training goes on, so a width is relative to the length of the run;
- the average after the first step is that step's weights: the initial ones do not count, and no warmup is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import nn

from torchditan.models.saved_weights import saved_parameters
from torchditan.optim.ema import local_tensor


def gamma_of_width(width: float) -> float:
    """The exponent gamma > 0 of the profile tau^gamma whose relative standard deviation is `width`.

    On [0, 1] the profile (gamma + 1) tau^gamma has the variance (gamma + 1) / ((gamma + 2)^2 (gamma + 3)). Equating it
    with width^2 gives a cubic polynomial, which has one positive root.

    Args:
        width: sigma_rel of the paper, above 0 and below 12^-1/2 = 0.2887, the width of the uniform average.
    """
    inverse = width**-2
    return float(numpy.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def decay_at(step: int, gamma: float) -> float:
    """Factor of the previous average in the average after this step (1 is the first)."""
    return float((1 - 1 / step) ** (gamma + 1))


def num_snapshots(steps: int, interval: int) -> int:
    """Snapshots of a run: one every `interval` steps, and one of the last step."""
    return -(-steps // interval)


class PowerEMA:
    """average <- decay average + (1 - decay) weights with decay (1 - 1 / step)^(gamma + 1), for several widths.

    Args:
        model: the model to average.
        widths: relative standard deviations of the profiles; see `gamma_of_width`.
        only_trained: average only the trained weights.
    """

    def __init__(self, model: nn.Module, *, widths: Sequence[float], only_trained: bool = False) -> None:
        self.parameters = saved_parameters(model, only_trained=only_trained)
        self.gammas = [gamma_of_width(width) for width in widths]
        self.averages = [
            {name: parameter.detach().clone() for name, parameter in self.parameters.items()} for _ in widths
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all averages, over all shards."""
        return sum(tensor.numel() * tensor.element_size() for average in self.averages for tensor in average.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after this optimizer step to every average."""
        weights = [local_tensor(parameter) for parameter in self.parameters.values()]
        for gamma, average in zip(self.gammas, self.averages, strict=True):
            tensors = [local_tensor(tensor) for tensor in average.values()]
            torch._foreach_lerp_(tensors, weights, 1 - decay_at(step, gamma))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The averages by the position of their width: {"0": {name: tensor}, "1": ...}."""
        return {str(i): dict(average) for i, average in enumerate(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, torch.Tensor]]) -> None:
        for i, average in enumerate(self.averages):
            for name, tensor in average.items():
                local_tensor(tensor).copy_(local_tensor(state_dict[str(i)][name]))
