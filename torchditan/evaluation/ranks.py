# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Collectives of Python objects for an evaluation, which also runs without a process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def rank_and_world_size() -> tuple[int, int]:
    """Of the process group; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_rank_0(value: Any) -> Any:
    """The value that rank 0 has, on all ranks; it is pickled. Without a process group, the value itself."""
    sent = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(sent, device=torch.device("cpu"))
    return sent[0]


def gather_on_rank_0(mine: list[Any]) -> Iterator[list[Any]]:
    """On rank 0: what each other rank has, one rank at a time, so that one copy is in memory."""
    rank, world_size = rank_and_world_size()
    for sender in range(1, world_size):
        if rank == sender:
            dist.send_object_list(mine, dst=0, device=torch.device("cpu"))
        elif rank == 0:
            received: list[Any] = [None] * len(mine)
            dist.recv_object_list(received, src=sender, device=torch.device("cpu"))
            yield received
