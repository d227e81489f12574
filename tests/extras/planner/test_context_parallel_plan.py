# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans with context parallelism. tests/extras/planner/test_plan.py compares their memory with real runs."""

from __future__ import annotations

from refusals import refused

from torchditan.config.loader import load_config
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.extras.planner.alternatives import parallel_modes
from torchditan.extras.planner.plan import Plan, plan_run
from torchditan.extras.planner.plan_report import describe, recommendation

LARGE = ["--dataset.dataset_name=dummy", "--dataset.image_size=256", "--model.input_channels=4"]
LARGE += ["--dataset.num_classes=10", "--model.flavor=DiT-B", "--training.batch_size=2", "--model.patch_size=2"]
CONTEXT = "--training.context_parallel_degree"


def plan(num_devices: int, *flags: str) -> Plan:
    return plan_run(load_config([*LARGE, *flags]), device="h100", num_devices=num_devices)


def test_four_devices_that_share_16k_tokens_keep_a_quarter_and_compute_a_quarter() -> None:
    alone, shared = plan(1), plan(4, f"{CONTEXT}=4")
    assert alone.model.spec.num_tokens == 16_384
    assert 0.24 < shared.activations / alone.activations < 0.3
    assert (shared.mode, shared.dims) == ("FSDP", ParallelDims(replicate=1, shard=1, context=4))
    assert shared.global_batch_size == alone.global_batch_size == 2
    assert shared.model_flops == alone.model_flops / 4
    assert shared.bound is not None and alone.bound is not None
    assert shared.bound.products == alone.bound.products / 4


def test_batches_count_groups_and_modes_divide_them() -> None:
    shared = plan(8, f"{CONTEXT}=2", "--training.global_batch_size=16", "--training.data_parallel_replicate_degree=2")
    assert (shared.mode, shared.num_micro_batches, shared.global_batch_size) == ("HSDP", 2, 16)
    text = describe(shared)
    assert "HSDP (2 x 2 x 2) on 8 x" in text and "batch 2 per 2 devices that share its tokens" in text
    assert f"{CONTEXT} 2" in recommendation(shared)
    config = load_config([f"{CONTEXT}=2"])
    assert parallel_modes(config, 16, "h100") == [(8, 1), (2, 4), (1, 8)]
    assert parallel_modes(config, 2, "h100") == [(1, 1)]
    assert parallel_modes(config, 1, "h100") == [], "the degree does not divide one device"
    one_graph = load_config(["--training.compile", "--compile.scope=model"])
    assert parallel_modes(one_graph, 8, "h100") == [(8, 1)], "one graph has no shards"


def test_what_a_run_refuses_a_plan_refuses() -> None:
    with refused("training.context_parallel_degree = 5", "12"):
        plan(5, f"{CONTEXT}=5")
    with refused("training.context_parallel_degree = 4", "2"):
        plan(2, f"{CONTEXT}=4")
