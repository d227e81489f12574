# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Bytes of the optimizer state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchditan.config.options import Optimizer
from torchditan.optim.optimizers import ParameterGroup, group_of, parameter_groups
from torchditan.registry import OPTIMIZERS, registered


def optimizer_state_bytes(config: Optimizer, parameters: Iterable[tuple[str, tuple[int, ...], int]]) -> int:
    """Bytes of the optimizer state on one rank, after every parameter was updated.

    Args:
        config: the `[optimizer]` options.
        parameters: (name, full shape, rows of dimension 0 that this rank holds) of every trained parameter.
    """
    return _state_bytes(str(registered(OPTIMIZERS, config.name)), dataclasses.astuple(config), tuple(parameters))


@functools.lru_cache(maxsize=256)
def _state_bytes(place: str, options: tuple[Any, ...], parameters: tuple[tuple[str, tuple[int, ...], int], ...]) -> int:
    """`place` names the optimizer's function, part of the cache key because a name can be registered again."""
    groups = parameter_groups(Optimizer(*options))
    counted: dict[tuple[int, tuple[int, ...]], int] = {}
    total = 0
    for name, shape, rows in parameters:
        number = group_of(groups, name, torch.empty(shape, device="meta"))
        key = number, (rows, *shape[1:])
        if key not in counted:
            count = groups[number].state_bytes or functools.partial(_state_bytes_on_meta, groups[number])
            counted[key] = count(key[1])
        total += counted[key]
    return total


def _state_bytes_on_meta(group: ParameterGroup, shape: tuple[int, ...]) -> int:
    """Bytes of the tensors in the optimizer state after a first update."""
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    options = {name: value for name, value in group.options.items() if name != "fused"}  # needs a real device
    optimizer = group.optimizer([parameter], **options)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
