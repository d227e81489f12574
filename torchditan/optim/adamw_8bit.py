# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torchao's AdamW with 8-bit moments, for sharded parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchditan.config.optional_libraries import import_optional
from torchditan.config.options import Optimizer as OptimizerConfig
from torchditan.optim.optimizers import ParameterGroup, adam_options


def adamw_8bit(config: OptimizerConfig) -> list[ParameterGroup]:
    """torchao's AdamW with 8-bit moments, a scale per block of 256 (Dettmers et al. 2022, arXiv 2110.02861).

    Moments stay float32 for tensors or shards with fewer than 4096 elements or a partial block. The optimizer compiles
    one update per parameter shape, which makes the first step slow.

    Checkpoints store the 8-bit moments exactly. They load on another mesh if its shards also end at a block boundary,
    as those of published models do.
    """
    return [ParameterGroup(_sharded_adamw_8bit, adam_options(config), state_bytes=_state_bytes_of_8_bits)]


def _state_bytes_of_8_bits(shape: tuple[int, ...]) -> int:
    """Two moments of one byte, each with a scale for every 256 values and a table of 256 values; and the step."""
    size, float32 = math.prod(shape), 4
    if size < 4096 or size % 256:
        return 2 * float32 * size + float32
    return 2 * (size + float32 * (size // 256) + float32 * 256) + float32


def _sharded_adamw_8bit(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    optim: Any = import_optional("torchao.optim", extra="float8")

    class ShardedAdamW8bit(optim.AdamW8bit):
        def step(self, closure: Any = None) -> Any:
            # AOTAutograd's disk cache uses the global shape of a sharded parameter as its key. Ranks with shards of
            # different sizes would load each other's graphs. Inductor's own cache uses local shapes.
            with torch._functorch.config.patch(enable_autograd_cache=False):
                return super().step(closure)

    optimizer: torch.optim.Optimizer = ShardedAdamW8bit(parameters, **options)

    def as_tensors(*_: Any) -> None:
        # With a number, the update would be compiled again for each learning rate. torchao refuses numbers.
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    optimizer.register_step_pre_hook(as_tensors)
    return optimizer
