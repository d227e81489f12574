# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Layer names of the original publishers, and how rows of diffusers' layers form each layer.

kohya's and ComfyUI's names derive from the publishers' names. Each family defines its table, `original_layers`, in its
own file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Table = Mapping[str, tuple[str, ...]]
"""Publisher's layer name (* for the number of a block) -> layers of diffusers that form its rows, in order."""

QKV = ("to_q", "to_k", "to_v")
ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")


def with_prefixes(original: str, ours: str, layers: Table) -> dict[str, tuple[str, ...]]:
    """The same table with the name of a block prepended to the names of its layers."""
    return {f"{original}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, parts in layers.items()}


class OriginalLayer(NamedTuple):
    """The layer of the original model that contains a given layer of diffusers'."""

    name: str
    parts: tuple[str, ...]
    """All layers of diffusers' that form it, in the order of its rows."""


def original_layers(table: Table, layer: str) -> Iterator[OriginalLayer]:
    """Layers of the original model that contain this layer of diffusers'. The first is the one to write."""
    templates = {layer: ""}
    for number in re.finditer(r"(?<=\.)\d+(?=\.)", layer):
        templates[f"{layer[: number.start()]}*{layer[number.end() :]}"] = number.group()
    for name, parts in table.items():
        for template in templates.keys() & parts:
            block = templates[template]
            yield OriginalLayer(name.replace("*", block), tuple(part.replace("*", block) for part in parts))


def original_layer(table: Table, layer: str) -> OriginalLayer | None:
    """The first of `original_layers`; None if the table has no entry."""
    return next(original_layers(table, layer), None)


def shares_of_parts(parts: Sequence[str]) -> list[int]:
    """Rows of each part of a fused layer, in units of the rows of a query. An MLP has four times as many."""
    return [4 if part.endswith("proj_mlp") else 1 for part in parts]


def swap_shift_and_scale(layer: str, down: Tensor, up: Tensor) -> Tensor:
    """Convert B between the row orders of diffusers and the original model, if they differ. Its own inverse.

    The modulation before a last projection has two chunks instead of six. They are (scale, shift) in diffusers and
    (shift, scale) in the original models: `norm_out`, and `norm1_context` in the last block of SD3.
    """
    is_swapped = layer.endswith(("norm_out.linear", "norm1_context.linear")) and up.shape[0] == 2 * down.shape[1]
    return torch.cat(up.chunk(2)[::-1]) if is_swapped else up
