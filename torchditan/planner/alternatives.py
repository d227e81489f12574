# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans of a configuration in other parallel modes and with other checkpointing."""

from __future__ import annotations

from torchditan.config.options import Config
from torchditan.diffusion.objectives import batch_multiple
from torchditan.planner.devices import device_named
from torchditan.planner.plan import Plan, largest_batch, plan_run, with_options


def alternatives(config: Config, device: str, num_devices: int) -> list[Plan]:
    """Plans for every parallel mode and kind of checkpointing, each at the largest batch that fits (`largest_batch`).

    If none fits, the plan is for one image. The fastest plan that fits comes first.
    """
    plans = []
    for replicate, shard in parallel_modes(config, num_devices, device):
        for mode, option in (("none", "2"), ("selective", "2"), ("selective", "op"), ("full", "2")):
            changed = with_options(config, replicate=replicate, shard=shard, mode=mode, option=option)
            batch_size = largest_batch(changed, device, num_devices)
            if config.training.global_batch_size is None and batch_size > 8:
                batch_size -= batch_size % 8
            batch_size = max(batch_multiple(config.diffusion), batch_size)
            plans.append(plan_run(with_options(changed, batch_size=batch_size), device=device, num_devices=num_devices))
    return sorted(plans, key=ranking)


def ranking(plan: Plan) -> tuple[bool, float]:
    """The fastest plan that fits has the smallest."""
    return not plan.fits, -(plan.images_per_second or 0)


def parallel_modes(config: Config, num_devices: int, device: str) -> list[tuple[int, int]]:
    """(replicate, shard) of the modes that a job can have, of DDP, FSDP and HSDP.

    HSDP shards inside a node, or half a node if there is only one.
    """
    context = config.training.context_parallel_degree
    if num_devices % context:
        return []
    num_ranks = num_devices // context
    if num_ranks == 1 or (config.training.compile and config.compile.scope == "model"):  # it has no shards
        return [(num_ranks, 1)]
    per_node = max(1, device_named(device).devices_per_node // context)
    inside = per_node if num_ranks > per_node and num_ranks % per_node == 0 else num_ranks // 2
    modes = [(num_ranks, 1), (1, num_ranks)]
    if 1 < inside < num_ranks and num_ranks % inside == 0:
        modes.insert(1, (num_ranks // inside, inside))
    return modes
