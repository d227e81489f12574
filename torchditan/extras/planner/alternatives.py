# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans of a configuration in other parallel modes and with other checkpointing."""

from __future__ import annotations

from typing import NamedTuple

from torchditan.config.options import Config
from torchditan.diffusion.objectives import batch_multiple
from torchditan.extras.planner.devices import device_named
from torchditan.extras.planner.plan import Plan, largest_batch, plan_run

CHECKPOINTING = (("none", "2"), ("selective", "op"), ("selective", "2"), ("full", "2"))
"""Mode and selective option, those that recompute less first."""

_MARGIN = 0.95
"""Bounds that are closer to each other do not decide."""


class Alternative(NamedTuple):
    """A parallel mode and a kind of checkpointing."""

    configured: Plan
    """At the batch size of the job."""
    largest: Plan
    """At the largest batch size that fits; at the smallest one if none does."""


def alternatives(config: Config, device: str, num_devices: int, *, batch_size: int) -> list[Alternative]:
    """Every parallel mode with every kind of checkpointing, the best first.

    Those that fit come before the others, then those whose images take less time by the lower bound. Of those within 5%
    of the lowest, the first recomputes and communicates least.
    """
    found = []
    for mode, option in CHECKPOINTING:
        for replicate, shard in parallel_modes(config, num_devices, device):
            changed = config.replace(
                {
                    "training.data_parallel_replicate_degree": replicate,
                    "training.data_parallel_shard_degree": shard,
                    "activation_checkpoint.mode": mode,
                    "activation_checkpoint.selective_ac_option": option,
                }
            )
            largest = largest_batch(changed, device, num_devices)
            if config.training.global_batch_size is None and largest > 8:
                largest -= largest % 8
            sizes = batch_size, max(batch_multiple(config.diffusion), largest)
            found.append(Alternative(*(_plan(changed, size, device, num_devices) for size in sizes)))
    lowest = min((alternative.largest for alternative in found), key=_rank)
    return sorted(found, key=lambda a: _rank(a.largest) if is_better(lowest, a.largest) else (False, 0.0))


def _plan(config: Config, batch_size: int, device: str, num_devices: int) -> Plan:
    return plan_run(config.replace({"training.batch_size": batch_size}), device=device, num_devices=num_devices)


def _rank(plan: Plan) -> tuple[bool, float]:
    assert plan.min_seconds_per_image is not None
    return not plan.fits, plan.min_seconds_per_image


def is_better(plan: Plan, other: Plan) -> bool:
    """Whether only this plan fits, or its lower bound of an image is at least 5% below the other's."""
    (does_not_fit, seconds), (other_does_not, other_seconds) = _rank(plan), _rank(other)
    return (does_not_fit, seconds) < (other_does_not, _MARGIN * other_seconds)


def parallel_modes(config: Config, num_devices: int, device: str) -> list[tuple[int, int]]:
    """(replicate, shard) of the modes that a job can have, of DDP, HSDP and FSDP.

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
