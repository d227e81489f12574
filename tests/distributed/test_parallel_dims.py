# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Valid and invalid combinations of parallel degrees and world sizes."""

from __future__ import annotations

import pytest
from refusals import refused

from torchditan.config.options import Training
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.process_group import Rank


def resolve(replicate: int, shard: int, world_size: int, *, context: int = 1) -> ParallelDims:
    degrees = {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
    return ParallelDims.resolve(Training(**degrees, context_parallel_degree=context), world_size=world_size)


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "resolved", "mode"),
    [
        (1, -1, 1, (1, 1), "one process"),
        (8, 1, 8, (8, 1), "DDP over 8 ranks (a replicate-only mesh)"),
        (8, -1, 8, (8, 1), "DDP over 8 ranks (a replicate-only mesh)"),
        (1, -1, 8, (1, 8), "FSDP over 8 ranks"),
        (2, 4, 8, (2, 4), "HSDP over 2 x 4 ranks"),
        (2, -1, 6, (2, 3), "HSDP over 2 x 3 ranks"),
    ],
)
def test_degrees_resolve(replicate: int, shard: int, world_size: int, resolved: tuple[int, int], mode: str) -> None:
    dims = resolve(replicate, shard, world_size)
    assert (dims.replicate, dims.shard) == resolved
    assert dims.mode == mode


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "context", "data_ranks", "shards", "mode"),
    [
        (1, -1, 2, 2, 1, 2, "FSDP over 2 ranks, context parallelism over 2"),
        (1, -1, 8, 2, 4, 8, "FSDP over 8 ranks, context parallelism over 2"),
        (2, -1, 8, 4, 2, 4, "HSDP over 2 x 4 ranks, context parallelism over 4"),
        (4, 1, 8, 2, 4, 2, "HSDP over 4 x 2 ranks, context parallelism over 2"),
    ],
)
def test_ranks_that_share_tokens_share_parameters_and_count_as_one_data_rank(
    replicate: int, shard: int, world_size: int, context: int, data_ranks: int, shards: int, mode: str
) -> None:
    dims = resolve(replicate, shard, world_size, context=context)
    assert (dims.num_shards, dims.world_size, dims.mode) == (shards, world_size, mode)
    found = [dims.data_rank(Rank(rank, rank, world_size)) for rank in range(world_size)]
    assert [rank.rank for rank in found] == sorted(list(range(data_ranks)) * context)
    assert {rank.world_size for rank in found} == {data_ranks}


@pytest.mark.parametrize(
    ("degrees", "world_size", "about", "mentions"),
    [
        ((2, 4, 1), 1, "training.data_parallel_replicate_degree = 2", ["1 rank(s)"]),
        ((3, -1, 1), 4, "training.data_parallel_replicate_degree = 3", ["4 rank(s)"]),
        ((2, 4, 1), 4, "training.data_parallel_shard_degree = 4", ["8", "4 rank(s)", "2 or -1"]),
        ((1, -1, 4), 2, "training.context_parallel_degree = 4", ["2 rank(s)"]),
        ((2, -1, 2), 2, "training.data_parallel_replicate_degree = 2", ["1 group(s) of 2 ranks"]),
        ((1, 2, 2), 2, "training.data_parallel_shard_degree = 2", ["1 group(s) of 2 ranks", "1 or -1"]),
    ],
)
def test_degrees_that_do_not_fit_the_world_size_are_refused(
    degrees: tuple[int, int, int], world_size: int, about: str, mentions: list[str]
) -> None:
    replicate, shard, context = degrees
    with refused(about, *mentions):
        resolve(replicate, shard, world_size, context=context)
