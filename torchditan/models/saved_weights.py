# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The weights of a model as they are stored: one list for checkpoints, averages, exports, imports and loads.

Notable:
- the list has every parameter and every persistent buffer (SD3's table of positions), by its name in the bare model;
- an average holds the parameters alone, since training changes no buffer. Averaged weights are complete with the
  buffers that the same checkpoint stores with the raw weights;
- versions before this list exported averaged weights without buffers: a model keeps its own where none is stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchditan.models.initialization import WRAPPERS


def saved_weights(model: nn.Module, *, only_trained: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, sharded as they are; writing into them changes the model.

    Args:
        model: on any device, `meta` included.
        only_trained: the trained parameters alone, as runs of a LoRA store them.
    """
    found = {}
    # FSDP puts the shards back in place of gathered weights when it is asked for a state dict.
    for name, tensor in model.state_dict(keep_vars=True).items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if tensor.requires_grad or not only_trained:
            found[name] = tensor
    return found


def saved_parameters(model: nn.Module, *, only_trained: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of `saved_weights`: what an average averages, and what no stored weights may lack."""
    saved = saved_weights(model, only_trained=only_trained)
    return {name: tensor for name, tensor in saved.items() if isinstance(tensor, nn.Parameter)}


def checkpoint_keys(entries: Iterable[str], *, ema: bool) -> dict[str, str]:
    """Name of each weight in the model -> its key in a checkpoint; {} where the checkpoint lacks these weights.

    Args:
        entries: all keys of the checkpoint.
        ema: averaged weights; else raw ones.
    """
    raw, averaged = (
        {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)} for prefix in ("model.", "ema.")
    )
    if not ema:
        return raw
    return {**raw, **averaged} if averaged else {}
