# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One process and DDP: every rank keeps all weights, and computes with copies of them in lower precision.

Notable:
- optimizer, clipping, averages and checkpoints see the float32 weights. During forward and backward the modules hold
  the computing weights instead: copies in the precision of the run, or the same memory if the precisions are equal;
- one foreach call refreshes all copies, in the first forward after an update. `fully_shard` would cast and copy
  parameter by parameter, and again for every micro-batch;
- the backward pass frees the copies block by block, as `fully_shard` does, so that they add nothing to the optimizer
  step. Each block has one allocation;
- when the backward pass of a block ends, its gradients move to one buffer in the dtype of the reduction. DDP averages
  the buffer over the ranks while the backward pass continues. The arithmetic is that of `fully_shard`;
- one process in float32 needs none of this: it trains the plain model;
- a model that is compiled as one graph has one backward pass, after which all gradients are reduced. CUDA graphs read
  the copies at the addresses they were recorded with, so the copies then stay allocated;
- in DDP the float32 weights are DTensors, with the mesh and placements that `fully_shard` would give them.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

ALIGNMENT = 64
"""A copy starts at a multiple of this number of elements."""


def can_replicate(blocks: nn.ModuleList, mesh: DeviceMesh) -> bool:
    """Whether every rank keeps all weights, and those of the blocks are trained.

    A copy of frozen weights would take more memory than it is worth: `fully_shard` frees it after each use.
    """
    return mesh.size(mesh.ndim - 1) == 1 and all(parameter.requires_grad for parameter in blocks.parameters())


def replicate(
    model: nn.Module,
    *,
    blocks: nn.ModuleList,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    is_one_graph: bool = False,
    has_cuda_graphs: bool = False,
) -> None:
    """Give a model the precision and the gradient reduction of `fully_shard` on one shard, in place.

    Adds `set_requires_gradient_sync` and `reshard`, as `fully_shard` does. Move the model to its device before its
    first forward, not later.

    Args:
        model: any module, usually on the meta device.
        blocks: the repeated blocks of the model. Gradients are reduced per block.
        mesh: of `ParallelDims.build_mesh`, with one shard.
        param_dtype: dtype of the weights in forward and backward.
        reduce_dtype: dtype in which gradients are accumulated over micro-batches and reduced over ranks.
        is_one_graph: the forward of the model is one compiled function. Hooks of blocks would end its graph.
        has_cuda_graphs: CUDA graphs compute forward and backward. They need fixed addresses of the weights, and
            overwrite their gradients in the next micro-batch.
    """
    if mesh.size() > 1:
        _make_dtensors(model, mesh)
    replica = Replica(
        model, blocks, mesh=mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype, has_cuda_graphs=has_cuda_graphs
    )
    added: Any = model
    added.set_requires_gradient_sync = replica.set_requires_gradient_sync
    added.reshard = replica.reshard
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if mesh.size() > 1 or dtypes != {param_dtype} or reduce_dtype != param_dtype or has_cuda_graphs:
        replica.register_hooks(of_blocks=not is_one_graph)


def _make_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters by DTensors that share their memory."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, places in _places(model).items():
        made[parameter] = nn.Parameter(_as_dtensor(parameter.detach(), mesh), requires_grad=parameter.requires_grad)
        _put(made[parameter], places)


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        tensor, mesh, (Replicate(), Shard(0)), run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _parameters_outside(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of all modules that are not in a block. A block may share them."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in blocks:
            yield from _parameters_outside(child, blocks)


_Places = list[tuple[dict[str, nn.Parameter | None], str]]
"""Where modules hold a parameter: their tables of parameters, and its name there."""


def _places(model: nn.Module) -> dict[nn.Parameter, _Places]:
    """Where a model holds each of its parameters; several modules may share one."""
    found: dict[nn.Parameter, _Places] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module._parameters, name))
    return found


def _put(parameter: nn.Parameter, places: _Places) -> None:
    for table, name in places:
        table[name] = parameter


@dataclass(eq=False, slots=True)
class _Weight:
    """A parameter in both of its forms."""

    master: nn.Parameter
    computing: nn.Parameter
    places: _Places
    gradient: torch.Tensor | None = None
    """That of `computing` in the dtype of the reduction, summed over micro-batches: a part of a buffer."""


@dataclass(frozen=True)
class _Buffer:
    """Gradients of some weights that are reduced together."""

    weights: list[_Weight]
    tensor: torch.Tensor


@dataclass(eq=False)
class _Unit:
    """A block, or everything outside the blocks."""

    weights: list[_Weight] = field(default_factory=list)
    buffers: list[_Buffer] = field(default_factory=list)
    """Those whose reduction has not started. Weights that get their first gradient later have their own."""
    memory: torch.Tensor | None = None
    """That of all copies, 1D; None if the unit computes with the float32 weights."""
    copies: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    """The float32 weights that `copies` are copies of."""
    is_fresh: bool = False
    """Whether the copies exist and are those of the current weights."""
    stays_allocated: bool = False

    def allocate(self) -> None:
        if self.memory is not None and not self.memory.untyped_storage().size():  # resizing always moves the memory
            self.memory.untyped_storage().resize_(self.memory.numel() * self.memory.element_size())

    def free(self) -> None:
        """Mark the copies as old, and free their memory. Their tensors stay, because autograd refers to them."""
        self.is_fresh = False
        if self.memory is not None and not self.stays_allocated:
            self.memory.untyped_storage().resize_(0)


class Replica:
    """Shows the computing weights of a model in forward and backward, and moves their gradients to the float32 weights.

    Autograd runs the nodes that are ready from the newest to the oldest. When the gradient of a block's output is
    known, the blocks that ran after it are therefore done.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: nn.ModuleList,
        *,
        mesh: DeviceMesh,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        has_cuda_graphs: bool = False,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.mesh = mesh
        self.group = mesh.get_group(0) if mesh.size() > 1 else None
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.has_cuda_graphs = has_cuda_graphs
        self.syncs = True
        self._units: list[_Unit] = []
        """The blocks, then the rest. Made in the first forward, when the weights have memory."""
        self._is_computing = False
        self._has_callback = False
        self._current_block: int | None = None
        self._reductions: deque[tuple[_Buffer, dist.Work]] = deque()

    def register_hooks(self, *, of_blocks: bool = True) -> None:
        self.has_block_hooks = of_blocks
        self.model.register_forward_pre_hook(self._before_forward, prepend=True)
        self.model.register_forward_hook(self._after_forward, always_call=True)
        for number, block in enumerate(self.blocks if of_blocks else ()):
            block.register_forward_hook(functools.partial(self._after_block, number), with_kwargs=True)
        # Whoever asks for the weights may write to them.
        self.model.register_state_dict_pre_hook(lambda *_: self.reshard())
        self.model.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backward pass completes the gradients. Before that, each rank adds up its own."""
        self.syncs = requires_gradient_sync

    def reshard(self) -> None:
        """Show the float32 weights, and copy them again in the next forward."""
        for unit in self._units:
            unit.free()
        self._show(computing=False)

    def _show(self, *, computing: bool) -> None:
        if computing != self._is_computing:
            for weight in self._all():
                _put(weight.computing if computing else weight.master, weight.places)
            self._is_computing = computing

    def _all(self) -> Iterable[_Weight]:
        return (weight for unit in self._units for weight in unit.weights)

    @torch.no_grad()
    def _prepare(self) -> None:
        """Create the computing weights."""
        root = len(self.blocks)
        unit_of: dict[nn.Parameter, int] = {}
        for number, block in enumerate(self.blocks):
            for parameter in block.parameters():
                unit_of[parameter] = root if parameter in unit_of else number  # shared by blocks: freed at the end
        unit_of.update(dict.fromkeys(_parameters_outside(self.model, set(self.blocks)), root))
        self._units = [_Unit(stays_allocated=self.has_cuda_graphs) for _ in range(root + 1)]
        members: list[list[nn.Parameter]] = [[] for _ in self._units]
        places = _places(self.model)
        for parameter in places:
            members[unit_of[parameter]].append(parameter)
        for unit, masters in zip(self._units, members, strict=True):
            computing = self._computing_weights(unit, masters)
            unit.weights += [_Weight(m, c, places[m]) for m, c in zip(masters, computing, strict=True)]

    def _computing_weights(self, unit: _Unit, masters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Copies in one allocation, or parameters on the memory of the float32 weights."""
        local = [(master.to_local() if isinstance(master, DTensor) else master).detach() for master in masters]
        unit.sources = [tensor for tensor in local if tensor.is_floating_point() and tensor.dtype != self.param_dtype]
        starts = [0, *itertools.accumulate(_aligned(source.numel()) for source in unit.sources)]
        if unit.sources:
            unit.memory = torch.empty(starts[-1], dtype=self.param_dtype, device=unit.sources[0].device)
            places = zip(starts, unit.sources, strict=False)
            unit.copies = [unit.memory[start:][: source.numel()].view(source.shape) for start, source in places]
        copy_of = dict(zip(unit.sources, unit.copies, strict=True))
        return [
            nn.Parameter(copy_of.get(tensor, tensor), requires_grad=master.requires_grad)
            for tensor, master in zip(local, masters, strict=True)
        ]

    @torch.no_grad()
    def _refresh(self, units: list[_Unit]) -> None:
        """Copy the float32 weights, in one call, where that was not done since the last change."""
        stale = [unit for unit in units if not unit.is_fresh]
        for unit in stale:
            unit.allocate()
            unit.is_fresh = True
        memories = tuple(unit.memory for unit in stale if unit.memory is not None)
        if memories:
            with torch.autograd._unsafe_preserve_version_counter(memories):  # the values are those that autograd saved
                torch._foreach_copy_(
                    [copy for unit in stale for copy in unit.copies],
                    [source for unit in stale for source in unit.sources],
                )

    def _before_forward(self, *_: Any) -> None:
        if not self._units:
            self._prepare()
        self._refresh(self._units)
        self._has_callback, self._current_block = False, None  # also after a backward pass that failed
        self._show(computing=True)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _hook_gradients(output, self._before_backward):
            self._show(computing=False)

    def _after_block(self, number: int, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # What a block passes on unchanged has its gradient when the blocks before it still compute.
        hook = functools.partial(self._before_backward_of_block, number)
        _hook_gradients(output, hook, passed_on=tree_leaves((args, kwargs)))

    def _before_backward(self, _gradient: torch.Tensor) -> None:
        if not self._has_callback:
            self._has_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._refresh(self._units[-1:] if self.has_block_hooks else self._units)  # of an earlier forward
        self._show(computing=True)

    def _before_backward_of_block(self, number: int, _gradient: torch.Tensor) -> None:
        """The block whose backward pass ran until now is done with its weights and has its gradients."""
        if self._current_block is not None and self._current_block != number:
            self._finish_backward(self._units[self._current_block])
        self._current_block = number
        self._refresh(self._units[number : number + 1])  # of an earlier forward

    def _after_backward(self) -> None:
        for unit in self._units:
            self._finish_backward(unit)
        while self._reductions:
            buffer, work = self._reductions.popleft()
            work.wait()
            self._give_gradients(buffer)
        self._current_block = None
        self._has_callback = False
        self._show(computing=False)

    @torch.no_grad()
    def _finish_backward(self, unit: _Unit) -> None:
        """Move the gradients to buffers. In the last micro-batch, free the copies and start the reduction."""
        if self.syncs:
            unit.free()
        if not self.syncs and self.reduce_dtype == self.param_dtype and not self.has_cuda_graphs:
            return  # autograd adds them up
        new: list[_Weight] = []
        for weight in unit.weights:
            gradient = weight.computing.grad
            if gradient is None:
                continue
            if weight.gradient is None:
                new.append(weight)
            else:
                weight.gradient += gradient
                weight.computing.grad = None
        if new:
            unit.buffers.append(self._buffer(new))
        if not self.syncs:
            return
        for buffer in unit.buffers:
            if self.group is None:
                self._give_gradients(buffer)
            else:
                work = dist.all_reduce(buffer.tensor, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
                self._reductions.append((buffer, work))
        unit.buffers.clear()

    def _buffer(self, weights: list[_Weight]) -> _Buffer:
        """A buffer with the first gradients of some weights."""
        gradients = [weight.computing.grad for weight in weights if weight.computing.grad is not None]
        size = sum(gradient.numel() for gradient in gradients)
        tensor = torch.empty(size, dtype=self.reduce_dtype, device=gradients[0].device)
        parts = _split_like(tensor, weights)
        torch._foreach_copy_(parts, gradients)
        for weight, part in zip(weights, parts, strict=True):
            weight.gradient, weight.computing.grad = part, None
        return _Buffer(weights, tensor)

    @torch.no_grad()
    def _give_gradients(self, buffer: _Buffer) -> None:
        """Give the reduced gradients to the float32 weights."""
        parts = _split_like(buffer.tensor.to(buffer.weights[0].master.dtype), buffer.weights)
        for weight, part in zip(buffer.weights, parts, strict=True):
            weight.gradient = None
            gradient = part if self.group is None else _as_dtensor(part, self.mesh)
            if weight.master.grad is None:
                weight.master.grad = gradient
            else:
                weight.master.grad += gradient


def _aligned(numel: int) -> int:
    """Elements of an allocation whose end is aligned for kernels that load 16 bytes at a time."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _split_like(buffer: torch.Tensor, weights: list[_Weight]) -> list[torch.Tensor]:
    parts = buffer.split([weight.computing.numel() for weight in weights])
    return [part.view(weight.computing.shape) for part, weight in zip(parts, weights, strict=True)]


def _hook_gradients(output: Any, hook: Any, *, passed_on: Iterable[Any] = ()) -> bool:
    """Call `hook` when the gradient of a tensor in the output of a module is known. Returns whether there is one."""
    known = set(map(id, passed_on))
    tensors = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in known
    ]
    for tensor in tensors:
        tensor.register_hook(hook)
    return bool(tensors)
