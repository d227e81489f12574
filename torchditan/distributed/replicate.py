# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One process and DDP: every rank keeps all weights, and computes with copies of them in lower precision.

Notable:
- optimizer, clipping, averages and checkpoints see the float32 weights. During forward and backward the modules hold
  the computing weights instead: copies in the precision of the run, or the same memory if the precisions are equal;
- one foreach call refreshes all copies, in the first forward after an update. `fully_shard` would cast and copy
  parameter by parameter, and again for every micro-batch;
- when the backward pass of a block ends, its gradients move to one buffer in the dtype of the reduction. DDP averages
  the buffer over the ranks while the backward pass continues. The arithmetic is that of `fully_shard`;
- one process in float32 needs none of this: it trains the plain model;
- in DDP the float32 weights are DTensors, with the mesh and placements that `fully_shard` would give them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves


def can_replicate(blocks: nn.ModuleList, mesh: DeviceMesh) -> bool:
    """Whether every rank keeps all weights, and those of the blocks are trained.

    A copy of frozen weights would take more memory than it is worth: `fully_shard` frees it after each use.
    """
    return mesh.size(mesh.ndim - 1) == 1 and all(parameter.requires_grad for parameter in blocks.parameters())


def replicate(
    model: nn.Module, *, blocks: nn.ModuleList, mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype
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
    """
    if mesh.size() > 1:
        _make_dtensors(model, mesh)
    replica = Replica(model, blocks, mesh=mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    added: Any = model
    added.set_requires_gradient_sync = replica.set_requires_gradient_sync
    added.reshard = replica.reshard
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if mesh.size() > 1 or dtypes != {param_dtype} or reduce_dtype != param_dtype:
        replica.register_hooks()


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


@dataclass(frozen=True)
class _Unit:
    """A block, or everything outside the blocks."""

    weights: list[_Weight] = field(default_factory=list)
    buffers: list[_Buffer] = field(default_factory=list)
    """Those whose reduction has not started. Weights that get their first gradient later have their own."""


class Replica:
    """Exchanges the float32 weights of a model and its computing weights. See the functions above."""

    def __init__(
        self,
        model: nn.Module,
        blocks: nn.ModuleList,
        *,
        mesh: DeviceMesh,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.mesh = mesh
        self.group = mesh.get_group(0) if mesh.size() > 1 else None
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.syncs = True
        self._units: list[_Unit] = []
        """The blocks, then the rest. Made in the first forward, when the weights have memory."""
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        """The computing weights with their own memory, and what they are copies of."""
        self._is_computing = False
        self._is_fresh = False
        self._has_callback = False
        self._current_block: int | None = None
        self._reductions: deque[tuple[_Buffer, dist.Work]] = deque()

    def register_hooks(self) -> None:
        self.model.register_forward_pre_hook(self._before_forward, prepend=True)
        self.model.register_forward_hook(self._after_forward, always_call=True)
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(functools.partial(self._after_block, number))
        # Whoever asks for the weights may write to them.
        self.model.register_state_dict_pre_hook(lambda *_: self.reshard())
        self.model.register_load_state_dict_pre_hook(lambda *_: self.reshard())

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backward pass completes the gradients. Before that, each rank adds up its own."""
        self.syncs = requires_gradient_sync

    def reshard(self) -> None:
        """Show the float32 weights, and copy them again in the next forward."""
        self._is_fresh = False
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
        unit_of = {parameter: i for i, block in enumerate(self.blocks) for parameter in block.parameters()}
        self._units = [_Unit() for _ in range(len(self.blocks) + 1)]
        for master, places in _places(self.model).items():
            local = (master.to_local() if isinstance(master, DTensor) else master).detach()
            tensor = local
            if local.is_floating_point() and local.dtype != self.param_dtype:
                tensor = torch.empty_like(local, dtype=self.param_dtype)
                for tensors, each in zip(self._copies, (tensor, local), strict=True):
                    tensors.append(each)
            weight = _Weight(master, nn.Parameter(tensor, requires_grad=master.requires_grad), places)
            self._units[unit_of.get(master, -1)].weights.append(weight)

    @torch.no_grad()
    def _refresh(self) -> None:
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)
        self._is_fresh = True

    def _before_forward(self, *_: Any) -> None:
        if not self._units:
            self._prepare()
        if not self._is_fresh:
            self._refresh()
        self._has_callback = False  # also after a backward pass that failed
        self._show(computing=True)

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not _hook_gradients(output, self._before_backward):
            self._show(computing=False)

    def _after_block(self, number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        _hook_gradients(output, functools.partial(self._before_backward_of_block, number))

    def _before_backward(self, _gradient: torch.Tensor) -> None:
        if not self._has_callback:
            self._has_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._show(computing=True)  # of an earlier forward, for recomputation

    def _before_backward_of_block(self, number: int, _gradient: torch.Tensor) -> None:
        """The block whose backward pass ran until now has all its gradients."""
        if self._current_block not in (None, number):
            self._take_gradients(self._units[self._current_block])
        self._current_block = number

    def _after_backward(self) -> None:
        for unit in self._units:
            self._take_gradients(unit)
        while self._reductions:
            buffer, work = self._reductions.popleft()
            work.wait()
            self._give_gradients(buffer)
        self._current_block = None
        self._has_callback = False
        self._show(computing=False)
        if self.syncs:
            self._is_fresh = False

    @torch.no_grad()
    def _take_gradients(self, unit: _Unit) -> None:
        """Move the gradients of the computing weights to buffers. Start their reduction in the last micro-batch."""
        if not self.syncs and self.reduce_dtype == self.param_dtype:
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


def _split_like(buffer: torch.Tensor, weights: list[_Weight]) -> list[torch.Tensor]:
    parts = buffer.split([weight.computing.numel() for weight in weights])
    return [part.view(weight.computing.shape) for part, weight in zip(parts, weights, strict=True)]


def _hook_gradients(output: Any, hook: Any) -> bool:
    """Call `hook` when the gradient of a tensor in the output of a module is known. Returns whether there is one."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    for tensor in tensors:
        tensor.register_hook(hook)
    return bool(tensors)
