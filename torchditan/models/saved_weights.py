# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The stored weights of a model: one list for checkpoints, averages, exports, imports and loads.

Notable:
- the list contains every parameter and every persistent buffer (SD3's position table), by its name in the bare model;
- an average contains only the parameters, because training changes no buffer. To complete averaged weights, take the
  buffers that the same checkpoint stores with the raw weights;
- weights that only training uses are in checkpoints and averages, but are never exported or loaded elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

TRAINING_ONLY = "heads."
"""Start of the names of weights that only training uses (`Objective.heads`)."""
OPTIONAL = (TRAINING_ONLY, "scalar_embedders.")
"""Start of the names of weights that a source of initial weights may lack: they then start as in a new model."""


def saved_weights(model: nn.Module, *, only_trained: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, sharded like the model. Writing to them changes the model.

    Args:
        model: on any device, `meta` included.
        only_trained: only the trained parameters, as LoRA runs store them.
    """
    # Requesting a state dict makes FSDP replace gathered weights by the shards.
    found = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in found.items() if tensor.requires_grad or not only_trained}


def saved_parameters(model: nn.Module, *, only_trained: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of `saved_weights`: an average contains all of them."""
    saved = saved_weights(model, only_trained=only_trained)
    return {name: tensor for name, tensor in saved.items() if isinstance(tensor, nn.Parameter)}


def required_names(model: nn.Module, *, only_trained: bool = False, are_initial: bool = False) -> set[str]:
    """Names of the weights that a source must contain. Initial weights may lack more (`OPTIONAL`)."""
    optional = OPTIONAL if are_initial else TRAINING_ONLY
    return {name for name in saved_parameters(model, only_trained=only_trained) if not name.startswith(optional)}


def keys_under(prefix: str, entries: Iterable[str]) -> dict[str, str]:
    """Name of each weight -> its key, for the keys that start with `prefix`. Weights for training only are left out."""
    keys = {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)}
    return {name: key for name, key in keys.items() if not name.startswith(TRAINING_ONLY)}


def checkpoint_keys(entries: Iterable[str], *, ema: bool) -> dict[str, str]:
    """Name of each weight in the model -> its key in a checkpoint; {} if the checkpoint lacks these weights.

    Args:
        entries: all keys of the checkpoint.
        ema: averaged weights instead of raw ones.
    """
    raw, averaged = (keys_under(prefix, entries) for prefix in ("model.", "ema."))
    if not ema:
        return raw
    return {**raw, **averaged} if averaged else {}
