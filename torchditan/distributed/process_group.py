# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Start and end of the process group, under torchrun or in a single process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchditan.errors import ConfigError

_jobs = itertools.count()
_STORE_ANSWERS_WITHIN = timedelta(seconds=10)


@dataclass(frozen=True)
class Rank:
    """The rank of this process, from torchrun's environment variables; rank 0 of 1 without them."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Rank:
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
        )

    @property
    def device(self) -> torch.device:
        """This rank's GPU if the machine has one (of NVIDIA or AMD: cuda; of Apple: mps), else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def init_process_group(rank: Rank, *, timeout_seconds: int) -> None:
    """Join the job's process group. A single process creates its own, without ports or files."""
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    # Tensors in host memory (CPU offload, checkpoint metadata) need gloo in addition to NCCL.
    backend = "cpu:gloo,cuda:nccl" if rank.device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if rank.world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    # torchrun keeps its store across restarts, and torch 2.13 would read the addresses of exited ranks from it.
    # The store exists before any rank. If it does not answer, torchrun ended before this rank could end with it.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=_STORE_ANSWERS_WITHIN)
    store.set_timeout(timeout)
    # Group names must also differ from those of an earlier job in the same processes.
    names = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_jobs)}"
    dist.init_process_group(
        backend, store=dist.PrefixStore(names, store), rank=rank.rank, world_size=rank.world_size, timeout=timeout
    )


def check_devices(rank: Rank) -> None:
    """Refuse more ranks on this machine than GPUs, and several ranks on an Apple GPU.

    Raises:
        ConfigError: no GPU is left for this rank.
    """
    if rank.device.type == "mps" and rank.world_size > 1:
        right = "an Apple GPU (mps) has no communication between ranks; must be 1"
        raise ConfigError(f"--nproc_per_node, ranks in all = {rank.world_size}: {right}")
    num_devices = torch.cuda.device_count()
    if rank.device.type == "cuda" and rank.local_rank >= num_devices:
        right = f"this machine has {num_devices} GPU(s); must be at most that"
        raise ConfigError(f"--nproc_per_node = {rank.local_rank + 1} or more: {right}")


def set_timeout(timeout_seconds: int, *, but: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of all collectives except those of group `but`, after the slow first step of every rank."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    dist.barrier()
    timeout = timedelta(seconds=timeout_seconds)
    for group in dist.distributed_c10d._world.pg_map:
        if group in (None, but):
            continue
        if hasattr(dist, "set_timeout"):  # from torch 2.15 on, which deprecates the private function
            dist.set_timeout(timeout, group)
        else:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise an error of any rank on every rank. All ranks call it, most of them with None."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    for error_of_rank in found:
        if error_of_rank is not None:
            raise error_of_rank


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


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def mean_over_ranks(loss: torch.Tensor, world_size: int) -> torch.Tensor:
    """Mean () of the ranks' losses ()."""
    return sum_over_ranks(loss.clone()) / world_size


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def forget_process_groups(mesh: DeviceMesh) -> None:
    """Release a mesh's references to its process groups.

    DTensor's caches keep the mesh until the interpreter shuts down, when a thread of a group could abort the process
    (https://github.com/pytorch/pytorch/issues/38228). torch has no public name for these references.
    """
    getattr(mesh, "_pg_registry", {}).clear()
