# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Optimizers by parameter groups, the learning rate as a function of the step, and gradient clipping.

An optimizer is a function from the `[optimizer]` options to a list of `ParameterGroup`, and a line in
`registry.OPTIMIZERS` (docs/extending.md). Weight decay, saving, resuming and the planner work from the groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchditan.config.options import Optimizer as OptimizerConfig
from torchditan.errors import option_error
from torchditan.optim.ema import local_tensor
from torchditan.registry import OPTIMIZERS, create


@dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters and the optimizer that updates it."""

    optimizer: Callable[..., torch.optim.Optimizer]
    """A class of torch.optim, or a function with the same signature: (parameters or groups of them, **options)."""
    options: dict[str, Any]
    """Its options. If `weight_decay` is among them, norms, biases and embeddings are not decayed."""
    takes: Callable[[str, torch.Tensor], bool] = lambda name, parameter: True
    """Whether a parameter (its name and full shape) belongs to this group. The first matching group takes it."""
    lr_scale: float = 1.0
    """Learning rate of the group, as a multiple of the run's."""
    state_bytes: Callable[[tuple[int, ...]], int] | None = None
    """Bytes of the optimizer state of a parameter or a rank's shard, from its shape, for the planner.
    None: the planner builds the state of each shape on the meta device and counts its bytes."""
    update_flops: Callable[[tuple[int, ...]], int] | None = None
    """FLOPs of the matrix products in the update of a parameter, from its full shape, if there are any. One rank
    computes them; the ranks take turns over parameters of one shape."""


def parameter_groups(config: OptimizerConfig) -> list[ParameterGroup]:
    """The groups of the optimizer named by `optimizer.name`."""
    groups: list[ParameterGroup] = create(OPTIMIZERS, "optimizer.name", config.name, config)
    return groups


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; an `OptimizerParts` if its groups use several optimizers.

    Raises:
        ConfigError: the optimizer needs a library that is not installed, or updates nothing itself.
    """
    groups = parameter_groups(config)
    members: list[dict[str, nn.Parameter]] = [{} for _ in groups]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(groups, name, parameter)][name] = parameter
    with_products = [own for group, own in zip(groups, members, strict=True) if group.update_flops is not None]
    if with_products and not any(with_products):
        raise option_error("optimizer.name", config.name, "finds no matrices in the model's list `blocks`")
    no_decay = parameters_without_decay(model)
    parts = [
        _build_part(group, parameters, no_decay)
        for group, parameters in zip(groups, members, strict=True)
        if parameters
    ]
    return parts[0] if len(parts) == 1 else OptimizerParts(parts)


def group_of(groups: list[ParameterGroup], name: str, parameter: torch.Tensor) -> int:
    found = next((number for number, group in enumerate(groups) if group.takes(name, parameter)), None)
    assert found is not None, f"no group of the optimizer takes {name} {tuple(parameter.shape)}"
    return found


def _build_part(
    group: ParameterGroup, parameters: dict[str, nn.Parameter], no_decay: set[str]
) -> torch.optim.Optimizer:
    decayed = [parameter for name, parameter in parameters.items() if name not in no_decay]
    plain = [parameter for name, parameter in parameters.items() if name in no_decay]
    options = dict(group.options)
    if "weight_decay" not in options:
        decayed, plain = [*parameters.values()], []
    split: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    if (decay := options.pop("weight_decay", None)) is not None:
        split[0]["weight_decay"] = decay
    split = [{**part, "lr_scale": group.lr_scale} for part in split if part["params"]]
    return group.optimizer(split, **options)


class OptimizerParts(torch.optim.Optimizer):
    """Several optimizers as one, each with its own parameters."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        # `Optimizer.__init__` would create its own groups.
        self.parts = parts
        self.defaults = {"fused": all(part.defaults.get("fused") for part in parts)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts. A part replaces its groups when it loads a checkpoint."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            if self.defaults["fused"]:  # set by DivergenceGuard and read by the fused kernels
                setattr(part, "found_inf", getattr(self, "found_inf", None))  # noqa: B010
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def optimizer_parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The parts of an optimizer; an ordinary optimizer is its only part."""
    return optimizer.parts if isinstance(optimizer, OptimizerParts) else [optimizer]


def optimizer_flops(
    config: OptimizerConfig, parameters: Iterable[tuple[str, tuple[int, ...]]], *, num_ranks: int = 1
) -> int:
    """FLOPs of the matrix products of one optimizer step, on the rank with the most of them.

    Args:
        config: the `[optimizer]` options.
        parameters: (name, full shape) of every trained parameter.
        num_ranks: ranks that share the work; 1 counts all of it.
    """
    groups = parameter_groups(config)
    if all(group.update_flops is None for group in groups):
        return 0
    numbers = Counter((group_of(groups, name, torch.empty(shape, device="meta")), shape) for name, shape in parameters)
    return sum(
        math.ceil(count / num_ranks) * update_flops(shape)
        for (number, shape), count in numbers.items()
        if (update_flops := groups[number].update_flops) is not None
    )


def adamw(config: OptimizerConfig) -> list[ParameterGroup]:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), fused."""
    return [ParameterGroup(ShardedAdamW, {**adam_options(config), "fused": True})]


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW on this rank's shards.

    On DTensors the host needs longer to dispatch an update than a GPU to compute it. The parameters and the state stay
    DTensors, so checkpoints do not change.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill the lists of tensors that the update of a group reads and writes."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_tensor, tensors)
        return has_complex


def adam_options(config: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments of the Adam family."""
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Names of the vectors (norms and biases), embedding tables and position or token embeddings of a model."""
    tables = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    owned_by_layers = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
        for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if name in tables or parameter.dim() < 2 or id(parameter) not in owned_by_layers
    }


@torch.no_grad()
def clip_grad_norm(parameters: list[nn.Parameter], *, max_norm: float) -> torch.Tensor:
    """Clip the gradients to a global norm over all ranks, on the device.

    Args:
        parameters: those with gradients, all sharded alike.
        max_norm: 0 measures the norm without clipping.

    Returns:
        The norm before clipping, a scalar; not finite if any gradient of any rank is not finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_tensor(gradient) for gradient in gradients]
    norm = norm_over_ranks(shards, like=gradients)
    if max_norm > 0 and gradients:
        torch._foreach_mul_(shards, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def norm_over_ranks(shards: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm () of all values on all ranks, computed from this rank's shards.

    Args:
        shards: local tensors.
        like: tensors that are sharded as these, all alike: DTensors, or plain ones of one process.
    """
    norm = torch.nn.utils.get_total_norm(shards)  # by foreach kernels, where the device has them
    if not like or not isinstance(like[0], DTensor):
        return norm
    mesh = like[0].device_mesh
    for dim, placement in enumerate(like[0].placements):
        if placement.is_shard() and mesh.size(dim) > 1:
            square = norm.square()
            dist.all_reduce(square, group=mesh.get_group(dim))
            norm = square.sqrt()
    return norm
