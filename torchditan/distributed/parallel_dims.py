# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The division of the ranks into replicas and shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchditan.config.errors import option_error


@dataclass(frozen=True)
class ParallelDims:
    """replicate x shard ranks: (n, 1) is DDP, (1, n) is FSDP, anything between is HSDP."""

    replicate: int
    shard: int

    @classmethod
    def resolve(cls, *, replicate: int, shard: int, world_size: int) -> ParallelDims:
        """Resolve the degrees for this world size. A shard degree of -1 uses all remaining ranks.

        Raises:
            ConfigError: the product of the degrees is not the world size.
        """
        if world_size % replicate:
            right = f"must divide the {world_size} rank(s) of this job"
            raise option_error("training.data_parallel_replicate_degree", replicate, right)
        resolved = world_size // replicate if shard == -1 else shard
        if replicate * resolved != world_size:
            right = (
                f"times data_parallel_replicate_degree {replicate} is {replicate * shard}, but this job has "
                f"{world_size} rank(s); must be {world_size // replicate} or -1"
            )
            raise option_error("training.data_parallel_shard_degree", shard, right)
        return cls(replicate=replicate, shard=resolved)

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    @property
    def mode(self) -> str:
        if self.world_size == 1:
            return "one process"
        if self.shard == 1:
            return f"DDP over {self.replicate} ranks (a replicate-only mesh)"
        if self.replicate == 1:
            return f"FSDP over {self.shard} ranks"
        return f"HSDP over {self.replicate} x {self.shard} ranks"

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """1D (shard) mesh for FSDP and one process, 2D (replicate, shard) for DDP and HSDP."""
        if self.replicate == 1:
            return init_device_mesh(device_type, (self.shard,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))
