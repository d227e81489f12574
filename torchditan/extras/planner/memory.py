# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Memory of one device over a training step: model state by arithmetic, the rest from the traced step.

Notable:
- `fully_shard` splits dimension 0 into equal chunks and pads the last ones. The first rank holds the most. A parameter
  with few rows (the sin-cos table has one) is gathered with all its padding;
- gathers and reductions, and when their memory is freed, follow FSDP2 of torch 2.11 to 2.13 as parallelize.py uses it.
  One block and the all-gather of the next are in memory at a time. Gradients are reduced in float32 through a copy that
  the next block's reduction frees;
- one process trains the plain module: "gathered" are its copies of weights in lower precision, whose gradients are cast
  block by block. In float32 there are none, and autograd's gradients are the optimizer's;
- the optimizer state is counted from the tensors the optimizer creates on the meta device, or declares
  (optimizer_cost.py);
- the optimizer, clipping and EMA work in place: the optimizer step is never the peak;
- frozen weights have no gradient and no moments, and are stored in their own dtype. int8 weights are gathered as int8.
  On one shard, FSDP leaves those alone that it would not cast.

All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torchditan.config.options import Optimizer
from torchditan.extras.planner.optimizer_cost import optimizer_state_bytes
from torchditan.extras.planner.trace import StepTrace
from torchditan.models.spec import ModelSpec

FLOAT32 = 4
_ADAMW = Optimizer()


@dataclass(frozen=True)
class Weight:
    """A parameter and its full (unsharded) shape."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    itemsize: int = FLOAT32
    """Bytes per element as stored."""
    is_floating_point: bool = True
    """If true, gathered in the precision of the run; other dtypes (int8) are gathered unchanged."""

    def gathered_itemsize(self, param_bytes: int) -> int:
        return param_bytes if self.is_floating_point else self.itemsize

    def padded(self, num_shards: int) -> int:
        """Elements when gathered: `num_shards` equal chunks of dimension 0."""
        return num_shards * math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])

    def local(self, num_shards: int, rank: int) -> int:
        """Elements of one rank's shard. The last ranks may have fewer, or none."""
        return self.rows(num_shards, rank) * math.prod(self.shape[1:])

    def rows(self, num_shards: int, rank: int) -> int:
        """Rows of dimension 0 in one rank's shard."""
        chunk = math.ceil(self.shape[0] / num_shards)
        return min(chunk, max(0, self.shape[0] - rank * chunk))


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, grouped into the units that FSDP gathers and reduces: each block, and the rest."""

    blocks: list[list[Weight]]
    root: list[Weight]
    buffer_bytes: int = 0
    """Position tables, other buffers and the tables of the objective, unsharded on every rank."""

    @property
    def all(self) -> list[Weight]:
        return [*self.root, *(tensor for block in self.blocks for tensor in block)]

    @property
    def trained_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of the trained parameters."""
        return [(weight.name, weight.shape) for weight in self.all if weight.is_trained]


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
        shard_rank: rank of the shard; the first has the most.
        ema: weights that have an average.
        optimizer: options of the optimizer.
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
    """Settings of the run that determine memory, apart from the model and the batch."""

    num_shards: int
    num_replicas: int
    param_bytes: int
    """Bytes of a gathered parameter and of its gradient."""
    reduce_bytes: int
    """Bytes of a gradient while it is reduced."""
    num_micro_batches: int
    cpu_offload: bool
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When gathered weights are freed; see `parallelize`."""


@dataclass(frozen=True)
class Instant:
    """A moment of the step, and the memory of the device by category."""

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
    """The remaining float32 gradient."""


def _trains_plain(parameters: Parameters, layout: Layout) -> bool:
    """Whether one process trains the plain module, by the rule of parallelize.py."""
    is_alone = layout.num_shards == layout.num_replicas == 1 and not layout.cpu_offload
    frozen = [weight for block in parameters.blocks for weight in block if not weight.is_trained]
    return is_alone and all(weight.gathered_itemsize(layout.param_bytes) == weight.itemsize for weight in frozen)


def _managed(weights: Sequence[Weight], layout: Layout) -> list[Weight]:
    """Those that `fully_shard` manages, by the rule of parallelize.py."""
    if layout.num_shards > 1 or layout.cpu_offload:
        return list(weights)
    return [w for w in weights if w.is_trained or w.gathered_itemsize(layout.param_bytes) != w.itemsize]


def _unit(tensors: Sequence[Weight], layout: Layout) -> _Unit:
    trained = sum(tensor.padded(layout.num_shards) for tensor in tensors if tensor.is_trained)
    managed = _managed(tensors, layout)
    return _Unit(
        gathered=sum(w.gathered_itemsize(layout.param_bytes) * w.padded(layout.num_shards) for w in managed),
        gradient=layout.param_bytes * sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_trained),
        reduced=layout.reduce_bytes * trained,
        shard=FLOAT32 * trained // layout.num_shards,
    )


def timeline(
    parameters: Parameters,
    traces: Sequence[StepTrace],
    layout: Layout,
    *,
    state: Mapping[str, int],
    batch_size: int,
    batch_bytes: float,
    workspace: float,
    frozen_bytes: float = 0,
    frozen_peak: float = 0,
) -> list[Instant]:
    """The moments of the last micro-batch at which memory can peak, in order.

    Args:
        parameters: of the model.
        traces: for each block i, the trace of a model made of such blocks; often all the same.
        layout: sharding and precision.
        state: result of `model_state`.
        batch_size: images in a micro-batch.
        batch_bytes: bytes of the batch and its noise.
        workspace: bytes that the device libraries take from the allocator.
        frozen_bytes: weights of the frozen networks of the objective.
        frozen_peak: highest bytes while they compute.
    """
    constant = {name: 0.0 if layout.cpu_offload else state[name] for name in ("parameters", "optimizer", "ema")}
    constant |= {"buffers": parameters.buffer_bytes, "batch": batch_bytes, "libraries": workspace}
    constant["frozen networks"] = frozen_bytes
    step = _Step(parameters, layout, constant)
    if frozen_peak:
        step.encode(frozen_peak)
    step.forward(traces, batch_size)
    step.backward(traces, batch_size)
    step.update()
    return step.instants


class _Step:
    """Records the moments of a step. Call its three parts in order."""

    def __init__(self, parameters: Parameters, layout: Layout, constant: Mapping[str, float]) -> None:
        self.instants: list[Instant] = []
        self.kept = 0.0
        """Bytes of activations saved for the backward pass."""
        self.layout, self.constant = layout, constant
        units = [_unit(weights, layout) for weights in (*parameters.blocks, parameters.root)]
        self.is_plain = _trains_plain(parameters, layout)
        if self.is_plain:
            has_copies = layout.param_bytes != FLOAT32
            units = [dataclasses.replace(u, gathered=u.gathered if has_copies else 0, reduced=0) for u in units]
        self.blocks, self.root = units[:-1], units[-1]
        has_frozen = any(not weight.is_trained for block in parameters.blocks for weight in _managed(block, layout))
        self.remaining = 0.0 if has_frozen else 1.0
        """Share of a block's gathered weights that stay after its forward pass, by the rule of parallelize.py. The last
        block stays whole, or is gathered again at once."""
        if layout.num_shards > 1:
            self.remaining = 1.0 if layout.reshard_after_forward == "never" else 0.0

    def encode(self, working: float) -> None:
        self._add("frozen networks", gathered=0, working=working)

    def forward(self, traces: Sequence[StepTrace], batch_size: int) -> None:
        embed, head = traces[0].embed, traces[-1].head
        self._add("forward, embedders", gathered=self.root.gathered, working=embed.peak(batch_size))
        self.kept += embed.left(batch_size)
        for i, trace in enumerate(traces):
            label = f"block {i + 1} of {len(self.blocks)}"
            if self.layout.num_shards > 1 or self.remaining < 1:
                self._add(f"gathering of {label}", gathered=self._gathered_in_gather(i))
            working = trace.forward.peak(batch_size)
            self._add(f"forward of {label}", gathered=self._gathered_in_forward(i), working=working)
            self.kept += trace.forward.left(batch_size)
        gathered = self._gathered_in_backward(len(self.blocks), own=False)
        if self.layout.num_shards > 1 and self.layout.reshard_after_forward != "always":
            both = gathered + self.blocks[-1].gathered  # the result of its all-gather, until the forward pass ends
            self._add("final layer", gathered=both, working=traces[-1].output.peak(batch_size))
        self._add("final layer and loss", gathered=gathered, working=head.peak(batch_size))
        self.kept += head.left(batch_size)

    def backward(self, traces: Sequence[StepTrace], batch_size: int) -> None:
        reduction = 0  # input of the last block's reduction, which the next reduction frees
        for i, block in reversed(list(enumerate(self.blocks))):
            label = f"block {i + 1} of {len(self.blocks)}"
            self._add(
                f"backward of {label}",
                gathered=self._gathered_in_backward(i),
                working=traces[i].backward.peak(batch_size),
                first_reduced=i + 1,
                reduction=reduction,
            )
            self.kept += traces[i].backward.left(batch_size)
            reduction = block.reduced
            self._add(
                f"reduction of {label}",
                gathered=self._gathered_in_backward(i, own=False),
                working=self._working_in_reduction(block),
                first_reduced=i + 1,
                reduction=reduction,
            )
        self._add(
            "backward of the embedders",
            gathered=self.root.gathered,
            working=traces[0].tail.peak(batch_size),
            first_reduced=0,
            reduction=reduction,
        )
        self.kept += traces[0].tail.left(batch_size)
        self._add("reduction of the rest", gathered=0, first_reduced=0, reduction=self.root.reduced)

    def update(self) -> None:
        self.kept = 0.0
        working = 0 if self.layout.cpu_offload else self.root.shard
        self._add("optimizer step", gathered=0, working=working, first_reduced=0)

    def _add(
        self,
        label: str,
        *,
        gathered: float,
        working: float = 0,
        first_reduced: int | None = None,
        reduction: float = 0,
    ) -> None:
        """Record a moment. Gradients of the blocks from `first_reduced` on are reduced; None: no block's yet."""
        layout = self.layout
        first = len(self.blocks) if first_reduced is None else first_reduced
        reduced, unreduced = self.blocks[first:], self.blocks[:first]
        shards = 0 if layout.cpu_offload else sum(block.shard for block in reduced)
        unsharded = sum(self._unsharded(unit) for unit in (*unreduced, self.root))
        parts = {
            "parameters": self.constant["parameters"],
            "gathered parameters": gathered,
            "gradients": shards + unsharded,
            "gradient reduction": reduction + self._held_back(reduced),
            "optimizer": self.constant["optimizer"],
            "ema": self.constant["ema"],
            "buffers": self.constant["buffers"],
            "frozen networks": self.constant["frozen networks"],
            "activations": self.kept,
            "working memory": working,
            "batch": self.constant["batch"],
            "libraries": self.constant["libraries"],
        }
        self.instants.append(Instant(label, parts))

    def _held_back(self, reduced: Sequence[_Unit]) -> float:
        """FSDP keeps the sums over replicas."""
        if self.layout.num_replicas == 1 or self.layout.reduce_bytes == FLOAT32:
            return 0.0
        return sum(block.reduced / self.layout.num_shards for block in reduced)

    def _unsharded(self, unit: _Unit) -> int:
        """Until the last micro-batch every rank keeps its gradients unsharded, in the dtype of the reduction."""
        if self.layout.num_micro_batches == 1:
            return 0
        itemsize = FLOAT32 if self.is_plain else self.layout.reduce_bytes
        return itemsize * unit.gradient // self.layout.param_bytes

    def _gathered_in_gather(self, i: int) -> float:
        before = self.blocks[i - 1].gathered if i > 0 else self.root.gathered
        own = self.blocks[i].gathered * (1 + 1 / self.layout.num_shards)
        return self.root.gathered + before + own + self._left_by_forward(i)

    def _gathered_in_forward(self, i: int) -> float:
        # The result of an all-gather is kept until the next all-gather was copied out.
        copies = 2 if self.layout.num_shards > 1 else 1
        return self.root.gathered + copies * self.blocks[i].gathered + self._left_by_forward(i)

    def _gathered_in_backward(self, i: int, *, own: bool = True) -> float:
        """During backward of block i the previous block is being gathered. own: block i is still gathered."""
        gathers_ahead = i > 0 and self.layout.num_shards > 1 and self.remaining < 1
        ahead = self.blocks[i - 1].gathered if gathers_ahead else 0
        return self.root.gathered + ahead + (self.blocks[i].gathered if own else 0) + self._left_by_forward(i)

    def _left_by_forward(self, i: int) -> float:
        """Gathered weights that the forward passes of the first i blocks left for the backward pass."""
        stop = i if self.remaining == 1 else min(i, len(self.blocks) - 1)
        return self.remaining * sum(block.gathered for block in self.blocks[:stop])

    def _working_in_reduction(self, block: _Unit) -> float:
        if self.is_plain:
            return block.shard + (block.gradient if self.layout.param_bytes != FLOAT32 else 0)
        own_gradient = 0 if self.layout.num_micro_batches > 1 else block.gradient
        is_cast = self.layout.reduce_bytes != FLOAT32
        output = block.shard + (block.reduced / self.layout.num_shards if is_cast else 0)
        return max(own_gradient, output - self._unsharded(block))
