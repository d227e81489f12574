# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One way to parallelise any model: activation checkpointing -> compile -> fully_shard.

Notable:
- `fully_shard` gives several processes their precision and their communication: FSDP, HSDP and DDP (a mesh with one
  shard). One process trains the plain module, in lower precision by copies of its weights (working_weights.py). All
  modes have float32 master weights and the same precision;
- inputs are not cast (t and x_t stay float32). The patch and timestep embeddings cast them to the dtype of their
  weights;
- compile and checkpointing replace `block.forward` on the instance, so parameter names never change.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from torchditan.config.options import Compile
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.working_weights import compute_in


def parallelize(
    model: nn.Module,
    *,
    blocks: nn.ModuleList,
    mesh: DeviceMesh,
    activation_checkpoint: Literal["none", "full", "selective", "fraction"] = "none",
    selective_ac_option: str = "2",
    checkpoint_fraction: float = 1.0,
    compile: Compile | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    reshard_after_forward: Literal["default", "always", "never"] = "default",
) -> nn.Module:
    """Checkpoint, compile and shard a model in place, usually while it is on the meta device.

    Args:
        model: any module. The parameters outside the blocks form one additional communication unit.
        blocks: the repeated blocks of the model.
        mesh: 1D (shard) or 2D (replicate, shard), see `ParallelDims.build_mesh`.
        activation_checkpoint: see `apply_activation_checkpoint`.
        selective_ac_option, checkpoint_fraction: see `apply_activation_checkpoint`.
        compile: options of torch.compile, or None for eager. A whole model in one graph is one communication unit.
        param_dtype: dtype of the parameters in forward and backward.
        reduce_dtype: dtype in which gradients are reduced over ranks.
        cpu_offload: keep the sharded parameters, gradients and optimizer state in host memory.
        reshard_after_forward: when a model on several shards frees its gathered weights: after the forward pass of each
            block but the last (default) or of each block (always), or after the backward pass (never).
    """
    apply_activation_checkpoint(
        blocks, mode=activation_checkpoint, selective_option=selective_ac_option, fraction=checkpoint_fraction
    )
    if compile is not None:
        from torchditan.distributed.compilation import compile_model

        compile_model(model, blocks=blocks, options=compile, checkpoints=activation_checkpoint != "none")
    is_one_graph = compile is not None and compile.scope == "model"
    units = nn.ModuleList() if is_one_graph else blocks
    if mesh.size() == 1 and not cpu_offload and not _copies_frozen(blocks, param_dtype):
        compute_in(param_dtype, model, blocks=units)
    else:
        shard(
            model,
            blocks=units,
            mesh=mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward,
        )
    return model


def _copies_frozen(blocks: nn.ModuleList, param_dtype: torch.dtype) -> bool:
    """Whether blocks compute with copies of frozen weights. `fully_shard` frees these between forward and backward."""
    frozen = (weight for weight in blocks.parameters() if not weight.requires_grad)
    return any(weight.is_floating_point() and weight.dtype != param_dtype for weight in frozen)


def shard(
    model: nn.Module,
    *,
    blocks: nn.ModuleList,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward: Literal["default", "always", "never"] = "default",
) -> None:
    """Apply `fully_shard` to each block and to the rest of a model. Arguments of `parallelize`."""
    # Some blocks return views of one tensor. The warning concerns in-place writes to views, which this code never does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    num_shards = mesh.size(mesh.ndim - 1)
    uncopied: set[nn.Parameter] = set()
    if num_shards == 1 and not cpu_offload:
        uncopied = _frozen_without_cast(model, blocks=blocks, param_dtype=param_dtype)
    # Resharding after forward frees gathered weights. With one shard these are a copy in another precision, which the
    # backward pass makes again. That pays off only for a copied base: the gradients and moments of trained weights take
    # much more memory than the copy.
    has_copied = any(not weight.requires_grad and weight not in uncopied for weight in blocks.parameters())
    reshard, keeps_last = _reshard_blocks(reshard_after_forward, num_shards=num_shards, has_frozen=has_copied)
    options: Any = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload, "ignored_params": uncopied or None}
    for number, block in enumerate(blocks, start=1):
        own = False if keeps_last and number == len(blocks) else reshard
        fully_shard(block, reshard_after_forward=own, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def _frozen_without_cast(model: nn.Module, *, blocks: nn.ModuleList, param_dtype: torch.dtype) -> set[nn.Parameter]:
    """The frozen weights of a model with a frozen base that `fully_shard` on one shard would only copy."""
    if all(weight.requires_grad for weight in blocks.parameters()):
        return set()
    frozen = (weight for weight in model.parameters() if not weight.requires_grad)
    return {weight for weight in frozen if weight.dtype == param_dtype or not weight.is_floating_point()}


def _reshard_blocks(
    option: Literal["default", "always", "never"], *, num_shards: int, has_frozen: bool
) -> tuple[bool, bool]:
    """Whether blocks reshard after their forward pass, and whether the last one does not."""
    if num_shards == 1:
        return has_frozen, False
    # The backward pass starts with the last block, and would gather at once what its forward pass has just freed.
    return option != "never", option != "always"


def compile_advice(*, float8: bool, device: torch.device) -> str | None:
    """A message if torch.compile would make a job without it faster, else None."""
    if float8:
        return (
            "warning: float8.enable_float8_linear without --training.compile launches about four times as many kernels "
            "as bfloat16 (one for each cast), and is often slower; add --training.compile"
        )
    if device.type == "cuda":
        return "hint: --training.compile fuses kernels and makes most models faster, for a minute of compiling"
    return None


def drop_gathered_weights(model: nn.Module) -> None:
    """Free the full weights that a forward without a backward left behind, after the shards were changed in place.

    The backward pass frees them; until then the next forward would compute with the old ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
