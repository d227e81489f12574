# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Layers by their publisher's names, which kohya's are made of, and how rows of diffusers' layers make them up.

A family has its table, `original_layers`, in its own file.
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
    """The same table with the names of a block before those of its layers."""
    return {f"{original}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, parts in layers.items()}


class OriginalLayer(NamedTuple):
    """Where a layer of diffusers' stands in the original model."""

    name: str
    parts: tuple[str, ...]
    """All layers of diffusers' that make it up, in the order of its rows."""


def families_with_original_layers() -> list[str]:
    """Families whose publisher's names are known, and so kohya's."""
    return [name for name in FAMILIES if registered(FAMILIES, name).original_layers]


def original_layer(model_name: str, layer: str) -> OriginalLayer | None:
    """The layer of the original model that has this one of diffusers', None where there is none."""
    number = re.search(r"(?<=blocks\.)\d+", layer)
    template = re.sub(r"(?<=blocks\.)\d+", "*", layer)
    for name, parts in registered(FAMILIES, model_name).original_layers.items():
        if template in parts:
            block = number.group() if number else ""
            return OriginalLayer(name.replace("*", block), tuple(part.replace("*", block) for part in parts))
    return None


def rows_of_parts(parts: Sequence[str], unit: int) -> list[int]:
    """Rows of each part of a fused layer; `unit` is the width of the model, of which an MLP has four."""
    return [unit * (4 if part.endswith("proj_mlp") else 1) for part in parts]


def swap_shift_and_scale(layer: str, down: Tensor, up: Tensor) -> Tensor:
    """B with its rows in the order of the other side, where that is another one; its own inverse.

    A modulation before a last projection, which has two chunks and not six, is (scale, shift) in diffusers and (shift,
    scale) in the original models: `norm_out`, and `norm1_context` in the last block of SD3.
    """
    is_swapped = layer.endswith(("norm_out.linear", "norm1_context.linear")) and up.shape[0] == 2 * down.shape[1]
    return torch.cat(up.chunk(2)[::-1]) if is_swapped else up
