# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Memory of one device over a training step: model state by arithmetic, the rest laid along the traced step.

Notable:
- `fully_shard` cuts dimension 0 into equal chunks and pads the last ones: the first rank holds the most, and a
  parameter with few rows (the sin-cos table has one) is gathered with all its padding;
- what is gathered and reduced, and when it is let go of, follows FSDP2 of torch 2.11 to 2.13 under parallelize.py:
  one block and the next one's all-gather at a time where there are shards or frozen weights, else everything from
  forward to backward; gradients are reduced in float32 through a copy that the next block's reduction lets go of;
- the optimizer's state is counted from what it makes on the meta device, or declares (optim.py);
- the optimizer, clipping and EMA work in place: the optimizer step is never the peak;
- frozen weights have no gradient and no moments, and are stored in their own dtype; int8 ones are gathered as int8.

All sizes are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchditan.ablation.planner_trace import Segment, StepTrace
from torchditan.config import Optimizer
from torchditan.models.spec import ModelSpec
from torchditan.optim import optimizer_state_bytes

FLOAT32 = 4
_ADAMW = Optimizer()


@dataclass(frozen=True)
class Weight:
    """A parameter, by its full shape."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    itemsize: int = FLOAT32
    """Bytes of an element at rest."""
    is_floating_point: bool = True
    """Gathered in the precision of the run; others (int8) as they are."""

    def gathered_itemsize(self, param_bytes: int) -> int:
        return param_bytes if self.is_floating_point else self.itemsize

    def padded(self, num_shards: int) -> int:
        """Elements when gathered: `num_shards` equal chunks of dimension 0."""
        return num_shards * math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])

    def local(self, num_shards: int, rank: int) -> int:
        """Elements of one rank's shard; the last ranks may have fewer, or none."""
        return self.rows(num_shards, rank) * math.prod(self.shape[1:])

    def rows(self, num_shards: int, rank: int) -> int:
        """Rows of dimension 0 in one rank's shard."""
        chunk = math.ceil(self.shape[0] / num_shards)
        return min(chunk, max(0, self.shape[0] - rank * chunk))


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model in the units that FSDP gathers and reduces: each block, and the rest."""

    blocks: list[list[Weight]]
    root: list[Weight]
    buffer_bytes: int = 0
    """Tables of positions and the like, whole on every rank."""

    @property
    def all(self) -> list[Weight]:
        return [*self.root, *(tensor for block in self.blocks for tensor in block)]


def model_parameters(spec: ModelSpec) -> Parameters:
    with torch.device("meta"):
        model = spec.build()
    in_blocks = [{id(parameter) for parameter in block.parameters()} for block in spec.blocks(model)]
    blocks: list[list[Weight]] = [[] for _ in in_blocks]
    root: list[Weight] = []
    for name, parameter in model.named_parameters():
        tensor = Weight(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            itemsize=parameter.element_size(),
            is_floating_point=parameter.is_floating_point(),
        )
        owners = [i for i, ids in enumerate(in_blocks) if id(parameter) in ids]
        (blocks[owners[0]] if owners else root).append(tensor)
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Parameters(blocks=blocks, root=root, buffer_bytes=buffer_bytes)


def model_state(
    parameters: Parameters,
    *,
    num_shards: int,
    shard_rank: int = 0,
    ema: Literal["none", "all", "trained"] = "all",
    optimizer: Optimizer = _ADAMW,
) -> dict[str, int]:
    """Bytes of one rank's local tensors: parameters, gradients, the optimizer's state, EMA.

    Args:
        parameters: of the model.
        num_shards: ranks the parameters are sharded over, 1 in DDP.
        shard_rank: which of them; the first has the most.
        ema: weights that there is an average of.
        optimizer: its options.
    """
    sizes = {tensor: tensor.local(num_shards, shard_rank) for tensor in parameters.all}
    trained = [tensor for tensor in sizes if tensor.is_trained]
    return {
        "parameters": sum(tensor.itemsize * size for tensor, size in sizes.items()),
        "gradients": FLOAT32 * sum(sizes[tensor] for tensor in trained),
        "optimizer": optimizer_state_bytes(
            optimizer, [(tensor.name, tensor.shape, tensor.rows(num_shards, shard_rank)) for tensor in trained]
        ),
        "ema": sum(tensor.itemsize * size for tensor, size in sizes.items() if ema == "all" or tensor.is_trained)
        if ema != "none"
        else 0,
    }


@dataclass(frozen=True)
class Layout:
    """What of the run's settings decides memory, besides the model and the batch."""

    num_shards: int
    num_replicas: int
    param_bytes: int
    """Bytes of a gathered parameter and of its gradient."""
    reduce_bytes: int
    """Bytes of a gradient while it is reduced."""
    num_micro_batches: int
    ema: Literal["none", "all", "trained"]
    """Weights that there is an average of."""
    cpu_offload: bool
    optimizer: Optimizer


@dataclass(frozen=True)
class Instant:
    """A moment of the step, and what is on the device then."""

    label: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Unit:
    """Bytes of one communication unit on one rank."""

    gathered: int
    gradient: int
    """Unsharded, in the parameters' dtype."""
    reduced: int
    """Input of the reduction: unsharded, in the dtype of the reduction."""
    shard: int
    """The float32 gradient that is left."""


def _unit(tensors: Sequence[Weight], layout: Layout) -> _Unit:
    trained = sum(tensor.padded(layout.num_shards) for tensor in tensors if tensor.is_trained)
    return _Unit(
        gathered=sum(
            tensor.gathered_itemsize(layout.param_bytes) * tensor.padded(layout.num_shards) for tensor in tensors
        ),
        gradient=layout.param_bytes * sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_trained),
        reduced=layout.reduce_bytes * trained,
        shard=FLOAT32 * trained // layout.num_shards,
    )


def timeline(
    parameters: Parameters,
    traces: Sequence[StepTrace],
    layout: Layout,
    *,
    batch_size: int,
    batch_bytes: float,
    workspace: float,
) -> list[Instant]:
    """The moments of the last micro-batch that can be the peak, in order.

    Args:
        parameters: of the model.
        traces: the step of a model with blocks like the i-th, for each block i; often all the same.
        layout: sharding and precision.
        batch_size: images in a micro-batch.
        batch_bytes: the batch and its noise.
        workspace: what the libraries of the device hold from the allocator.
    """
    state = dict.fromkeys(("parameters", "gradients", "optimizer", "ema"), 0)
    if not layout.cpu_offload:
        state = model_state(parameters, num_shards=layout.num_shards, ema=layout.ema, optimizer=layout.optimizer)
    blocks = [_unit(block, layout) for block in parameters.blocks]
    root = _unit(parameters.root, layout)
    num_blocks = len(blocks)
    has_frozen = any(not weight.is_trained for block in parameters.blocks for weight in block)
    is_resharded = layout.num_shards > 1 or has_frozen  # as parallelize.py decides it
    # Until the last micro-batch every rank keeps its gradients unsharded, in the dtype of the reduction.
    unsharded = [
        layout.reduce_bytes * unit.gradient // layout.param_bytes if layout.num_micro_batches > 1 else 0
        for unit in blocks
    ]
    root_unsharded = layout.reduce_bytes * root.gradient // layout.param_bytes if layout.num_micro_batches > 1 else 0
    instants: list[Instant] = []

    def add(label: str, *, gathered: float, kept: float, working: float, first: int, reduction: float = 0) -> None:
        """`first`: blocks below it are not reduced yet."""
        shards = 0.0 if layout.cpu_offload else sum(unit.shard for unit in blocks[first:])
        held_back = 0.0
        if layout.num_replicas > 1 and layout.reduce_bytes != FLOAT32:  # FSDP holds what was summed over replicas
            held_back = sum(unit.reduced / layout.num_shards for unit in blocks[first:])
        instants.append(
            Instant(
                label,
                {
                    "parameters": state["parameters"],
                    "gathered parameters": gathered,
                    "gradients": shards + sum(unsharded[:first]) + root_unsharded,
                    "gradient reduction": reduction + held_back,
                    "optimizer": state["optimizer"],
                    "ema": state["ema"],
                    "buffers": parameters.buffer_bytes,
                    "activations": kept,
                    "working memory": working,
                    "batch": batch_bytes,
                    "libraries": workspace,
                },
            )
        )

    def left(segment: Segment) -> float:
        return segment.left(batch_size)

    def gathered_in_forward(i: int) -> float:
        if is_resharded:  # the result of an all-gather stays until the next one was copied out of its own
            return root.gathered + (2 if layout.num_shards > 1 else 1) * blocks[i].gathered
        return root.gathered + sum(unit.gathered for unit in blocks[: i + 1])

    def gathered_in_gather(i: int) -> float:
        before = blocks[i - 1].gathered if i > 0 else root.gathered
        return root.gathered + before + blocks[i].gathered * (1 + 1 / layout.num_shards)

    kept = 0.0
    add(
        "forward, embedders",
        gathered=root.gathered,
        kept=kept,
        working=traces[0].embed.peak(batch_size),
        first=num_blocks,
    )
    kept += left(traces[0].embed)
    for i, trace in enumerate(traces):
        working = trace.forward.peak(batch_size)
        label = f"block {i + 1} of {num_blocks}"
        if is_resharded:
            add(f"gathering of {label}", gathered=gathered_in_gather(i), kept=kept, working=0, first=num_blocks)
        add(f"forward of {label}", gathered=gathered_in_forward(i), kept=kept, working=working, first=num_blocks)
        kept += left(trace.forward)

    def gathered_in_backward(i: int, *, own: bool = True) -> float:
        """While block i goes backward the one before it is gathered; own: block i still is."""
        if is_resharded:
            ahead = blocks[i - 1].gathered if i > 0 and layout.num_shards > 1 else 0
            return root.gathered + ahead + (blocks[i].gathered if own else 0)
        return root.gathered + sum(unit.gathered for unit in blocks[: i + own])

    add(
        "final layer and loss",
        gathered=gathered_in_backward(num_blocks, own=False),
        kept=kept,
        working=traces[-1].head.peak(batch_size),
        first=num_blocks,
    )
    kept += left(traces[-1].head)
    reduction = 0.0
    for i in reversed(range(num_blocks)):
        label = f"backward of block {i + 1} of {num_blocks}"
        working = traces[i].backward.peak(batch_size)
        add(
            label,
            gathered=gathered_in_backward(i),
            kept=kept,
            working=working,
            first=i + 1,
            reduction=reduction,
        )
        kept += left(traces[i].backward)
        reduction = blocks[i].reduced
        own_gradient = 0 if layout.num_micro_batches > 1 else blocks[i].gradient
        output = blocks[i].shard + (reduction / layout.num_shards if layout.reduce_bytes != FLOAT32 else 0)
        add(
            f"reduction of block {i + 1} of {num_blocks}",
            gathered=gathered_in_backward(i, own=False),
            kept=kept,
            working=max(own_gradient, output - unsharded[i]),
            first=i + 1,
            reduction=reduction,
        )
    tail = traces[0].tail
    add(
        "backward of the embedders",
        gathered=root.gathered,
        kept=kept,
        working=tail.peak(batch_size),
        first=0,
        reduction=reduction,
    )
    add("reduction of the rest", gathered=0, kept=kept + left(tail), working=0, first=0, reduction=root.reduced)
    add("optimizer step", gathered=0, kept=0, working=0 if layout.cpu_offload else root.shard, first=0)
    return instants
