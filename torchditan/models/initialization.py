# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Initial weights as a pure function of (seed, parameter name), for any device, mesh or world size.

Notable:
- every rank draws the same full tensor on the CPU and keeps its shard, one parameter at a time. Drawing into a sharded
  parameter would give each mesh a different model, and on gloo each rank the same shard;
- draws are float32 from NumPy's Philox, keyed by a hash of the parameter's name: adding a layer does not change other
  layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from torchditan.randomness import generator, name_to_index


@torch.no_grad()
def fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a parameter, or this rank's shard into a sharded one. No communication.

    Args:
        parameter: plain or DTensor, on any device.
        value: the full value, float32 on the CPU, equal on all ranks.
    """
    # Imported here because it takes half as long as `import torch`.
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert parameter.shape == value.shape, (parameter.shape, value.shape)
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(shard.to_local())


def draw_normal(seed: int, name: str, shape: Sequence[int], *, std: float) -> torch.Tensor:
    """N(0, std^2), float32 on the CPU."""
    draw = weight_generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(draw).mul_(std)


def draw_xavier_uniform(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010), float32 on the CPU.

    A convolution (out, in, height, width) is treated as the linear layer of a patch, fan_in = in * height * width.
    """
    fan_out, fan_in = shape[0], math.prod(shape[1:])
    bound = math.sqrt(6 / (fan_in + fan_out))
    draw = weight_generator(seed, name).random(tuple(shape), dtype=np.float32)
    return torch.from_numpy(draw).mul_(2 * bound).sub_(bound)


def weight_generator(seed: int, name: str) -> np.random.Generator:
    return generator(seed, "weights", name_to_index(name))
