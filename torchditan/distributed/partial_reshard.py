# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`training.reshard_after_forward` as a number: weights stay divided over so many ranks until the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init


@contextmanager
def shared_mesh() -> Iterator[None]:
    """Context manager in which `fully_shard` makes one mesh for all blocks.

    Each call with a number makes a mesh, and process groups of that size. With NCCL a group has buffers of its own on
    the device, and a model has tens of blocks.
    """
    made: list[DeviceMesh] = []

    def mesh_of(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
        if not made:
            made.append(DeviceMesh(device_type, ranks))
        return made[0]

    module: Any = _fsdp_init
    module.DeviceMesh = mesh_of
    try:
        yield
    finally:
        module.DeviceMesh = DeviceMesh
