# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The division of the ranks into replicas, shards and parts of a sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchditan.config.options import Training
from torchditan.distributed.process_group import Rank
from torchditan.errors import option_error


@dataclass(frozen=True)
class ParallelDims:
    """replicate x shard x context ranks. With a context of 1, (n, 1) is DDP, (1, n) is FSDP, anything between is HSDP.

    Consecutive ranks share the tokens of the same samples. They count as one data rank, and share the parameters too.
    """

    replicate: int
    shard: int
    context: int = 1

    @classmethod
    def resolve(cls, training: Training, *, world_size: int) -> ParallelDims:
        """Resolve the degrees for this world size. A shard degree of -1 uses all remaining ranks.

        Raises:
            ConfigError: the product of the degrees is not the world size.
        """
        replicate, shard = training.data_parallel_replicate_degree, training.data_parallel_shard_degree
        context = training.context_parallel_degree
        left, ranks = world_size // context, f"{world_size} rank(s)"
        if world_size % context:
            raise option_error("training.context_parallel_degree", context, f"must divide the {ranks} of this job")
        if context > 1:
            ranks = f"{left} group(s) of {context} ranks"
        if left % replicate:
            right = f"must divide the {ranks} of this job"
            raise option_error("training.data_parallel_replicate_degree", replicate, right)
        resolved = left // replicate if shard == -1 else shard
        if replicate * resolved != left:
            right = (
                f"times data_parallel_replicate_degree {replicate} is {replicate * shard}, but this job has "
                f"{ranks}; must be {left // replicate} or -1"
            )
            raise option_error("training.data_parallel_shard_degree", shard, right)
        return cls(replicate=replicate, shard=resolved, context=context)

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.context

    @property
    def num_shards(self) -> int:
        """Ranks that share the parameters."""
        return self.shard * self.context

    def data_rank(self, rank: Rank) -> Rank:
        """The rank among those with different samples."""
        return replace(rank, rank=rank.rank // self.context, world_size=self.world_size // self.context)

    @property
    def mode(self) -> str:
        tokens = f", context parallelism over {self.context}" if self.context > 1 else ""
        if self.world_size == 1:
            return "one process"
        if self.num_shards == 1:
            return f"DDP over {self.replicate} ranks (a replicate-only mesh)"
        if self.replicate == 1:
            return f"FSDP over {self.num_shards} ranks{tokens}"
        return f"HSDP over {self.replicate} x {self.num_shards} ranks{tokens}"

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """1D (shard) mesh for FSDP and one process, 2D (replicate, shard) for DDP and HSDP."""
        # torch has no mesh of Apple GPUs. One process in float32 does not use its mesh (parallelize.py).
        device_type = "cpu" if device_type == "mps" else device_type
        if self.replicate == 1:
            return init_device_mesh(device_type, (self.num_shards,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, self.num_shards), mesh_dim_names=("replicate", "shard"))
