# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Estimated time of a step: a roofline over the traced operators, and collectives over the links of the datasheets.

Notable:
- an operator takes as long as its FLOPs or its memory traffic, whichever is longer. Recomputed operators are in the
  trace;
- a compiled block is modelled as one kernel between any two products;
- the all-gather of the next block and the reduction of the last one overlap with the computation of a block; the longer
  of the two counts. The sum over replicas in other nodes overlaps with both. The first gathers and the last reductions
  overlap with nothing;
- the all-to-alls of context parallelism overlap with nothing: attention needs their result;
- the efficiencies below are assumptions, the same for every device, and printed with each plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchditan.optim.optimizers import optimizer_flops
from torchditan.planner.devices import Device
from torchditan.planner.memory import (
    FLOAT32,
    Layout,
    Parameters,
    Weight,
    gathered,
    gathered_bytes,
    model_state,
    trains_plain,
)
from torchditan.planner.optimizer_cost import elements_updated_whole
from torchditan.planner.trace import Segment, StepTrace

PRODUCT_EFFICIENCY = 0.5
"""Share of the peak that matrix products and attention reach. With this value a compiled DiT-L on an H200 reaches the
MFU published for a pixel DiT of that size there (37 to 39%)."""
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that the other operators reach."""
LINK_EFFICIENCY = 0.75
"""Share of a link's bandwidth that collectives reach."""
LAUNCH_S = 6e-6
"""Host time per operator. A step cannot be shorter than its launches."""
LINK_LATENCY_S = 1.5e-6
"""Latency of a collective per additional device of a node."""
NETWORK_LATENCY_S = 5e-6
"""Latency of a collective per additional node: collectives are rings."""
FLOAT8_SPEEDUP = 1.6
"""Speedup of matrix products in float8 over bfloat16, including the casts. The peak of the hardware is 2."""

# Bytes moved per local element. The update reads weight and gradient and writes the weight, the norm reads one, and
# clipping reads and writes one. The average reads two and writes one. The optimizer state is read and written.
_UPDATE_BYTES = FLOAT32 * (3 + 1 + 2)
_EMA_BYTES = FLOAT32 * 3


@dataclass(frozen=True)
class Speed:
    """Speed that the run reaches on a device."""

    device: Device
    product_flops: float
    float32_flops: float
    """Peak of float32 products in the precision of the run."""
    compiled: bool

    @classmethod
    def of(cls, device: Device, *, is_float32: bool, tf32: bool, float8: bool, compiled: bool) -> Speed:
        float32_flops = device.tf32_flops if tf32 else device.float32_flops
        peak = float32_flops if is_float32 else device.bfloat16_flops
        return cls(device, PRODUCT_EFFICIENCY * peak * (FLOAT8_SPEEDUP if float8 else 1), float32_flops, compiled)

    @property
    def bytes_per_s(self) -> float:
        return MEMORY_EFFICIENCY * self.device.memory_gb_per_s * 1e9

    def seconds(self, segment: Segment, batch_size: int, *, in_block: bool = False) -> float:
        is_fused = in_block and self.compiled
        batch = [1, batch_size]
        traffic = (segment.fused_traffic if is_fused else segment.traffic) @ batch
        operators = np.maximum(segment.flops @ batch / self.product_flops, traffic / self.bytes_per_s)
        return max(float(operators.sum()), LAUNCH_S * int((traffic > 0).sum()))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part."""

    compute: float
    """Forward and backward, including the copies around gathers and reductions."""
    update: float
    """Clipping, optimizer and EMA. Muon's exchange of matrices counts here, because nothing hides it."""
    communication: float
    """All collectives, hidden or not."""
    exposed: float
    """The part of the collectives that is not hidden by computation."""

    @property
    def total(self) -> float:
        return self.compute + self.update + self.exposed


def step_time(
    parameters: Parameters, traces: Sequence[StepTrace], layout: Layout, speed: Speed, *, batch_size: int
) -> StepTime:
    """Estimate the seconds of a step. `traces` has one trace per block, as in `memory.timeline`."""
    gather = [_gather_seconds(block, layout, speed.device) for block in parameters.blocks]
    scatter, replicas = zip(*(_reduce_seconds(block, layout, speed.device) for block in parameters.blocks), strict=True)
    again = _gather_again_seconds(parameters, layout, speed.device)
    root_gather = _gather_seconds(parameters.root, layout, speed.device)
    root_reduce = sum(_reduce_seconds(parameters.root, layout, speed.device))
    is_plain = trains_plain(parameters, layout)
    copy_in, copy_out = (0.0, 0.0) if is_plain else _copy_seconds(parameters.root, layout, speed)
    compute = copy_in + copy_out
    compute += sum(speed.seconds(segment, batch_size) for segment in (traces[0].embed, traces[-1].head, traces[0].tail))
    compute *= layout.num_micro_batches
    communication, exposed = 0.0, 0.0
    exchange = _exchange_seconds(layout, speed.device, batch_size)
    for micro_batch in range(layout.num_micro_batches):
        is_last = micro_batch == layout.num_micro_batches - 1
        for i, trace in enumerate(traces):
            copy_in, copy_out = (0.0, 0.0) if is_plain else _copy_seconds(parameters.blocks[i], layout, speed)
            forward = speed.seconds(trace.forward, batch_size, in_block=True) + copy_in
            backward = speed.seconds(trace.backward, batch_size, in_block=True) + is_last * copy_out
            if again[i]:
                backward += copy_in
            following = gather[i + 1] if i + 1 < len(traces) else 0.0
            before = again[i - 1] if i > 0 else 0.0
            reduces = is_last and i + 1 < len(traces)
            inside = before + (scatter[i + 1] if reduces else 0.0)
            across = replicas[i + 1] if reduces else 0.0
            if not _replicas_are_apart(layout, speed.device):
                inside, across = inside + across, 0.0
            compute += forward + backward
            exposed += max(0.0, following - forward) + max(0.0, inside - backward, across - backward)
            communication += exchange
            exposed += exchange
        communication += sum(gather) + sum(again) + is_last * (sum(scatter) + sum(replicas) + root_reduce) + root_gather
        if layout.uses_teacher:  # the blocks of the teacher hide each other's gathers
            communication += sum(gather) + root_gather
            exposed += root_gather + gather[0]
        exposed += root_gather + gather[0] + is_last * (scatter[0] + replicas[0] + root_reduce)
    local = sum(weight.local(layout.num_shards, 0) for weight in parameters.all if weight.is_trained)
    state = model_state(parameters, num_shards=layout.num_shards, optimizer=layout.optimizer)
    averages = 0 if layout.ema == "none" else layout.num_averages
    update_bytes = local * (_UPDATE_BYTES + _EMA_BYTES * averages) + 2 * state["optimizer"]
    update = update_bytes / speed.bytes_per_s + _whole_updates_seconds(parameters, layout, speed)
    return StepTime(compute=compute, update=update, communication=communication, exposed=exposed)


def _whole_updates_seconds(parameters: Parameters, layout: Layout, speed: Speed) -> float:
    """Seconds of the updates that need whole parameters (Muon's): products on their owners, and the exchanges.

    A rank receives the parameters that it owns, then its rows of all results, in the dtype of the products.
    """
    optimizer, shapes, device = layout.optimizer, parameters.trained_shapes, speed.device
    num_ranks = layout.num_shards * layout.num_replicas
    flops = optimizer_flops(optimizer, shapes, num_ranks=num_ranks)
    if not flops:
        return 0.0
    is_float32 = optimizer.ns_dtype == "float32"
    peak = speed.float32_flops if is_float32 else device.bfloat16_flops
    num_bytes = (FLOAT32 if is_float32 else 2) * elements_updated_whole(optimizer, shapes)
    gather = collective_seconds(num_bytes / num_ranks, ranks=layout.num_shards, stride=1, device=device)
    scatter = collective_seconds(num_bytes / layout.num_shards, ranks=num_ranks, stride=1, device=device)
    return flops / (PRODUCT_EFFICIENCY * peak) + gather + scatter


def _trained_elements(weights: Sequence[Weight], layout: Layout) -> int:
    return sum(weight.padded(layout.num_shards) for weight in weights if weight.is_trained)


def _gather_seconds(weights: Sequence[Weight], layout: Layout, device: Device) -> float:
    num_bytes = gathered_bytes(weights, layout)
    return collective_seconds(num_bytes, ranks=layout.num_shards, stride=1, device=device)


def _gather_again_seconds(parameters: Parameters, layout: Layout, device: Device) -> list[float]:
    """Seconds of each block's all-gather in the backward pass, by the rule of parallelize.py."""
    if layout.num_shards == 1 or layout.reshard_after_forward == "never":
        return [0.0] * len(parameters.blocks)
    again = [_gather_seconds(block, layout, device) for block in parameters.blocks]
    return again if layout.reshard_after_forward == "always" else [*again[:-1], 0.0]


def _exchange_seconds(layout: Layout, device: Device, batch_size: int) -> float:
    """Seconds of a block's all-to-alls in one micro-batch, two in each pass. A rank keeps 1 / ranks of the bytes."""
    num_bytes = layout.exchanged_bytes * batch_size / 2
    one = collective_seconds(num_bytes, ranks=layout.context, stride=1, device=device)
    return 2 * layout.num_exchanges * one


def _replicas_are_apart(layout: Layout, device: Device) -> bool:
    """Whether shards are inside a node and replicas in other nodes, so that their collectives share no link."""
    return layout.num_shards <= device.devices_per_node < layout.num_shards * layout.num_replicas


def _reduce_seconds(weights: Sequence[Weight], layout: Layout, device: Device) -> tuple[float, float]:
    """Seconds of the reduce-scatter over shards and of the all-reduce over replicas, which is two passes of a ring."""
    num_bytes = layout.reduce_bytes * _trained_elements(weights, layout)
    scatter = collective_seconds(num_bytes, ranks=layout.num_shards, stride=1, device=device)
    all_reduce = collective_seconds(
        num_bytes / layout.num_shards, ranks=layout.num_replicas, stride=layout.num_shards, device=device
    )
    return scatter, 2 * all_reduce


def collective_seconds(num_bytes: float, *, ranks: int, stride: int, device: Device) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` in total over `ranks` ranks that are `stride` apart.

    A ring passes (ranks - 1) / ranks of the bytes through every device. Between nodes each member of the group in a
    node has its own network port.
    """
    if ranks == 1:
        return 0.0
    per_node = min(ranks, max(1, device.devices_per_node // stride))
    nodes = math.ceil(ranks / per_node)
    bandwidth = device.link_gb_per_s if per_node > 1 else math.inf
    if nodes > 1:
        bandwidth = min(bandwidth, per_node * device.network_gb_per_s)
    latency = (per_node - 1) * LINK_LATENCY_S + (nodes - 1) * NETWORK_LATENCY_S
    return num_bytes * (ranks - 1) / ranks / (LINK_EFFICIENCY * bandwidth * 1e9) + latency


def _copy_seconds(weights: Sequence[Weight], layout: Layout, speed: Speed) -> tuple[float, float]:
    """Seconds of the copies around a gather (cast of float32 shards, copy into place) and a reduction."""
    trained = _trained_elements(weights, layout)
    reduce = trained * (layout.param_bytes + layout.reduce_bytes)
    num_bytes = gathered_bytes(weights, layout)
    stored = sum(weight.itemsize * weight.padded(layout.num_shards) for weight in gathered(weights, layout))
    gather = (stored + num_bytes) / layout.num_shards + 2 * num_bytes
    if layout.num_shards == 1:
        reduce += trained * (layout.reduce_bytes + FLOAT32)
    return gather / speed.bytes_per_s, reduce / speed.bytes_per_s
