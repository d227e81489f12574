# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Valid and invalid combinations of parallel degrees and world sizes."""

from __future__ import annotations

import pytest

from torchditan.config.errors import ConfigError
from torchditan.distributed.parallel_dims import ParallelDims


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "resolved", "mode"),
    [
        (1, -1, 1, (1, 1), "one process"),
        (1, 1, 1, (1, 1), "one process"),
        (8, 1, 8, (8, 1), "DDP over 8 ranks (a replicate-only mesh)"),
        (8, -1, 8, (8, 1), "DDP over 8 ranks (a replicate-only mesh)"),
        (1, -1, 8, (1, 8), "FSDP over 8 ranks"),
        (2, 4, 8, (2, 4), "HSDP over 2 x 4 ranks"),
        (2, -1, 6, (2, 3), "HSDP over 2 x 3 ranks"),
    ],
)
def test_degrees_resolve(replicate: int, shard: int, world_size: int, resolved: tuple[int, int], mode: str) -> None:
    dims = ParallelDims.resolve(replicate=replicate, shard=shard, world_size=world_size)
    assert (dims.replicate, dims.shard) == resolved
    assert dims.mode == mode


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "message"),
    [
        (
            2,
            4,
            1,
            "training.data_parallel_replicate_degree = 2: must divide the 1 rank(s) of this job",
        ),
        (3, -1, 4, "training.data_parallel_replicate_degree = 3: must divide the 4 rank(s) of this job"),
        (
            2,
            4,
            4,
            "training.data_parallel_shard_degree = 4: times data_parallel_replicate_degree 2 is 8, but this job has "
            "4 rank(s); must be 2 or -1",
        ),
        (
            1,
            1,
            2,
            "training.data_parallel_shard_degree = 1: times data_parallel_replicate_degree 1 is 1, but this job has "
            "2 rank(s); must be 2 or -1",
        ),
    ],
)
def test_degrees_that_do_not_multiply_to_the_world_size_are_refused(
    replicate: int, shard: int, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelDims.resolve(replicate=replicate, shard=shard, world_size=world_size)
    assert str(caught.value) == message
