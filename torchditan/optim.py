# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""AdamW, fused or with 8-bit moments, the learning rate as a function of the step, and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchditan.config import LRScheduler, option_error
from torchditan.config import Optimizer as OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, fused or with 8-bit moments; norms, biases and embeddings are not decayed.

    Raises:
        ConfigError: 8-bit moments are torchao's, and it is not installed.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    no_decay = parameters_without_decay(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if name in no_decay else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "AdamW8bit":
        return _adamw_8bit(groups, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torchao's, whose moments are 8-bit in blocks of 256 with a scale each (Dettmers et al. 2022, arXiv 2110.02861).

    Moments of tensors, or of a rank's shards of them, that have under 4096 elements or no whole number of blocks stay
    float32. It compiles one update per shape of parameter, which makes the first step slow.

    Checkpoints hold the 8-bit moments, to the bit; they load on other meshes where the shards end with a block there
    too, as those of published models do.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise option_error("optimizer.name", config.name, "needs torchao; pip install 'torchditan[float8]'") from None

    class ShardedAdamW8bit(AdamW8bit):
        def step(self, closure: Any = None) -> Any:
            # AOTAutograd's cache on disk is keyed by the global shape of a sharded parameter. Ranks whose shards have
            # different sizes would load each other's graphs. Inductor's own cache is keyed by the local shapes.
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return super().step(closure)

    optimizer: torch.optim.Optimizer = ShardedAdamW8bit(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )

    def as_tensors(*_: Any) -> None:
        # A number would be compiled into the update, once for each learning rate; torchao refuses it.
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    optimizer.register_step_pre_hook(as_tensors)
    return optimizer


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


def learning_rate(step: int, *, steps: int, peak: float, config: LRScheduler) -> float:
    """Learning rate of a step.

    Args:
        step: 1 for the first optimizer step.
        steps: steps of the whole run.
        peak: learning rate after warmup.
        config: linear warmup over `warmup_steps`, then the schedule; `wsd` stays constant and falls
            linearly over the last `decay_ratio` of all steps (Hu et al. 2024, arXiv 2404.06395).
            A decay reaches its minimum one step after the run, since a last step with rate 0 learns nothing;
            with `decay_until` "last_step" at the last step.
    """
    warmup = config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, round(steps * (1 - config.decay_ratio)))
    end = steps + 1 if config.decay_until == "after_last_step" else steps
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    decay = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - progress,
    }[config.schedule]
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * decay)


def clip_grad_norm(parameters: list[nn.Parameter], *, max_norm: float) -> torch.Tensor:
    """Clip the gradients to a global norm over all ranks, on the device.

    Args:
        parameters: those with gradients.
        max_norm: 0 measures and does not clip.

    Returns:
        The norm before clipping, a scalar; not finite where any gradient of any rank is not.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm
