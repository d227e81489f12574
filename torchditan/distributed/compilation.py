# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torch.compile: of each block or of the whole model, what it cannot be combined with, and where its results are kept.

Notable:
- blocks of one shape share one graph, which compiles quickly. Between blocks run the hooks of `fully_shard`, which
  gather weights and reduce gradients while others compute;
- one graph of the whole model fuses across blocks and has nothing in between. It is one unit of `fully_shard`, so that
  DDP reduces all gradients after the backward pass;
- the results are stored on disk. Ranks, restarts and other runs with the same graphs read them instead of compiling;
- Inductor's mix-order reduction is off where activations are checkpointed. On CUDA it fails there at small batches,
  in `MixOrderReduction.get_numel_rnumel` (seen on torch 2.13; the same assertion is in 2.11 to 2.15).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from torch import nn

from torchditan.config.options import Compile, Config, cache_folder
from torchditan.errors import option_error
from torchditan.run import provenance


def compile_model(model: nn.Module, *, blocks: nn.ModuleList, options: Compile, checkpoints: bool = False) -> None:
    """Compile the forward of every block, or that of the model, in place.

    Args:
        checkpoints: blocks checkpoint their activations.
    """
    # A UNet's blocks have more shapes than the 8 that dynamo gives one function before it calls that a failure.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(blocks))
    chosen: dict[str, Any] = {"mode": options.mode}
    if checkpoints and options.backend == "inductor":  # torch takes a mode or options, not both
        chosen = {"options": {**torch._inductor.list_mode_options(options.mode), "triton.mix_order_reduction": False}}
    for module in [model] if options.scope == "model" else blocks:
        module.forward = torch.compile(module.forward, fullgraph=True, backend=options.backend, **chosen)


def check_compile(config: Config, *, num_shards: int) -> None:
    """Refuse an unknown backend, and what the scope cannot be combined with.

    Args:
        config: with `training.compile`.
        num_shards: ranks that share the weights.
    """
    options = config.compile
    known = torch.compiler.list_backends(exclude_tags=())
    if options.backend not in known:
        raise option_error("compile.backend", options.backend, f"must be one of {', '.join(known)}")
    if options.scope == "model" and (reason := _why_not_one_graph(config, num_shards)) is not None:
        raise option_error("compile.scope", "model", f"{reason}; must be block")


def _why_not_one_graph(config: Config, num_shards: int) -> str | None:
    if num_shards > 1:
        return f"cannot gather the weights that {num_shards} ranks share block by block"
    if config.training.enable_cpu_offload:
        return "cannot fetch the weights of training.enable_cpu_offload block by block"
    if config.lora.rank > 0:
        return "cannot free the frozen weights of a LoRA block by block"
    return None


def compiled_folder(config: Config, *, device: torch.device) -> Path:
    """Folder of compiled code, shared by the runs of a dump folder. CPUs with other instructions have another one."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", provenance.device_name(str(device))).strip("-").lower()
    return cache_folder(config) / "compiled" / name
