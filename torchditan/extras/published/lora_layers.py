# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Layer names of the original publishers, and how rows of diffusers' layers form each layer.

kohya's names derive from the publishers' names. Each family defines its table, `original_layers`, in its own file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchditan.registry import FAMILIES, registered

QKV = ("to_q", "to_k", "to_v")
ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")


def with_prefixes(original: str, ours: str, layers: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The same table with the name of a block prepended to the names of its layers."""
    return {f"{original}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, parts in layers.items()}


class OriginalLayer(NamedTuple):
    """The layer of the original model that contains a given layer of diffusers'."""

    name: str
    parts: tuple[str, ...]
    """All layers of diffusers' that form it, in the order of its rows."""


def families_with_original_layers() -> list[str]:
    """Families with known publisher's names, and therefore known kohya names."""
    return [name for name in FAMILIES if registered(FAMILIES, name).original_layers]


def original_layer(model_name: str, layer: str) -> OriginalLayer | None:
    """The layer of the original model that contains this layer of diffusers'; None if the table has no entry."""
    number = re.search(r"(?<=blocks\.)\d+", layer)
    template = re.sub(r"(?<=blocks\.)\d+", "*", layer)
    for name, parts in registered(FAMILIES, model_name).original_layers.items():
        if template in parts:
            block = number.group() if number else ""
            return OriginalLayer(name.replace("*", block), tuple(part.replace("*", block) for part in parts))
    return None


def rows_of_parts(parts: Sequence[str], unit: int) -> list[int]:
    """Rows of each part of a fused layer. `unit` is the width of the model; an MLP has four times as many rows."""
    return [unit * (4 if part.endswith("proj_mlp") else 1) for part in parts]


def swap_shift_and_scale(layer: str, down: Tensor, up: Tensor) -> Tensor:
    """Convert B between the row orders of diffusers and the original model, if they differ. Its own inverse.

    The modulation before a last projection has two chunks instead of six. They are (scale, shift) in diffusers and
    (shift, scale) in the original models: `norm_out`, and `norm1_context` in the last block of SD3.
    """
    is_swapped = layer.endswith(("norm_out.linear", "norm1_context.linear")) and up.shape[0] == 2 * down.shape[1]
    return torch.cat(up.chunk(2)[::-1]) if is_swapped else up
